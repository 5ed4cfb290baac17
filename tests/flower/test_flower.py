"""Under Flower comes out what comes out without it."""

import ipaddress
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from flsuite.aggregators import (
    CMGA,
    SCAFFOLD,
    Aggregator,
    Centralized,
    FedAdam,
    FedAvg,
    FedProx,
    LocalOnly,
)
from flsuite.callbacks import FederationCallback, GradientDissimilarity
from flsuite.client.lr_decay import ExponentialDecay
from flsuite.commands.main import main
from flsuite.data import FederatedDataModule, TaskSequence
from flsuite.errors import FederationError, FlsuiteError
from flsuite.messages import ClientFailure, ClientUpdate
from flsuite.models import ACVAE, Classifier, ClientModel, FusedSpaceFed, ResNet20
from flsuite.models.backbones import Backbone
from flsuite.schedules import Synchronous
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from flsuite.flower.app import client_app, make_client_app, server_app
from flsuite.flower.client import Site
from flsuite.flower.nodes import REFUSED, own_client
from flsuite.flower.records import pack, read_update, to_arrays, to_state, unpack, write_update
from flsuite.flower.server import serve
from flsuite.flower.strategy import FlowerStrategy

EXAMPLE = Path(__file__).parents[2] / "configs" / "flower"

# Records

TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(5, dtype=torch.float64),
    "float16": torch.randn(5).half(),
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(2**62), 2**62]),
    "int32": torch.arange(4, dtype=torch.int32),
    "uint8": torch.arange(256).to(torch.uint8),
    "complex": torch.randn(3, dtype=torch.complex64),
    "counter": torch.tensor(7),
    "no_dimension": torch.tensor(3.5),
    "no_dimension_bfloat16": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "empty_bfloat16": torch.zeros(0, 3, dtype=torch.bfloat16),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "strided": torch.randn(10)[::3],
    "expanded": torch.randn(1, 4).expand(3, 4),
    "not_finite": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "parameter": nn.Parameter(torch.randn(2)),
}


