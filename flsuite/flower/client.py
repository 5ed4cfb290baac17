"""Any flsuite model as a client of Flower."""

import logging
from typing import Any

from flwr.app import Context, Error, Message, MetricRecord, RecordDict

from flsuite.data.module import FederatedDataModule
from flsuite.engines import InProcess
from flsuite.errors import FlsuiteError
from flsuite.flower.nodes import FAILED, own_client
from flsuite.flower.records import ARRAYS, pack, to_state, unpack, write_update
from flsuite.messages import Broadcast, ClientFailure, FitAssignment, FitRequest
from flsuite.models.base import ClientModel
from flsuite.server.evaluation import Split
from flsuite.state import State, mismatch
from flsuite.trainer import FederatedTrainer

__all__ = ["Site"]

log = logging.getLogger("flsuite")

_MEMORY = "flsuite"
_SPLITS: tuple[Split, ...] = ("val", "test")


class Site:
    """Trains and scores clients where their data is.

    What a client keeps (private entries of the model, the algorithm's notes, optimizers) lies in the context of its node,
    which Flower stores there and never sends. Nothing else is remembered, so that one site serves many simulated nodes.

    Args:
        trainer: With the settings of the run; its rounds, engine and loggers are not used.
        model: What the client trains.
        datamodule: The data, dealt to all clients as on the server.
    """

    def __init__(
        self, trainer: FederatedTrainer, model: ClientModel, datamodule: FederatedDataModule
    ) -> None:
        trainer.writes = False
        self.run = trainer.set_up(model, datamodule)
        self.engine = InProcess(threads=getattr(trainer.engine, "threads", 1))
        self.engine.start(trainer.job(self.run))

    def train(self, message: Message, context: Context) -> Message:
        """One fit. The answer is the update, or an error with the reason why there is none."""
        task = unpack("task", message.content)
        if (client := own_client(context)) != task["client"]:
            raise FlsuiteError(
                f"node {context.node_id} is client {client} and was sent work for client {task['client']}"
            )
        broadcast = Broadcast(
            task["round"], self._shared(message), unpack("received", message.content)
        )
        work = FitRequest(FitAssignment(client, task["batches"]), broadcast, _recall(context))
        (outcome,) = self.engine.run([work])
        outcome = self.run.federation.checked(
            outcome
        )  # what the server would refuse must not be remembered here either
        if isinstance(outcome, ClientFailure):
            log.warning(
                "round %d: client %d failed: %s\n%s",
                outcome.round,
                client,
                outcome.reason,
                outcome.details,
            )
            return Message(Error(FAILED, outcome.reason), reply_to=message)
        _remember(context, outcome.memory)
        return Message(write_update(outcome.update), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Scores of the client's own model, the shared part as received, on each split that there is."""
        client, request = own_client(context), unpack("evaluation", message.content)
        details = request["details"]
        self.run.evaluator.data = self.run.federation.data.at(request["round"])
        state = {
            **self.run.federation.initial,
            **_recall(context).get("model", {}),
            **self._shared(message),
        }
        records = RecordDict()
        for split in _SPLITS:
            found = self.run.evaluator.own(client, state, split, details and split == "test")
            for field, numbers in found._asdict().items() if found else ():
                records[f"{split}.{field}"] = MetricRecord(
                    {name: float(value) for name, value in numbers.items()}
                )
        return Message(records, reply_to=message)

    def _shared(self, message: Message) -> State:
        state = to_state(message.content.array_records[ARRAYS])
        if fault := mismatch(state, self.run.federation.state):
            raise FlsuiteError(
                f"the server's model is not this node's: {fault}; server and nodes must have the same config"
            )
        return state


def _recall(context: Context) -> dict[str, Any]:
    """What the client kept; nothing if that was in another run, whose state Flower may hand on."""
    if _MEMORY not in context.state:
        return {}
    kept = unpack(_MEMORY, context.state)
    return kept["memory"] if kept["run"] == context.run_id else {}


def _remember(context: Context, memory: dict[str, Any]) -> None:
    if memory:
        context.state.update(pack(_MEMORY, {"run": context.run_id, "memory": memory}))
