"""Runs a federation of Flower nodes: the nodes of a grid are an engine and a client store."""

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from flsuite.common.errors import FlsuiteError, log, one_line
from flsuite.common.messages import ClientResult, FitRequest, Outcome, OwnScores, Split
from flsuite.common.state import State
from flsuite.data.module import FederatedDataModule
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.base import Engine
from flsuite.federation.server.evaluation import Evaluator
from flsuite.federation.server.federation import Federation
from flsuite.federation.server.stores import ClientStore, Memory
from flsuite.flower.nodes import REFUSED, Nodes
from flsuite.flower.records import ARRAYS, numbers_in, pack, read_update, to_arrays
from flsuite.models.base import ClientModel
from flsuite.runs.run import Run
from flsuite.runs.session import opened
from flsuite.trainer import FederatedTrainer


def serve(
    grid: Grid,
    trainer: FederatedTrainer,
    model: ClientModel,
    datamodule: FederatedDataModule,
    timeout: float = 3600,
) -> None:
    """Run all rounds of ``trainer`` on the nodes of ``grid`` instead of its engine.

    A round has the same steps as in a fit, so the same seed gives the same weights as on any engine
    of flsuite. A node that is not connected, fails, or sends a faulty update is lost for the round.

    The run folder is the same as after a fit, without the checkpoints for a resume: client memories
    stay on their nodes, and Flower does not pass them to other runs. ``checkpoints/model.ckpt`` is
    the global model.

    Args:
        grid: One node per client.
        trainer: The settings of the run.
        model: Its untrained weights are the first global model.
        datamodule: The server scores on its test split, and plans with the clients' numbers of
            batches.
        timeout: Seconds that a round waits for the nodes' answers.

    Raises:
        FlsuiteError: If the request cannot be fulfilled.
        FederationError: If a round fails.
    """
    run = trainer.prepare(model, datamodule)
    _refuse_unsupported(run)
    federation = run.federation
    nodes = Nodes(grid, federation.data.clients, timeout)
    engine = run.engine = _NodeEngine(nodes, run.settings["client"].get("precision"))

    with opened(run):
        # From here on, private parts are on the nodes.
        federation.clients = _NodeStore(bool(federation.entries.personal))
        if federation.entries.personal:
            run.evaluator = _NodeEvaluator(run.evaluator)
        while not run.finished:
            engine.submit(run.requests(run.begin_round()))
            for outcome in federation.schedule.arrivals(engine, federation.clock, run.requests):
                run.accept(outcome)
            run.advance()
            run.evaluate()
            run.record()
            run.folder.table.append()
            run.store.settle()


def _refuse_unsupported(run: Run) -> None:
    """Refuse settings that a round of Flower cannot carry out."""
    federation, schedule = run.federation, run.federation.schedule
    name = federation.aggregator.name
    faults = {
        f"{name} trains on all clients' data, which no node of Flower holds": (
            federation.aggregator.pools
        ),
        "under Flower rounds are synchronous, and nodes come and go by themselves: set "
        "trainer.schedule to Synchronous without availability, over_selection and deadline": (
            schedule.is_asynchronous or schedule.may_lose
        ),
        "under Flower a round without a client would end the run; set trainer.schedule.sampling to "
        "uniform": schedule.may_be_empty,
        "secure aggregation exchanges keys and shares before and after training, but a round of "
        "Flower has one message to a node and one answer; leave out trainer.secure_sum, or run it "
        "with flsuite fit": federation.uplink.masks,
        "under Flower the clients' models are on their nodes; leave out keep_updates and "
        "from_updates": run.reuse,
        "under Flower clients do not adapt after the last round, and all of them take part; leave "
        "out trainer.adapt_epochs and data.unseen_clients": (
            run.options.adapt_epochs or federation.data.unseen
        ),
    }
    for fault, is_so in faults.items():
        if is_so:
            raise FlsuiteError(fault)