def bits(tensor: Tensor) -> tuple[Any, ...]:
    tensor = tensor.detach().contiguous()
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def sent(content: RecordDict) -> RecordDict:
    """What arrives of it."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    return message_from_proto(message_to_proto(Message(content, 1, "train"))).content


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_survive(name: str) -> None:
    before = bits(TENSORS[name])
    got = to_state(
        sent(RecordDict({"arrays": to_arrays({name: TENSORS[name]})})).array_records["arrays"]
    )[name]
    assert type(got) is Tensor and bits(got) == before
    got.zero_()  # a copy of its own, and writable
    assert bits(TENSORS[name]) == before


def test_nested_data_survives() -> None:
    tree = {
        "control": {"fc.weight": torch.randn(2), "fc.bias": torch.tensor(1)},
        "optimizers": [
            {
                "state": {0: {"step": 3}},
                "param_groups": [{"betas": (0.9, 0.999), "fused": None, "lr": 1 / 3}],
            }
        ],
        "numbers": [1, 2**70, -0.0, float("inf"), True, "text", None],
        "empty": [{}, [], ()],
    }
    got = unpack("extras", sent(RecordDict(pack("extras", tree))))
    assert torch.equal(got["control"].pop("fc.weight"), tree["control"].pop("fc.weight"))
    assert torch.equal(got["control"].pop("fc.bias"), tree["control"].pop("fc.bias"))
    assert repr(got) == repr(tree)


def test_an_update_survives() -> None:
    counts, state = torch.tensor([3, 4]), {"w": torch.randn(2), "n": torch.tensor(5)}
    update = ClientUpdate(
        2, 3, 7, 10, counts, state, {"c": {"w": torch.ones(2)}}, {"loss": 1 / 3}, 12, 20, 0.25
    )
    got = read_update(sent(write_update(update)))
    assert equal_states(got.state, update.state) and torch.equal(got.class_counts, counts)
    assert equal_states(got.extras["c"], update.extras["c"]) and got.metrics == update.metrics
    assert (
        got.client,
        got.round,
        got.samples,
        got.steps,
        got.bytes_up,
        got.bytes_down,
        got.seconds,
    ) == (
        2,
        3,
        7,
        10,
        12,
        20,
        0.25,
    )


def test_what_is_not_plain_data_is_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"extras\.deep\[0\] is a Linear: only tensors"):
        pack("extras", {"deep": [nn.Linear(1, 1)]})


def test_nothing_that_is_read_is_executed() -> None:
    import io
    import pickle

    import numpy as np

    class Bomb:
        def __reduce__(self) -> Any:
            return os.abort, ()

    file = io.BytesIO()
    np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)
    for array in (
        Array("object", (1,), "numpy.ndarray", file.getvalue()),
        Array("x", (1,), "pickle", pickle.dumps(Bomb())),
    ):
        with pytest.raises((TypeError, ValueError)):
            to_state(ArrayRecord({"w": array}))
    with pytest.raises(ValueError):
        unpack(
            "x",
            RecordDict({"x": ConfigRecord({"tree": '{"object": 1}'}), "x.tensors": ArrayRecord()}),
        )


# Nodes in this process


class Nodes(Grid):  # type: ignore[misc]
    """A grid whose nodes run their app here; all goes through Flower's serialization, and answers come in no order.

    Args:
        clients: One node each.
        app: What nodes run.
        tamper: Changes, or takes away, an answer on its way: round, client, answer.
    """

    def __init__(
        self,
        clients: int,
        app: Any = client_app,
        tamper: Callable[[int, int, Message], Message | None] | None = None,
    ) -> None:
        self.app = app
        self.tamper = tamper
        self.contexts = {
            1000 + 7 * (c * 3 % clients): self._context(1000 + 7 * (c * 3 % clients), c, clients)
            for c in range(clients)
        }
        self.answers: list[tuple[int, Message]] = []
        self.begin(1)

    @staticmethod
    def _context(node: int, client: int, clients: int) -> Context:
        return Context(
            1, node, {"partition-id": client, "num-partitions": clients}, RecordDict(), {}
        )

    def begin(self, run: int) -> None:
        """Another run on the same nodes, which Flower gives the state that the last one left."""
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
        found = [
            self._answer(message_from_proto(message_to_proto(message))) for message in messages
        ]
        found = [answer for answer in found if answer is not None]
        random.Random(len(self.answers)).shuffle(found)
        return found

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        context = context_from_proto(context_to_proto(self.contexts[node]))
        answer = self.app(message, context)
        self.contexts[node] = context
        client = context.node_config["partition-id"]
        if message.metadata.message_type == "train":
            self.answers.append((client, answer))
            if self.tamper is not None:
                answer = self.tamper(int(message.metadata.group_id), client, answer)
        return None if answer is None else message_from_proto(message_to_proto(answer))


class TinyConv(Backbone):
    """A convolution, BatchNorm and dropout, which draws from the global generator."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        conv = nn.Conv2d(shape[0], 4, 3, padding=1)
        return nn.Sequential(
            conv,
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(256, outputs),
        )


