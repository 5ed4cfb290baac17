"""Any flsuite aggregator as a strategy of Flower."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flsuite.engines.base import Outcome
from flsuite.errors import FlsuiteError
from flsuite.flower.nodes import REFUSED, Nodes
from flsuite.flower.records import ARRAYS, numbers_in, pack, read_update, to_arrays, to_state
from flsuite.messages import ClientFailure, ClientResult, FitAssignment
from flsuite.server.client_store import ClientStore
from flsuite.server.evaluation import GLOBAL, OwnScores, Scores, gathered
from flsuite.server.federation import Federation
from flsuite.state import mismatch

__all__ = ["FlowerStrategy"]

log = logging.getLogger("flsuite")


class FlowerStrategy(Strategy):
    """A federation whose clients are the nodes of a Flower grid.

    Cohorts, plans, checks and the order of updates are the federation's own, so that the same seed gives the same weights
    as on any of our engines. A node that is not connected, fails, or sends what is refused costs the round that client.

    Args:
        federation: As it is before its first round.
        notify: Calls the federation's hooks.
        stopped: Whether to leave out the rounds that are left; asked before each.
        evaluate_every: Where clients have models of their own: rounds between two of their evaluations, on their nodes.
        score_clients: Clients that are then asked, unless it is the last round, which asks all.

    Attributes:
        scores: The last round's, of the clients' own models, by split; empty where all share one model.

    Raises:
        FlsuiteError: If the algorithm pools the clients' data, which no node holds.
    """

    def __init__(
        self,
        federation: Federation,
        notify: Callable[..., None] = lambda *_: None,
        stopped: Callable[[], bool] = lambda: False,
        evaluate_every: int = 1,
        score_clients: int = 100,
    ) -> None:
        if federation.aggregator.pooled:
            raise FlsuiteError(
                f"{type(federation.aggregator).__name__} trains on everybody's data, which no node of Flower holds"
            )
        federation.memories = _OnNodes(federation.personal)
        self.federation = federation
        self.notify = notify
        self.stopped = stopped
        self.evaluate_every = evaluate_every
        self.score_clients = score_clients
        self.nodes = Nodes(federation.data.clients)
        self.rounds = 0
        self.scores: dict[str, Scores] = {}
        self._tasks: list[FitAssignment] = []
        self._asked: dict[int, int] = {}

    def initial_arrays(self) -> ArrayRecord:
        """What to pass to :meth:`start`: the global model as it is."""
        return to_arrays(self.federation.state)

    @property
    def idle(self) -> bool:
        """Whether the last round was left out."""
        return not self._tasks

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Flower's own loop of rounds; a second start goes on where the first ended."""
        self.rounds = self.federation.round + num_rounds
        return super().start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def summary(self) -> None:
        log.info(
            "%s of %d clients",
            type(self.federation.aggregator).__name__,
            self.federation.data.clients,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._tasks, self._asked, self.scores = [], {}, {}
        if self.stopped():
            return []
        self._take(arrays)
        nodes = self.nodes.online(grid) if self.federation.round else self.nodes.all(grid)
        broadcast, self._tasks = self.federation.open_round(self.notify)
        shared = {ARRAYS: arrays, **pack("received", broadcast.extras)}
        contents = {}
        for task in self._tasks:
            order = {"client": task.client, "batches": task.batches, "round": broadcast.round}
            contents[task.client] = {**shared, **pack("task", order)}
        return self._messages(MessageType.TRAIN, contents, nodes, config, server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new global model, and the numbers of the round.

        Raises:
            FederationError: As :meth:`Federation.advance`.
            FlsuiteError: If a node says in the first round that the request cannot be met as it stands.
        """
        if not self._tasks:
            return None, None
        self.federation.close_round(self._outcomes(_by_node(replies)), self.notify)
        totals = dict(self.federation.log.metrics())[GLOBAL]
        return to_arrays(self.federation.state), MetricRecord(
            {name: float(value) for name, value in totals.items()}
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Only where clients have models of their own: what is private never leaves its node, so it is scored there."""
        self._asked = {}
        last = self.federation.round >= self.rounds
        due = last or self.federation.round % self.evaluate_every == 0
        if not (self.federation.personal and self._tasks and due):
            return []
        nodes = self.nodes.online(grid)
        content = {
            ARRAYS: arrays,
            **pack("evaluation", {"details": last, "round": self.federation.round}),
        }
        chosen = {
            client: content for client in sorted(nodes) if last or client < self.score_clients
        }
        return self._messages(MessageType.EVALUATE, chosen, nodes, config, server_round)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean over clients of their own models' scores on test data."""
        answers = _by_node(replies)
        rows: dict[str, dict[int, OwnScores]] = {}
        for client, node in self._asked.items():
            try:
                for split, scores in _scores(answers.get(node)).items():
                    rows.setdefault(split, {})[client] = scores
            except Exception as error:
                log.warning(
                    "round %d: client %d was not scored: %s", self.federation.round, client, error
                )
        self.scores = {split: gathered(found) for split, found in rows.items()}
        return MetricRecord(dict(self.scores["test"][GLOBAL])) if "test" in self.scores else None

    def _messages(
        self,
        kind: str,
        contents: dict[int, dict[str, Any]],
        nodes: dict[int, int],
        config: ConfigRecord,
        round: int,
    ) -> list[Message]:
        """One for each client that is connected."""
        self._asked = {client: nodes[client] for client in contents if client in nodes}
        head = {"config": ConfigRecord({**config, "server-round": round})}
        return [
            Message(RecordDict({**head, **contents[client]}), node, kind, group_id=str(round))
            for client, node in self._asked.items()
        ]

    def _take(self, arrays: ArrayRecord) -> None:
        """What Flower holds is the global model: the one that it began with, or the one that was given back last."""
        state = to_state(arrays)
        if fault := mismatch(state, self.federation.state):
            raise FlsuiteError(
                f"initial_arrays are not this model's: {fault}; take strategy.initial_arrays()"
            )
        self.federation.state = state

    def _outcomes(self, answers: dict[int, Message]) -> Iterator[Outcome]:
        """In the order of the tasks, whatever order the answers came in."""
        for task in self._tasks:
            if task.client in self._asked:
                yield self._outcome(task.client, answers.pop(self._asked[task.client], None))
            else:
                yield self._failure(task.client, "its node is not connected")

    def _outcome(self, client: int, answer: Message | None) -> Outcome:
        if answer is None:
            return self._failure(client, "its node did not answer in time")
        if answer.has_error():
            if (
                answer.error.code == REFUSED and not self.federation.round
            ):  # later, one node must not end it for all
                raise FlsuiteError(str(answer.error.reason))
            return self._failure(client, str(answer.error.reason))
        try:
            update = read_update(answer.content)
        except Exception as error:
            return self._failure(
                client, f"its answer cannot be read: {type(error).__name__}: {error}"
            )
        if (update.client, update.round) != (client, self.federation.round + 1):
            return self._failure(
                client, f"its answer is that of client {update.client} in round {update.round}"
            )
        return ClientResult(update, {})

    def _failure(self, client: int, reason: str) -> ClientFailure:
        return ClientFailure(client, self.federation.round + 1, reason)


class _OnNodes(ClientStore):
    """What clients keep lies on their nodes; the server has none of it, and must not take the initial values for it."""

    def __init__(self, personal: bool) -> None:
        super().__init__(None)
        self.personal = personal
        self.at_hand = not personal

    def __getitem__(self, client: int) -> dict[str, Any]:
        if self.personal:
            raise FlsuiteError(
                f"the private part of client {client} lies on its node; under Flower, leave out callbacks that need it"
            )
        return {}


def _by_node(answers: Iterable[Message]) -> dict[int, Message]:
    return {answer.metadata.src_node_id: answer for answer in answers}


def _scores(answer: Message | None) -> dict[str, OwnScores]:
    """What a node sent of its own model, by split."""
    if answer is None or answer.has_error():
        raise ValueError("no answer" if answer is None else answer.error.reason)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, numbers in answer.content.metric_records.items():
        split, field = name.split(".")
        found.setdefault(split, {})[field] = numbers_in(numbers)
    return {split: OwnScores(**fields) for split, fields in found.items()}