class _NodeEngine(Engine):
    """Trains on the nodes of a grid, and scores the clients' own models there.

    Args:
        nodes: The nodes. The first fits wait until every client is connected.
        precision: The server's precision, which the nodes take.
    """

    def __init__(self, nodes: Nodes, precision: str | int | None) -> None:
        self._grid_nodes = nodes  # not "nodes", so that no record of the engine describes them
        self._precision = precision
        self._requests: dict[int, FitRequest] = {}
        self._answers: dict[int, Message] = {}
        self._scored = 0  # the round of the scores
        self._scores: dict[int, dict[str, OwnScores]] = {}

    def start(self, setup: WorkerSetup) -> None:
        """Do nothing: the nodes set themselves up."""

    def submit(self, requests: Iterable[FitRequest]) -> None:
        """Send the fits of a round to the nodes, and wait for the answers."""
        self._requests = {request.number: request for request in requests}
        if not self._requests:
            return
        broadcast = next(iter(self._requests.values())).broadcast  # one for the whole round
        shared = {ARRAYS: to_arrays(broadcast.state), **pack("received", broadcast.extras)}
        contents = {}
        for request in self._requests.values():
            order = {
                "client": request.client,
                "batches": request.batches,
                "round": broadcast.round,
                "number": request.number,
                "precision": self._precision,
            }
            contents[request.client] = {**shared, **pack("fit", order)}
        self._answers = self._grid_nodes.ask(MessageType.TRAIN, broadcast.round, contents)

    @property
    def pending(self) -> Sequence[int]:
        return list(self._requests)

    def collect(self, number: int) -> Outcome:
        request = self._requests.pop(number)
        client, round = request.client, request.broadcast.round
        if client not in self._grid_nodes.connected:
            return request.failure("its node is not connected")
        answer = self._answers.pop(client, None)
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

    def own_scores(
        self, federation: Federation, clients: Sequence[int]
    ) -> dict[int, dict[str, OwnScores]]:
        """Return the scores of clients' own models by split, with details.

        A node is asked once per round. A client whose node has no answer has no scores.
        """
        round = federation.clock.round
        if self._scored != round:
            self._scored, self._scores = round, {}
        asked = [client for client in clients if client not in self._scores]
        if not asked:
            return self._scores
        received = pack("received", federation.aggregator.broadcast(federation.server))
        request = pack("evaluation", {"round": round, "precision": self._precision})
        content = {ARRAYS: to_arrays(federation.state), **received, **request}
        answers = self._grid_nodes.ask(MessageType.EVALUATE, round, dict.fromkeys(asked, content))
        for client in asked:
            self._scores[client] = {}
            try:
                self._scores[client] = _read_scores(answers.get(client))
            except Exception as error:  # an answer may be anything
                what = round, client, one_line(error, 500)
                log.warning("round %d: client %d was not scored: %s", *what)
        return self._scores


def _read_scores(answer: Message | None) -> dict[str, OwnScores]:
    """Return the scores of a node's own model, by split."""
    if answer is None or answer.has_error():
        raise ValueError("no answer" if answer is None else answer.error.reason)
    fields: dict[str, dict[str, dict[str, float]]] = {}
    for name, numbers in answer.content.metric_records.items():
        split, field = name.split(".")
        fields.setdefault(split, {})[field] = numbers_in(numbers)
    return {split: OwnScores(**own) for split, own in fields.items()}


class _NodeEvaluator(Evaluator):
    """Scores the clients' own models on their nodes.

    Args:
        evaluator: Scores everything else.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        vars(self).update(vars(evaluator))  # with the names of the logged metrics

    def own_rows(
        self,
        federation: Federation,
        split: Split,
        clients: Sequence[int],
        details: bool,
        engine: Any,
    ) -> dict[int, OwnScores]:
        scores: dict[int, dict[str, OwnScores]] = engine.own_scores(federation, clients)
        rows = {client: scores[client][split] for client in clients if split in scores[client]}
        return {c: row if details else row._replace(classes={}) for c, row in rows.items()}


class _NodeStore(ClientStore):
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