def convolution() -> Classifier:
    return Classifier(TinyConv(), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def fused() -> FusedSpaceFed:
    return FusedSpaceFed(backbone=ResNet20(width=4), latent_dim=4)


def autoencoder() -> ACVAE:
    return ACVAE(latent_dim=4, width=4)


def dealt() -> FederatedDataModule:
    return digits(standardize=False)


def tasks() -> FederatedDataModule:
    return TaskSequence(dealt(), tasks=2, classes_per_task=3, rounds_per_task=1)


def node_app(
    model: Callable[[], ClientModel], data: Callable[[], FederatedDataModule] = dealt, **kwargs: Any
) -> Any:
    """An app whose nodes share a process, and so a site."""
    site = Site(trainer(**kwargs), model(), data())
    return make_client_app(lambda context: site)


def both(
    model: Callable[[], ClientModel],
    algorithm: Callable[[], Aggregator],
    tamper: Any = None,
    data: Callable[[], FederatedDataModule] = dealt,
    **kwargs: Any,
) -> tuple[FederatedTrainer, FederatedTrainer, Nodes]:
    """The same federation on our own engine and under Flower."""
    kwargs = {"rounds": 2, **kwargs}
    ours, theirs = (
        trainer(aggregator=algorithm(), **kwargs),
        trainer(aggregator=algorithm(), **kwargs),
    )
    ours.fit(model(), data())
    grid = Nodes(5, node_app(model, data, aggregator=algorithm(), **kwargs), tamper)
    serve(grid, theirs, model(), data())
    return ours, theirs, grid


def state(made: FederatedTrainer) -> dict[str, Tensor]:
    assert made.federation is not None
    return made.federation.state


def table(made: FederatedTrainer) -> dict[tuple[Any, ...], float]:
    """All numbers of a run but times."""
    timeless = (row for row in made.run.folder.table.rows if row[5] != "seconds")
    return {(row[0], *row[3:6]): row[6] for row in timeless}


@pytest.mark.parametrize(
    ("model", "algorithm", "kwargs"),
    [
        (classifier, FedAvg, {}),
        (classifier, lambda: FedAdam(lr=0.01), {}),
        (classifier, lambda: FedProx(mu=0.1), {"evaluate_every": 2}),
        (classifier, SCAFFOLD, {"rounds": 3, "schedule": Synchronous(0.6)}),
        (classifier, LocalOnly, {}),
        (convolution, FedAvg, {"buffers": "local"}),
        (
            convolution,
            FedAvg,
            {"buffers": "reset", "keep_optimizers": True, "lr_decay": ExponentialDecay(gamma=0.5)},
        ),
        (fused, lambda: SCAFFOLD(control="mean_gradient"), {}),
        (
            fused,
            FedAvg,
            {"rounds": 3, "schedule": Synchronous(2), "score_clients": 3, "evaluate_every": 2},
        ),
        (autoencoder, CMGA, {}),
        (classifier, FedAvg, {"data": tasks}),
    ],
    ids=[
        "fedavg",
        "fedadam",
        "fedprox",
        "scaffold_three_of_five",
        "local_only",
        "local_buffers",
        "kept_optimizers_falling_rate",
        "private_encoder_and_scaffold",
        "private_encoder_two_of_five",
        "cmga",
        "tasks",
    ],
)
def test_the_same_weights_and_scores_as_our_own_engine(
    model: Any, algorithm: Any, kwargs: dict[str, Any]
) -> None:
    ours, theirs, _ = both(model, algorithm, **kwargs)
    assert equal_states(state(ours), state(theirs))
    mine, yours = table(ours), table(theirs)
    assert mine.keys() == yours.keys()
    assert all(mine[key] == pytest.approx(yours[key], abs=1e-9, nan_ok=True) for key in mine)


def test_tasks_of_models_that_stay_on_their_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """The matrix needs every client's whole model; the federation does not: it goes on without, and says so."""
    ours, theirs, _ = both(fused, FedAvg, data=tasks)
    assert equal_states(state(ours), state(theirs))
    assert "no accuracy by task" in caplog.text
    assert not any("task_accuracy" in key[3] for key in table(theirs)) and any(
        "task_accuracy" in key[3] for key in table(ours)
    )


def tensors_in(records: RecordDict) -> Iterator[tuple[str, Tensor]]:
    for record in records.array_records.values():
        yield from to_state(record).items()


@pytest.mark.parametrize("control", ["model", "algorithm"])
def test_what_is_private_never_leaves_its_node(control: str) -> None:
    model, algorithm = (fused, FedAvg) if control == "model" else (classifier, SCAFFOLD)
    _, _, grid = both(model, algorithm)
    kept = {
        c.node_config["partition-id"]: unpack("flsuite", c.state)["memory"]
        for c in grid.contexts.values()
    }
    assert kept.keys() == set(range(5)) and all(
        set(memory) == {control} for memory in kept.values()
    )
    private = kept[0]["model"] if control == "model" else kept[0]["algorithm"]["control"]
    names = set(private) if control == "model" else set()
    assert names == {name for name in names if name.startswith("encoder.")} and private
    secrets = {
        bits(value)
        for memory in kept.values()
        for value in _leaves(memory)
        if len(value.unique()) > 1
    }
    assert secrets and len(grid.answers) == 10
    for _, answer in grid.answers:
        travelling = list(tensors_in(answer.content))
        assert travelling and not any(bits(value) in secrets for _, value in travelling)
        assert not names & {name for name, _ in travelling}
        assert not any(
            name in json.dumps(dict(record))
            for name in names
            for record in answer.content.config_records.values()
        )


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else ():
        yield from _leaves(value)


def test_another_run_on_the_same_nodes_starts_afresh() -> None:
    grid = Nodes(5, node_app(fused, aggregator=FedAvg()))
    runs = []
    for run in (1, 2):
        grid.begin(run)
        made = trainer(rounds=2)
        serve(grid, made, fused(), digits(standardize=False))
        runs.append(state(made))
    assert equal_states(*runs)


# What goes wrong


class Without(FedAvg):
    """FedAvg that was never told of client 1 in round 2."""

    def aggregate(self, global_state: Any, updates: Any) -> Any:
        return super().aggregate(
            global_state, (u for u in updates if not (u.client == 1 and u.round == 2))
        )


class Recorder(FederationCallback):
    def __init__(self) -> None:
        self.failures: list[ClientFailure] = []

    def on_client_end(self, run: Any, outcome: Any) -> None:
        if isinstance(outcome, ClientFailure):
            self.failures.append(outcome)


def not_a_number(answer: Message) -> None:
    arrays = to_state(answer.content.array_records["arrays"])
    next(iter(arrays.values())).fill_(float("nan"))
    answer.content["arrays"] = to_arrays(arrays)


def another_shape(answer: Message) -> None:
    arrays = to_state(answer.content.array_records["arrays"])
    answer.content["arrays"] = to_arrays(
        {name: value.reshape(-1) for name, value in arrays.items()}
    )


def another_client(answer: Message) -> None:
    update = read_update(answer.content)
    update.client = 0
    answer.content = write_update(update)


def garbage(answer: Message) -> None:
    answer.content["update"] = ConfigRecord({"tree": '{"tensor": "0"'})


def nothing(answer: Message) -> None:
    answer.content = RecordDict()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_a_number, "not finite"),
        (another_shape, "has shape"),
        (another_client, "its answer is that of client 0 in round 2"),
        (garbage, "its answer cannot be read: JSONDecodeError"),
        (nothing, "its answer cannot be read: KeyError"),
        (None, "its node did not answer in time"),
    ],
)
def test_the_round_goes_on_without_a_bad_answer(spoil: Any, reason: str) -> None:
    def tamper(round: int, client: int, answer: Message) -> Message | None:
        if (round, client) != (2, 1):
            return answer
        return None if spoil is None else spoil(answer) or answer

    recorder = Recorder()
    made, never_there = (
        trainer(rounds=3, callbacks=[recorder]),
        trainer(rounds=3, aggregator=Without()),
    )
    serve(Nodes(5, node_app(classifier), tamper), made, classifier(), digits(standardize=False))
    never_there.fit(classifier(), digits(standardize=False))
    assert [(f.client, f.round) for f in recorder.failures] == [
        (1, 2)
    ] and reason in recorder.failures[0].reason
    assert equal_states(state(made), state(never_there))


