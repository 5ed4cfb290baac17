"""A Flower client for any flsuite model."""

from typing import Any

from flwr.app import Context, Error, Message, MetricRecord, RecordDict

from flsuite.aggregators.objectives.checks import own_entries_of
from flsuite.common.errors import FlsuiteError, log
from flsuite.common.messages import Broadcast, FitRequest, Split
from flsuite.common.state import State, mismatch
from flsuite.data.module import FederatedDataModule
from flsuite.federation.engines.base import InProcess
from flsuite.flower.nodes import FAILED, own_client
from flsuite.flower.records import ARRAYS, pack, to_state, unpack, write_update
from flsuite.models.base import ClientModel
from flsuite.runs.preparation import make_evaluator, set_precision, worker_setup
from flsuite.trainer import FederatedTrainer

_MEMORY = "flsuite"
_SPLITS: tuple[Split, ...] = ("val", "test")


class Site:
    """Trains and scores clients where their data is.

    A client's memory (private entries of the model, the algorithm's notes, optimizers) is in the
    context of its node. Flower stores it there and never sends it. A site keeps no other state, so
    one site serves many simulated nodes. Lightning callbacks have the state that the node's config
    gives them. Their state on the server is not sent.

    Args:
        trainer: The settings of the run. Its rounds, engine and loggers are not used.
        model: The model to train.
        datamodule: The data, split among all clients like on the server.
    """

    def __init__(
        self, trainer: FederatedTrainer, model: ClientModel, datamodule: FederatedDataModule
    ) -> None:
        trainer.writes = False
        self._trainer, self._datamodule = trainer, datamodule
        self._run = trainer.prepare(model, datamodule)
        self._engine = InProcess(threads=getattr(trainer.engine, "threads", 1))
        self._engine.start(worker_setup(trainer, self._run))

    def train(self, message: Message, context: Context) -> Message:
        """Fit one client, and answer with its update or the reason of a failure.

        Raises:
            FlsuiteError: If the request is for another client or another model.
        """
        order = unpack("fit", message.content)
        if (client := own_client(context)) != order["client"]:
            raise FlsuiteError(
                f"node {context.node_id} is client {client} and was sent a fit of client "
                f"{order['client']}"
            )
        self._follow(order["precision"])
        received, callbacks = unpack("received", message.content), self._run.callbacks.for_clients()
        broadcast = Broadcast(order["round"], self._shared(message), received, callbacks)
        memory = _recall(context)
        request = FitRequest(order["number"], client, broadcast, memory, order["batches"])

        self._engine.submit([request])
        outcome = self._engine.collect(request.number)
        # Do not keep the memory of a fit that the server would refuse.
        result = self._run.federation.uplink.checked(outcome, broadcast)
        if result.failed:
            what = result.round, client, result.reason, result.details
            log.warning("round %d: client %d failed: %s\n%s", *what)
            return Message(Error(FAILED, result.reason), reply_to=message)
        # Send the packed update, which the server unpacks itself.
        assert not outcome.failed
        _remember(context, outcome.memory)
        return Message(write_update(outcome.update), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Score the client's own model on every split, with the received shared part."""
        client, request = own_client(context), unpack("evaluation", message.content)
        self._follow(request["precision"])
        federation, evaluator = self._run.federation, self._run.evaluator
        evaluator = evaluator.at(federation.data.at(request["round"]))
        shared, memory = self._shared(message), _recall(context)
        received = unpack("received", message.content).get("objective", {})
        model = {**federation.initial, **shared}
        read = shared, received, memory.get("objective", {})
        own = own_entries_of(federation.aggregator.objective, *read, model)
        state = {**model, **memory.get("model", {}), **own}

        records = RecordDict()
        for split in _SPLITS:
            # Always with details, because a callback may end the run with this round, whose scores
            # then include the accuracy per class.
            scores = evaluator.own(client, state, split, details=split == "test")
            for field, numbers in scores._asdict().items() if scores else ():
                values = {name: float(value) for name, value in numbers.items()}
                records[f"{split}.{field}"] = MetricRecord(values)
        return Message(records, reply_to=message)

    def _follow(self, precision: str | int | None) -> None:
        """Take the precision of the server, which another CPU may have decided."""
        if self._trainer.client_kwargs.get("precision") == precision:
            return
        set_precision(self._trainer, precision)
        old, own = self._run.evaluator, (self._trainer, self._trainer.client_kwargs)
        self._run.evaluator = make_evaluator(
            old.model, self._datamodule, *own, seed=old.seed, attack=old.attack
        )
        self._engine.stop()
        self._engine.start(worker_setup(self._trainer, self._run))

    def _shared(self, message: Message) -> State:
        state = to_state(message.content.array_records[ARRAYS])
        if fault := mismatch(state, self._run.federation.state):
            raise FlsuiteError(
                f"the server's model is not this node's: {fault}; server and nodes must have the "
                "same config"
            )
        return state


def _recall(context: Context) -> dict[str, Any]:
    """Return the client's memory of this run, ignoring other runs."""
    if _MEMORY not in context.state:
        return {}
    kept = unpack(_MEMORY, context.state)
    return kept["memory"] if kept["run"] == context.run_id else {}


def _remember(context: Context, memory: dict[str, Any]) -> None:
    if memory:
        context.state.update(pack(_MEMORY, {"run": context.run_id, "memory": memory}))
