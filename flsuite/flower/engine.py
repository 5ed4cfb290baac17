"""The nodes of a Flower grid as an engine, an evaluator and a client store."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.messages import ClientResult, FitRequest, Outcome, OwnScores, Split
from flsuite.common.state import State
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.base import Engine
from flsuite.federation.server.evaluation import Evaluator
from flsuite.federation.server.federation import Federation
from flsuite.federation.server.stores import ClientStore, Memory
from flsuite.flower.nodes import REFUSED
from flsuite.flower.records import read_update

log = logging.getLogger("flsuite")


def messages(
    kind: str,
    nodes: Mapping[int, int],
    round: int,
    config: ConfigRecord,
    contents: Mapping[int, dict[str, Any]],
) -> list[Message]:
    """Return one message per connected client.

    Args:
        kind: Flower's type of message.
        nodes: Client to node, for connected nodes.
        round: Flower's number of the round.
        config: Flower's config of the round.
        contents: The records for each client.
    """
    head = {"config": ConfigRecord({**config, "server-round": round})}
    return [
        Message(RecordDict({**head, **content}), nodes[client], kind, group_id=str(round))
        for client, content in contents.items()
        if client in nodes
    ]


class NodeEngine(Engine):
    """Trains on the nodes of a grid.

    Flower's loop sends the messages and receives the answers. In between, this behaves like any
    other engine: requests are submitted, and their outcomes are collected.
    """

    def __init__(self) -> None:
        self._requests: dict[int, FitRequest] = {}
        self._nodes: Mapping[int, int] = {}
        self._answers: dict[int, Message] = {}

    def start(self, setup: WorkerSetup) -> None:
        """Do nothing: the nodes set themselves up."""

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self._requests = {request.number: request for request in requests}
        self._answers = {}

    @property
    def pending(self) -> Sequence[int]:
        return list(self._requests)

    def requests(self, nodes: Mapping[int, int]) -> list[FitRequest]:
        """Return the pending requests, to be sent to these nodes."""
        self._nodes = nodes
        return list(self._requests.values())

    def deliver(self, answers: Iterable[Message]) -> None:
        """Store the answers of the nodes."""
        self._answers = by_node(answers)

    def collect(self, number: int) -> Outcome:
        request = self._requests.pop(number)
        client, round = request.client, request.broadcast.round
        if client not in self._nodes:
            return request.failure("its node is not connected")
        answer = self._answers.pop(self._nodes[client], None)
        if answer is None:
            return request.failure("its node did not answer in time")
        if answer.has_error():
            # In later rounds, a single node must not end the run.
            if answer.error.code == REFUSED and round == 1:
                raise FlsuiteError(one_line(answer.error.reason))
            return request.failure(answer.error.reason)

        try:
            update = read_update(answer.content)
        except Exception as error:
            reason = f"its answer cannot be read: {type(error).__name__}: {one_line(error)}"
            return request.failure(reason)
        if (update.client, update.round) != (client, round):
            return request.failure(
                f"its answer is from client {update.client} in round {update.round}"
            )
        update.number = number
        return ClientResult(update, {})


class NodeEvaluator(Evaluator):
    """Scores of the clients' own models, measured on their nodes.

    Attributes:
        asked: The clients that were asked in this round.
        rows: Split to client to scores, for clients that answered.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        vars(self).update(vars(evaluator))  # with the names of the logged metrics
        self.asked: set[int] = set()
        self.rows: dict[str, dict[int, OwnScores]] = {}

    def own_rows(
        self,
        federation: Federation,
        split: Split,
        clients: Sequence[int],
        details: bool,
        engine: Engine | None,
    ) -> dict[int, OwnScores]:
        """Return the scores of these clients. Empty unless all of them were asked."""
        if not self.asked.issuperset(clients):
            log.warning(
                "round %d: not scored on %s data: nodes are asked for scores before callbacks can "
                "stop the run, and not all of these were",
                federation.clock.round,
                split,
            )
            return {}
        answers = self.rows.get(split, {})
        rows = {client: answers[client] for client in clients if client in answers}
        return {c: row if details else row._replace(classes={}) for c, row in rows.items()}


class NodeStore(ClientStore):
    """A client store without memories, which are on the clients' nodes.

    Args:
        personal: Whether models have private parts. Their initial values on the server must not be
            mistaken for the clients' own.
    """

    def __init__(self, personal: bool) -> None:
        super().__init__(None)
        self.is_local = not personal

    def __getitem__(self, client: int) -> Memory:
        """Return an empty memory. The node adds its client's memory."""
        return {}

    def private(self, client: int) -> State:
        if not self.is_local:
            raise FlsuiteError(
                f"the private part of client {client} is on its node; under Flower, leave out "
                "callbacks that need it"
            )
        return {}


def by_node(answers: Iterable[Message]) -> dict[int, Message]:
    """Return the answers by sending node."""
    return {answer.metadata.src_node_id: answer for answer in answers}