class Breaks(Callback):
    """Breaks client 1's fit in round 2."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        if (loader.client, loader.round) == (1, 2):
            if self.how == "raise":
                raise RuntimeError("the scanner is on fire")
            next(pl_module.parameters()).data[0] = float("nan")


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failed_fit_leaves_its_node_as_it_was(how: str) -> None:
    ours, theirs, _ = both(classifier, SCAFFOLD, rounds=3, callbacks=[Breaks(how)])
    assert equal_states(state(ours), state(theirs)) and ours.run.folder.table.rows
    failed = [row for row in theirs.run.folder.table.rows if row[5] == "failed" and row[6] > 0]
    assert [(row[0], row[6]) for row in failed] == [(2, 1.0)]


class Leaves(FederationCallback):
    """Takes client 1's node away in round 2."""

    def __init__(self, grid: Nodes) -> None:
        self.grid = grid

    def on_round_end(self, trainer: FederatedTrainer, round: int) -> None:
        if round == 1:
            self.gone = {
                node: c
                for node, c in self.grid.contexts.items()
                if c.node_config["partition-id"] == 1
            }
            self.grid.contexts = {
                node: c for node, c in self.grid.contexts.items() if node not in self.gone
            }
        elif round == 2:
            (context,) = self.gone.values()
            self.grid.contexts = {
                5: context,
                **self.grid.contexts,
            }  # back, and Flower gave it another number


