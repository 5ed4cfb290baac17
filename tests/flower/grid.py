"""A Flower grid in this process, and the federations that the tests run on it."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from lightning.pytorch import LightningModule
from torch import Tensor

from flsuite.aggregators import Aggregator
from flsuite.data import FederatedDataModule, TaskSequence
from flsuite.flower.app import client_app, make_client_app
from flsuite.flower.client import Site
from flsuite.flower.server import serve
from flsuite.models import ACVAE, CNN, Classifier, FusedSpaceFed
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, state, trainer
from tests.federation.absent import WithoutOne
from tests.federation.engines.test_processes import TinyConv
from tests.federation.server.test_federation import Recorder
from tests.plain import Reader


def travelled(message: Message) -> Message:
    """Return a message after Flower's serialization."""
    return message_from_proto(message_to_proto(message))


class Nodes(Grid):  # type: ignore[misc]
    """A grid whose nodes run their app in this process.

    All messages go through Flower's serialization, and answers come in a random order.

    Args:
        clients: Number of clients, one node each.
        app: The app that the nodes run.
        tamper: Receives round, client and answer, and returns the changed answer or ``None``.

    Attributes:
        contexts: Node to its context.
        answers: Client and answer of every fit, as sent.
    """

    def __init__(
        self,
        clients: int,
        app: Any = client_app,
        tamper: Callable[[int, int, Message], Message | None] | None = None,
    ) -> None:
        self.app = app
        self.tamper = tamper
        # Neither the numbers of nodes nor their order are those of the clients.
        assert clients % 3, "another factor, or two clients have one node"
        numbers = {client: 1000 + 7 * (client * 3 % clients) for client in range(clients)}
        self.contexts = {
            node: self.context(node, client, clients) for client, node in numbers.items()
        }
        self.answers: list[tuple[int, Message]] = []
        self.begin(1)

    @staticmethod
    def context(node: int, client: int, clients: int) -> Context:
        """Return the context of a node that is this client."""
        own = {"partition-id": client, "num-partitions": clients}
        return Context(1, node, own, RecordDict(), {})

    def begin(self, run: int) -> None:
        """Begin another run on nodes with the state of the previous run, as in Flower."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 0, 0
        for context in self.contexts.values():
            context.run_id = run

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Any: ...

    def push_messages(self, messages: Iterable[Message]) -> Any: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Any: ...

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        answers = [self._answer(travelled(message)) for message in messages]
        arrived = [travelled(answer) for answer in answers if answer is not None]
        random.Random(len(self.answers)).shuffle(arrived)
        return arrived

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        context = context_from_proto(context_to_proto(self.contexts[node]))
        answer = self.app(message, context)
        self.contexts[node] = context
        client = context.node_config["partition-id"]
        if message.metadata.message_type == "train":
            self.answers.append((client, answer))
            if self.tamper is not None:
                answer = self.tamper(int(message.metadata.group_id or 0), client, answer)
        return answer


def convolution() -> Classifier:
    return Classifier(TinyConv(), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def fused() -> FusedSpaceFed:
    return FusedSpaceFed(backbone=CNN(channels=(2, 4), hidden=(8,)), latent_dim=4)


def personal() -> Classifier:
    """Return a classifier whose last layer stays on its node."""
    return classifier(private=["network.3"])


def autoencoder() -> ACVAE:
    return ACVAE(latent_dim=4, width=4)


def plain() -> LightningModule:
    """Return a plain module without anything of flsuite."""
    torch.manual_seed(0)
    return Reader()


def unscaled() -> FederatedDataModule:
    """Return small data within [0, 1], as autoencoders need it."""
    return digits(standardize=False, train_samples=200)


def many() -> FederatedDataModule:
    """Return clients of which two make up a part of the cohort."""
    return digits(clients=46)


def tasks() -> FederatedDataModule:
    return TaskSequence(unscaled(), tasks=2, classes_per_task=3, rounds_per_task=1)


def node_app(
    model: Callable[[], LightningModule],
    data: Callable[[], FederatedDataModule] = unscaled,
    **kwargs: Any,
) -> Any:
    """Return an app whose nodes share one site, as in one process."""
    site = Site(trainer(**kwargs), model(), data())
    return make_client_app(lambda context: site)


def both(
    model: Callable[[], LightningModule],
    algorithm: Callable[[], Aggregator],
    tamper: Any = None,
    data: Callable[[], FederatedDataModule] = unscaled,
    clients: int = 5,
    **kwargs: Any,
) -> tuple[FederatedTrainer, FederatedTrainer, Nodes]:
    """Run the same federation on our own engine and under Flower."""
    kwargs = {"rounds": 2, **kwargs}
    ours = trainer(aggregator=algorithm(), **kwargs)
    ours.fit(model(), data())

    theirs = trainer(aggregator=algorithm(), **kwargs)
    grid = Nodes(clients, node_app(model, data, aggregator=algorithm(), **kwargs), tamper)
    serve(grid, theirs, model(), data())
    return ours, theirs, grid


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """Return type, shape and bytes of a tensor, for comparison bit for bit."""
    tensor = tensor.detach().contiguous()
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def check_round_without_client_1(
    grid: Nodes, reason: str, rounds: int = 2, callbacks: Sequence[Any] = ()
) -> None:
    """Run a few rounds. Round 2 must proceed as if client 1 were not in its cohort.

    Args:
        grid: The nodes. They train the classifier by FedAvg.
        reason: Part of the reason that is recorded for the client.
        rounds: Number of rounds.
        callbacks: Further callbacks of the run.
    """
    recorder = Recorder()
    made = trainer(rounds=rounds, callbacks=[recorder, *callbacks])
    serve(grid, made, classifier(), unscaled())
    (failure,) = recorder.failures
    assert (failure.client, failure.round) == (1, 2) and reason in failure.reason

    assert equal_states(state(made), _without_client_1(rounds))


@cache
def _without_client_1(rounds: int) -> dict[str, Tensor]:
    made = trainer(rounds=rounds, schedule=WithoutOne())
    made.fit(classifier(), unscaled())
    return state(made)