def test_a_node_may_leave_and_come_back() -> None:
    grid = Nodes(5, node_app(classifier))
    recorder = Recorder()
    made, never_there = (
        trainer(rounds=3, callbacks=[recorder, Leaves(grid)]),
        trainer(rounds=3, aggregator=Without()),
    )
    serve(grid, made, classifier(), digits(standardize=False))
    never_there.fit(classifier(), digits(standardize=False))
    assert [(f.client, f.round, f.reason) for f in recorder.failures] == [
        (1, 2, "its node is not connected")
    ]
    assert equal_states(state(made), state(never_there))


def test_the_first_round_waits_for_every_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Nodes(5, node_app(classifier))
    late = {node: grid.contexts.pop(node) for node in list(grid.contexts)[:2]}
    monkeypatch.setattr(
        "flsuite.flower.nodes.time.sleep", lambda seconds: grid.contexts.update([late.popitem()])
    )
    made = trainer(rounds=1)
    with caplog.at_level("INFO", logger="flsuite"):
        serve(grid, made, classifier(), digits(standardize=False))
    assert not late and made.run.folder.table.rows and "(3 of 5 are here)" in caplog.text
    assert len(grid.answers) == 5


def test_a_round_that_nobody_finished_ends_the_run() -> None:
    made = trainer(rounds=3)
    grid = Nodes(
        5, node_app(classifier), lambda number, client, answer: None if number == 2 else answer
    )
    with pytest.raises(
        FederationError,
        match=r"round 2: all 5 clients failed, client 0 with: its node did not answer",
    ):
        serve(grid, made, classifier(), digits(standardize=False))
    assert made.round == 1


def test_a_setting_that_nobody_can_train_with_is_the_users_error() -> None:
    grid = Nodes(5, node_app(convolution, aggregator=SCAFFOLD()))
    with pytest.raises(FlsuiteError, match="SCAFFOLD: control 'displacement' needs plain SGD"):
        serve(grid, trainer(aggregator=SCAFFOLD()), convolution(), digits(standardize=False))


class Fussy(Site):
    """Has a request of its own in round 2, as client 1."""

    def train(self, message: Message, context: Context) -> Message:
        if (unpack("task", message.content)["round"], own_client(context)) == (2, 1):
            raise FlsuiteError("the disk is full")
        return super().train(message, context)


def test_a_node_cannot_end_a_run_that_is_under_way() -> None:
    recorder = Recorder()
    made, never_there = (
        trainer(rounds=3, callbacks=[recorder]),
        trainer(rounds=3, aggregator=Without()),
    )
    site = Fussy(trainer(), classifier(), digits(standardize=False))
    serve(
        Nodes(5, make_client_app(lambda context: site)),
        made,
        classifier(),
        digits(standardize=False),
    )
    never_there.fit(classifier(), digits(standardize=False))
    assert [(f.client, f.round, f.reason) for f in recorder.failures] == [
        (1, 2, "the disk is full")
    ]
    assert equal_states(state(made), state(never_there))


def test_pooled_training_has_no_place() -> None:
    with pytest.raises(
        FlsuiteError, match="Centralized trains on everybody's data, which no node of Flower holds"
    ):
        serve(Nodes(5), trainer(aggregator=Centralized()), classifier(), digits())


def test_callbacks_that_need_private_entries_are_refused() -> None:
    measuring = trainer(callbacks=[GradientDissimilarity(every=1)])
    with pytest.raises(FlsuiteError, match="the private part of client 0 lies on its node"):
        serve(Nodes(5, node_app(fused)), measuring, fused(), digits(standardize=False))


def test_server_and_nodes_need_the_same_model() -> None:
    with pytest.raises(FlsuiteError, match="the server's model is not this node's"):
        serve(Nodes(5, node_app(convolution)), trainer(), classifier(), digits(standardize=False))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num-partitions": 2}, r"is told of 2 clients \(num-partitions\), and data.clients is 5"),
        ({"partition-id": 5}, r"is client 5 \(its partition-id\), and data.clients is 5"),
        ({"partition-id": "0"}, "partition-id says which client a node is, and it is '0' here"),
    ],
)
def test_nodes_that_are_no_client_are_named(change: dict[str, Any], reason: str) -> None:
    grid = Nodes(5)
    grid.contexts[1000].node_config.update(change)
    grid.app = _raising(client_app)
    with pytest.raises(FlsuiteError, match=reason):
        serve(grid, trainer(), classifier(), digits())


def _raising(app: Any) -> Any:
    """Flower turns what an app raises into an error message."""
    from flwr.app import Error

    def answer(message: Message, context: Context) -> Message:
        try:
            return app(message, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    return answer


def test_a_run_that_stops_early_leaves_the_other_rounds_out() -> None:
    class Stops(FederationCallback):
        def on_evaluation_end(self, run: Any, round: int, split: str, scores: Any) -> None:
            if round == 2:
                run.stop()

    ours, theirs, grid = both(classifier, FedAvg, rounds=5, callbacks=[Stops()])
    assert ours.round == theirs.round == 2 and len(grid.answers) == 10
    assert table(ours) == pytest.approx(table(theirs), nan_ok=True)


# The strategy by itself


def test_the_strategy_works_with_flowers_own_start() -> None:
    ours = trainer(rounds=3)
    ours.fit(classifier(), digits(standardize=False))
    run = trainer(rounds=1).prepare(classifier(), digits(standardize=False))
    strategy, grid = FlowerStrategy(run), Nodes(5, node_app(classifier))
    first = strategy.start(grid, strategy.initial_arrays(), num_rounds=2)
    second = strategy.start(grid, first.arrays, num_rounds=1)
    assert equal_states(dict(second.arrays.to_torch_state_dict()), state(ours))
    losses = {
        row[0]: row[6]
        for row in ours.run.folder.table.rows
        if row[3:6] == ("global", "train", "loss")
    }
    assert first.train_metrics_clientapp[2]["loss"] == pytest.approx(losses[2])


def test_training_starts_from_the_arrays_that_it_is_given() -> None:
    run = trainer().prepare(classifier(), digits(standardize=False))
    strategy, grid = FlowerStrategy(run), Nodes(5, node_app(classifier))
    zeros = to_arrays({name: torch.zeros_like(value) for name, value in run.state.items()})
    result = strategy.start(grid, zeros, num_rounds=1)
    first, *_ = to_state(result.arrays).values()
    assert not first.any(), "behind a ReLU at zero nothing is learned"
    with pytest.raises(FlsuiteError, match="initial_arrays are not this model's: lacks"):
        strategy.start(grid, ArrayRecord(), num_rounds=1)


# The app


def test_the_app_is_made_from_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))  # as Flower does
    arguments = "--trainer.aggregator FedAdam --trainer.aggregator.lr 0.05 --trainer.rounds 2 --seed_everything 5"
    grid = Nodes(2)
    for context in grid.contexts.values():
        context.run_config = {"flsuite-config": "digits.yaml", "flsuite-args": arguments}
    config = {
        "flsuite-config": "digits.yaml",
        "flsuite-args": f"{arguments} --run_dir {tmp_path / 'run'}",
    }
    server_app(grid, Context(1, 0, {}, RecordDict(), config))
    (theirs, their_table), (ours, our_table) = (
        left_in(tmp_path / "run"),
        our_own(arguments, tmp_path),
    )
    assert equal_states(ours, theirs) and our_table == their_table


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "the run config names no config: set flsuite-config"),
        ({"flsuite-config": "nowhere.yaml"}, "there is no nowhere.yaml in the folder of the app"),
        (
            {"flsuite-config": str(EXAMPLE / "digits.yaml"), "flsuite-args": "--trainer.rundes 3"},
            "unknown key --trainer.rundes",
        ),
    ],
)
def test_a_run_config_that_cannot_be_met_is_one_line(config: dict[str, str], reason: str) -> None:
    with pytest.raises(FlsuiteError, match=reason):
        server_app(Nodes(2), Context(1, 0, {}, RecordDict(), config))
    node = Nodes._context(1, 0, 2)
    node.run_config = config
    answer = client_app(Message(RecordDict(), 1, "train"), node)
    assert reason in answer.error.reason and answer.error.code == REFUSED


def test_without_flower_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] == "flwr" or name.startswith("flsuite.flower")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(FlsuiteError, match=r'pip install "flsuite\[flower\]"'):
        import flsuite.flower  # noqa: F401


# Flower's own processes


class Processes:
    """Flower's commands in a home of their own, with nothing of them left afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        own = {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        quick = {
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self.environment = {**os.environ, **own, **quick, "PATH": path}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + 15
            while (
                number == signal.SIGTERM
                and time.monotonic() < deadline
                and any(p.poll() is None for p in self.running)
            ):
                time.sleep(0.1)

    def connect(self, *lines: str) -> None:
        """Tell ``flwr`` how to reach the SuperLink."""
        (self.folder / "home").mkdir()
        head = (
            "[superlink]",
            'default = "test"',
            "",
            "[superlink.test]",
            f'address = "127.0.0.1:{self.port}"',
        )
        (self.folder / "home" / "config.toml").write_text("\n".join((*head, *lines)) + "\n")

    def start(self, *command: str) -> None:
        """Start a server, which writes to a log named after it."""
        with (self.folder / f"{len(self.running)}-{command[0]}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)

    def flwr(self, *arguments: str, timeout: float = 60) -> str:
        done = subprocess.run(
            ["flwr", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout + done.stderr

    def wait(self, *command: str, until: Callable[[str], bool] = lambda _: True) -> None:
        """Until ``flwr`` with these arguments succeeds, and says what is wanted."""
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline and all(p.poll() is None for p in self.running), (
                self.logs()
            )
            with suppress(AssertionError, subprocess.TimeoutExpired):
                if until(self.flwr(*command)):
                    return
            time.sleep(0.5)

    def logs(self) -> str:
        return "\n".join(
            f"=== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log"))
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def our_own(arguments: str, folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The model and the table that ``flsuite fit`` leaves."""
    with pytest.raises(SystemExit) as exit:
        main(
            [
                "fit",
                "--config",
                str(EXAMPLE / "digits.yaml"),
                *shlex.split(arguments),
                "--run_dir",
                str(folder / "own"),
            ]
        )
    assert exit.value.code == 0
    return left_in(folder / "own")


def left_in(run: Path) -> tuple[dict[str, Tensor], list[str]]:
    model = torch.load(run / "checkpoints" / "model.ckpt", weights_only=True)["state_dict"]
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    return model, [",".join((row[0], *row[3:])) for row in rows if row[5] != "seconds"]


def under_flower(
    flower: Processes, arguments: str, *options: str
) -> tuple[dict[str, Tensor], list[str]]:
    """What a run of the example leaves."""
    run = flower.folder / "run"
    config = f'flsuite-args="{arguments} --run_dir {run}"'
    said = flower.flwr(
        "run", str(EXAMPLE), "test", "--stream", "--run-config", config, *options, timeout=600
    )
    assert (run / "checkpoints" / "model.ckpt").exists(), said + flower.logs()
    return left_in(run)


CLASS_PRIORS = "--model ACVAE --model.latent_dim 4 --model.width 4 --trainer.aggregator CMGA --data.standardize false"


def test_flowers_own_simulation_gives_the_same_model(tmp_path: Path) -> None:
    """Private encoders, and priors that the server remembers; three clients on two workers."""
    arguments = f"{CLASS_PRIORS} --data.clients 3 --trainer.rounds 2"
    with Processes(tmp_path) as flower:
        flower.connect("insecure = true")
        flower.start("flower-superlink", "--insecure", "--simulation", "--port", str(flower.port))
        flower.wait("list", "test")
        size = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"
        theirs, their_table = under_flower(flower, arguments, "--federation-config", size)
    ours, our_table = our_own(arguments, tmp_path)
    assert equal_states(ours, theirs) and our_table == their_table


def make_keys(folder: Path) -> None:
    """A certificate authority, a certificate for this machine, and a key pair for each of two nodes."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    pem, openssh, plain = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    authority, server = (
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP384R1()),
    )
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in ("test authority", "localhost")
    ]
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now = datetime.now(timezone.utc)
    for name, key, file in ((names[0], authority, "ca"), (names[1], server, "server")):
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[0])
            .public_key(key.public_key())
        )
        made = made.serial_number(x509.random_serial_number()).not_valid_before(
            now - timedelta(days=1)
        )
        made = made.not_valid_after(now + timedelta(days=1))
        made = made.add_extension(
            x509.BasicConstraints(ca=file == "ca", path_length=None), critical=True
        )
        made = made if file == "ca" else made.add_extension(address, critical=False)
        (folder / f"{file}.crt").write_bytes(
            made.sign(authority, hashes.SHA256()).public_bytes(pem)
        )
    (folder / "server.key").write_bytes(
        server.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    for node in range(2):
        key = ec.generate_private_key(ec.SECP384R1())
        (folder / f"node{node}").write_bytes(key.private_bytes(pem, openssh, plain))
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        (folder / f"node{node}.pub").write_bytes(public)


def test_a_superlink_and_two_supernodes_give_the_same_model(tmp_path: Path) -> None:
    """With TLS and node authentication, and private encoders that stay on the nodes."""
    make_keys(tmp_path)
    arguments = f"{CLASS_PRIORS} --trainer.rounds 2"
    certificate = (
        "--ssl-ca-certfile",
        "ca.crt",
        "--ssl-certfile",
        "server.crt",
        "--ssl-keyfile",
        "server.key",
    )
    with Processes(tmp_path) as flower:
        flower.connect(f'root-certificates = "{tmp_path / "ca.crt"}"')
        flower.start(
            "flower-superlink", *certificate, "--enable-supernode-auth", "--port", str(flower.port)
        )
        flower.wait("list", "test")
        for node in range(2):
            flower.flwr("supernode", "register", f"node{node}.pub", "test")
            link = (
                "--superlink",
                f"127.0.0.1:{flower.port}",
                "--root-certificates",
                "ca.crt",
                "--port",
                str(free_port()),
            )
            own = (
                "--auth-supernode-private-key",
                f"node{node}",
                "--node-config",
                f"partition-id={node} num-partitions=2",
            )
            flower.start("flower-supernode", *link, *certificate, *own)
        theirs, their_table = under_flower(flower, arguments)
    ours, our_table = our_own(arguments, tmp_path)
    assert equal_states(ours, theirs) and our_table == their_table
