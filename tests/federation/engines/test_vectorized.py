"""A stack of clients takes the steps that each takes alone, but for the rounding of its kernels."""

import copy
import csv
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, RMSprop, lr_scheduler
from torch.utils._pytree import tree_flatten

from flsuite import FederatedTrainer, FlsuiteError, aggregators
from flsuite.aggregators import (
    APFL,
    IFCA,
    MOON,
    Aggregator,
    Ditto,
    FedALA,
    FedAvg,
    FedBABU,
    FedBuff,
    FedDyn,
    FedProto,
    FedProx,
    FedRep,
    FedRoD,
    LabelFlip,
    Objective,
    PerFedAvg,
    PFedMe,
    TopK,
)
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.state import State
from flsuite.data import IID, CropFlip, FederatedDataModule, Natural, TaskSequence
from flsuite.federation import (
    Asynchronous,
    Faults,
    InProcess,
    Measured,
    Stragglers,
    Synchronous,
    Vectorized,
)
from flsuite.federation.client.callbacks import CosineDecay
from flsuite.federation.client.stack import Stack
from flsuite.federation.client.stack_steps import StackSteps
from flsuite.models import ACVAE, MLP, Backbone, Classifier
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_same_models,
    federation,
    table_data,
    table_model,
)
from tests.composition.cells import Cell, covering, name, problem, trainer_of
from tests.conftest import equal_states, mostly_long
from tests.federation.engines.test_processes import Images

PLAIN = table_model()


class InDouble(Backbone):
    """A network in float64, with a convolution and GroupNorm."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(
            _ToDouble(),
            nn.Conv2d(shape[0], 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(4 * shape[1] * shape[2], outputs),
        ).double()


class _ToDouble(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def fitted(
    engine: Any,
    aggregator: Aggregator | None = None,
    model: Any = None,
    data: FederatedDataModule | None = None,
    **kwargs: Any,
) -> FederatedTrainer:
    kwargs = {"max_epochs": 2, **kwargs}
    made = federation(aggregator or FedAvg(), kwargs.pop("rounds", 2), engine=engine, **kwargs)
    ckpt_path = "last" if "run_dir" in kwargs else None
    # A copy, because a used model would be the start of the next federation.
    made.fit(copy.deepcopy(model or table_model()), data or table_data(), ckpt_path=ckpt_path)
    return made


class Tied(Backbone):
    """Two layers with one weight, and a layer that nothing reads."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers = nn.Sequential(
            nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, outputs), _Unread()
        )
        layers[2].weight = layers[0].weight
        return layers


class TwoShifts(Backbone):
    """A layer with two biases, whose gradients are one tensor, and a scale without a dimension."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, outputs, bias=False), _Shift(outputs))


class _Shift(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + (self.a + self.b)


class _Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


def images(partition: Any = None, **kwargs: Any) -> Images:
    """Return the images of six clients, by default of very different sizes."""
    settings = {"clients": 6, "batch_size": 8, "val_fraction": 0.0, **kwargs}
    return Images(partition=partition or Natural(), **settings)


def distance(a: FederatedTrainer, b: FederatedTrainer) -> float:
    """Return the largest distance of two tensors of the same name, relative unless near zero.

    They are those of the global model, of each client's whole model, and of the server's memory.
    """
    assert a.federation and b.federation
    pairs = [(a.federation.server.memory, b.federation.server.memory)]
    for client in (None, *range(a.federation.data.clients)):
        pairs.append((a.federation.client_state(client), b.federation.client_state(client)))
    distances = [0.0]
    for x, y in pairs:
        (ours, kind), (theirs, other) = tree_flatten(x), tree_flatten(y)
        assert kind == other
        for one, two in zip(ours, theirs, strict=True):
            if not isinstance(one, Tensor):
                assert one == two
                continue
            one, two = one.double(), two.double()
            distances.append(float((one - two).norm() / one.norm().clamp(min=0.01)))
    return max(distances)


def close(stacks: list[int], bound: float, *args: Any, **kwargs: Any) -> None:
    """Compare a federation with the one that trains its clients one by one."""
    alone = fitted(InProcess(), *args, **kwargs)
    assert not stacks
    stacked = fitted(Vectorized(clients=4), *args, **kwargs)
    assert stacks
    assert distance(alone, stacked) < bound
    steps = ([(u.client, u.steps) for u in m.federation.log.updates] for m in (alone, stacked))
    assert next(steps) == next(steps)


def parted(cells: Sequence[Cell], parts: int) -> list[Any]:
    """Return the parameters of a test: the first cell is fast."""
    return mostly_long(
        {"one": cells[:1], **{str(k): cells[1 + k :: parts] for k in range(parts)}}, "one"
    )


@dataclass(eq=False)
class Doubled(Backbone):
    """A backbone in float64, with the names of its layers."""

    own: Backbone

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        network = self.own.build(shape, outputs).double()
        network.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        return network


# They read the layers themselves, or draw float32. What they do is on the server, or after a fit.
IN_FLOAT32 = ("CMGA", "DENSE", "FisherAveraging", "OTFusion", "PFNM")


@pytest.mark.parametrize("cells", parted(covering(), 12))
def test_each_combination_of_parts_trains_as_alone(
    cells: Sequence[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare two rounds. The second starts from what the stack leaves of the first one."""
    # A stack draws other noise and dropout, so that ACVAE is compared without both.
    monkeypatch.setattr("flsuite.models.acvae.sample", lambda mean, log_variance: mean)
    for cell in cells:
        # Adam divides a difference of 1e-16 by at least 1e-8.
        bound = 1e-12 if cell["server_optimizer"] in ("none", "SGD") else 1e-8
        if cell["rule"] in IN_FLOAT32:
            # A value between two levels may be rounded to the other one.
            coarse = {"Quantize": "none", "TopK, Quantize": "TopK"}
            transforms = coarse.get(cell["transforms"], cell["transforms"])
            cell, bound = {**cell, "transforms": transforms}, 1e-5
        alone, stacked = trainer_of(cell, 2), trainer_of(cell, 2, engine=Vectorized(clients=4))
        for made in (alone, stacked):
            model, data = problem(cell)
            if isinstance(model, ACVAE):
                model.dropout = 0.0
            elif cell["rule"] not in IN_FLOAT32:
                model.backbone = Doubled(model.backbone)
            made.fit(model, data)
        assert distance(alone, stacked) < bound, name(cell)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": partial(Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.01),
    "RMSprop": partial(RMSprop, lr=0.01, momentum=0.5),
    "Adagrad": partial(Adagrad, lr=0.1),
    "NAdam": partial(NAdam, lr=0.01),
}


class Wide(Backbone):
    """Layers whose gradients are computed in the memory order of their weights."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        pixels = shape[0] * shape[1] * shape[2]
        views = (nn.Unflatten(1, (4, -1)), nn.Tanh(), nn.Flatten())  # need contiguous outputs
        layers = nn.Linear(pixels, 128), *views, nn.Linear(128, 64, bias=False), nn.Tanh()
        return nn.Sequential(_ToDouble(), nn.Flatten(), *layers, nn.Linear(64, outputs)).double()


SETTINGS_OF: dict[Any, dict[str, Any]] = {
    aggregators.DPFedAvg: {"noise_multiplier": 1.0},
    aggregators.SCAFFOLD: {"control": "mean_gradient"},
}
ELSEWHERE = aggregators.Centralized, aggregators.FedBN  # one client, and a model with BatchNorm
PRESETS: dict[str, Aggregator] = {
    kind.__name__: kind(**SETTINGS_OF.get(kind, {}))
    for kind in (getattr(aggregators, name) for name in aggregators.__all__)
    if isinstance(kind, type) and issubclass(kind, Aggregator) and kind not in ELSEWHERE
}
METHODS: dict[str, Aggregator] = {
    **PRESETS,
    "Ditto": Ditto(lam=0.5),
    "APFL": APFL(alpha=0.3),
    "APFL, a fixed mixture": APFL(alpha=0.3, adaptive=False),
    "pFedMe": PFedMe(lam=2.0, steps=3, personal_lr=0.1),
    "MOON": MOON(mu=1.0),
    "FedProto": FedProto(lam=1.0),
    "FedRoD": FedRoD(head="network.5."),
    # A difference over a smaller step would multiply what rounding changes.
    "Per-FedAvg, Hessian-free": PerFedAvg(alpha=0.1, order="hessian_free", delta=0.1),
}
FAST = ("SCAFFOLD", "Ditto", "APFL", "pFedMe", "MOON", "Per-FedAvg, Hessian-free")
FITS: dict[str, dict[str, Any]] = {
    "SGD": {"model": Classifier(InDouble(), partial(SGD, lr=0.1, momentum=0.9))},
    "Adam": {"model": Classifier(InDouble(), partial(Adam, lr=0.01)), "gradient_clip_val": 0.05},
}


KEPT = {name: OPTIMIZERS[name] for name in ("momentum", "Adam", "NAdam")}


@pytest.mark.parametrize("optimizer", mostly_long(KEPT, "Adam"))
def test_kept_optimizers_go_on(optimizer: Any, stacks: list[int]) -> None:
    """Clients of equal sizes go on together, if their optimizers have taken as many steps."""
    settings = {"keep_optimizers": True, "model": Classifier(InDouble(), optimizer)}
    close(stacks, 1e-12, FedAvg(), data=images(IID()), **settings)
    assert stacks == 2 * [4, 2]
    stacks.clear()
    close(
        stacks, 1e-12, FedAvg(), data=images(IID()), schedule=Synchronous(0.7), rounds=3, **settings
    )
    stacks.clear()
    close(stacks, 1e-12, FedAvg(), data=images(), **settings)


@pytest.mark.parametrize("fit", mostly_long(FITS, "SGD"))
@pytest.mark.parametrize("method", mostly_long(METHODS, *FAST))
def test_each_preset_trains_as_alone(
    method: Aggregator, fit: dict[str, Any], stacks: list[int]
) -> None:
    settings = {"data": images(), "schedule": Synchronous(0.7), **fit}
    close(stacks, 1e-12, method, **settings)


def test_half_precision_differs_by_its_rounding(stacks: list[int]) -> None:
    model = Classifier(Tied(), OPTIMIZERS["SGD"])
    close(stacks, 2e-3, model=model, precision="bf16-mixed")


def test_scores_steps_and_losses_are_those_of_single_fits(stacks: list[int]) -> None:
    made = [fitted(e, evaluate_every=1, adapt_epochs=2) for e in (InProcess(), Vectorized())]
    tables = [{(row[0], *row[5:8]): row[8] for row in m.run.folder.table.rows} for m in made]
    assert tables[0].keys() == tables[1].keys()
    for key, value in tables[0].items():
        if not key[-1].endswith("seconds"):
            assert tables[1][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert any(key[-1].startswith("adapted/") for key in tables[0])


def test_each_task_trains_the_layers_that_it_uses(stacks: list[int]) -> None:
    class Heads(Classifier):
        def build(self, spec: Any) -> None:
            super().build(spec)
            self.heads = nn.ModuleList(nn.Linear(spec.num_classes, spec.num_classes) for _ in "123")
            self.task = 0

        def begin_task(self, task: int, seen: Sequence[int], past: Sequence[int]) -> None:
            self.task = task

        def logits(self, x: Tensor) -> Tensor:
            out: Tensor = self.heads[self.task](super().logits(x))
            return out

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.logits(batch[0]), batch[1])

    data = TaskSequence(table_data(), 3, classes_per_task=1, rounds_per_task=1)
    for aggregator in (FedAvg(), IFCA(2)):
        stacks.clear()
        close(stacks, 1e-5, aggregator, Heads(PLAIN.backbone, PLAIN.optimizer), data)


class Aux(Classifier):
    """A classifier with a layer that only some losses use."""

    def build(self, spec: Any) -> None:
        super().build(spec)
        self.aux = nn.Linear(spec.num_classes, spec.num_classes)
        self.register_buffer("factor", torch.ones(()))

    def loss(self, batch: Any, aux: bool) -> Tensor:
        logits = self.logits(batch[0])
        return nn.functional.cross_entropy(self.aux(logits) if aux else logits, batch[1])


class AuxLater(Aux):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx > 0)


class AuxInLargeBatches(Aux):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, len(batch[1]) >= 8)


class Annealed(Aux):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, True) * self.factor
        self.factor = self.factor * 0.9
        return loss


class Skipping(Aux):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[1]) < 8 else self.loss(batch, True)


class Weighted(Aux):
    """Weighs the classes, which a mean over single samples does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch[0])
        weights = 1 + torch.arange(logits.shape[1], dtype=logits.dtype)
        return nn.functional.cross_entropy(logits, batch[1], weights)


class Counting(Aux):
    """Counts its steps in an attribute, which starts as one of the class."""

    steps_taken = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps_taken += 1
        return self.loss(batch, True) / self.steps_taken


UNUSUAL = Counting, Weighted, AuxLater, AuxInLargeBatches, Annealed, Skipping


@pytest.mark.parametrize(
    "kind",
    mostly_long({k.__name__: k for k in UNUSUAL}, "AuxLater", "Skipping", "Counting", "Annealed"),
)
def test_an_unusual_step_ends_as_alone(kind: type[Aux], stacks: list[int]) -> None:
    model = kind(PLAIN.backbone, partial(Adam, lr=0.01, weight_decay=0.1, eps=1e-3))
    settings = {"max_epochs": 1, "gradient_clip_val": 0.05, "model": model}
    settings["keep_optimizers"] = True  # what a stack has done to them before it fails is undone
    # A second model needs a loss of every batch.
    methods: list[Aggregator] = [FedAvg()] if kind is Skipping else [FedAvg(), Ditto(lam=0.5)]
    for method in methods:
        engines = InProcess(), Vectorized()
        alone, stacked = (fitted(engine, method, **settings) for engine in engines)
        assert distance(alone, stacked) < 1e-5
    if kind is AuxLater:
        assert not stacks, "it decides by its number"


class ScaledByNumber(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + batch_idx)


def test_the_same_seed_gives_the_same_bits_and_a_resumed_run_too(tmp_path: Path) -> None:
    def run(folder: str, rounds: int) -> FederatedTrainer:
        drops = Classifier(Dropping(), partial(SGD, lr=0.1, momentum=0.5))
        path = str(tmp_path / folder)
        return fitted(Vectorized(clients=3), model=drops, rounds=rounds, run_dir=path)

    whole = run("whole", 4)
    run("parts", 2)
    assert_same_models(whole, run("parts", 4))


FILLED: dict[str, tuple[LightningModule, bool]] = {
    "a plain network": (Classifier(MLP((8,)), PLAIN.optimizer), True),
    "BatchNorm": (PLAIN, False),
    "class weights": (Weighted(MLP((8,)), PLAIN.optimizer), False),
    "another loss of few samples": (AuxInLargeBatches(MLP((8,)), PLAIN.optimizer), False),
    "a buffer that changes": (Annealed(MLP((8,)), PLAIN.optimizer), False),
}


@pytest.mark.parametrize(("model", "fills"), FILLED.values(), ids=FILLED)
def test_smaller_batches_are_filled_up_where_a_loss_is_a_mean_over_samples(
    model: LightningModule, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    take = StackSteps._step

    def counted(self: StackSteps, step: int, own: Sequence[Any]) -> None:
        groups.append(len(own))
        take(self, step, own)

    monkeypatch.setattr(StackSteps, "_step", counted)
    alone, stacked = (fitted(engine, model=model) for engine in (InProcess(), Vectorized()))
    assert groups
    assert (max(groups) == 1) == fills
    assert distance(alone, stacked) < 1e-5


class Dropping(Backbone):
    """A network with dropout, which draws from the global generator."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], 8), nn.Dropout(0.5), nn.Linear(8, outputs))


UNLIKE = (
    "old versions, momentum that is kept, a falling rate",
    "a client's model",
    "clients that fail",
    "tasks",
)
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "old versions, momentum that is kept, a falling rate": {
        "aggregator": FedBuff(),
        "schedule": Asynchronous(6, 2, speeds=Stragglers(per_fit=True)),
        "lr_decay": CosineDecay(rounds=8),
        "keep_optimizers": True,
    },
    "a client's model": {"aggregator": Ditto()},
    "clients that fail": {"schedule": Faults(Asynchronous(5, 3), raises=0.1, nan=0.1, late=0.1)},
    "failures that end a buffer": {
        "schedule": Faults(Asynchronous(2, 12, buffer_timeout=1000.0), raises=0.35),
        "rounds": 4,
    },
    "tasks": {
        "data": TaskSequence(table_data(), 3, classes_per_task=1, rounds_per_task=2),
        "schedule": Asynchronous(4, 3),
    },
}


@pytest.mark.parametrize("settings", mostly_long(ASYNCHRONOUS, *UNLIKE))
def test_fits_in_flight_train_together(settings: dict[str, Any], stacks: list[int]) -> None:
    usual = {"schedule": Asynchronous(5, 3), "rounds": 4, "data": table_data(8)}
    close(stacks, 1e-5, **usual | settings)


@pytest.mark.parametrize("settings", mostly_long(ASYNCHRONOUS, "failures that end a buffer"))
def test_an_asynchronous_run_groups_the_same_fits_after_a_resume(
    settings: dict[str, Any], tmp_path: Path, stacks: list[int]
) -> None:
    """Dropout draws for a whole stack, so other stacks would end with other weights."""
    usual = {"schedule": Asynchronous(5, 3), "data": table_data(8)}
    settings = usual | settings | {"model": Classifier(Dropping(), PLAIN.optimizer)}

    def run(folder: str, rounds: int) -> FederatedTrainer:
        path = str(tmp_path / folder)
        return fitted(Vectorized(clients=3), rounds=rounds, run_dir=path, **copy.deepcopy(settings))

    rounds = settings.pop("rounds", 4)
    whole = run("whole", rounds)
    assert max(stacks) > 1
    run("parts", 2)
    assert_same_models(whole, run("parts", rounds))


def test_no_fit_trains_before_the_aggregation_that_it_arrives_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[int, int]] = []
    train = Stack.train

    def noted(self: Stack, candidates: Sequence[Any], *args: Any) -> Any:
        trained.extend((one.request.number, made.federation.clock.round) for one in candidates)
        return train(self, candidates, *args)

    monkeypatch.setattr(Stack, "train", noted)
    schedule, folder = Asynchronous(5, 3), str(tmp_path)
    made = federation(FedBuff(), 4, engine=Vectorized(), schedule=schedule, run_dir=folder)
    made.fit(table_model(), table_data(8))
    with (tmp_path / "timeline.csv").open() as file:
        merged = {int(row["fit"]): int(row["round"]) for row in csv.DictReader(file)}
    assert trained and all(merged[number] == round + 1 for number, round in trained)


def test_the_stack_is_a_setting_of_the_record(tmp_path: Path) -> None:
    path = str(tmp_path)
    made = fitted(Vectorized(clients=3), rounds=1, run_dir=path)
    assert made.run.settings["engine"]["init_args"]["clients"] == 3
    for other in (Vectorized(clients=2), InProcess()):
        with pytest.raises(FlsuiteError, match="engine"):
            fitted(other, rounds=2, run_dir=path)


def test_the_number_of_workers_does_not_matter(tmp_path: Path) -> None:
    def run(folder: str, workers: int, rounds: int) -> FederatedTrainer:
        kwargs = {"run_dir": str(tmp_path / folder), "rounds": rounds}
        engine = Vectorized(clients=2, workers=workers)
        return fitted(engine, APFL(), schedule=Synchronous(0.8), **kwargs)

    one = run("one", 1, 3)
    run("two", 2, 2)
    assert_same_models(one, run("two", 1, 3))


@pytest.mark.parametrize("client", [0, 1])
def test_attackers_train_alone(client: int, stacks: list[int]) -> None:
    close(stacks, 1e-5, attack=LabelFlip(clients=[client]))
    assert stacks == [3, 3]


def test_a_client_without_finite_weights_is_refused_alone(stacks: list[int]) -> None:
    class Infinite(Quadratic):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            a, m = batch[0].unbind(1)
            return (a / 2 * (self.w - m).square()).mean()

    data = Quadratics((1.0, float("inf"), 2.0, 1.0), (1.0, 1.0, 2.0, 3.0))
    made = fitted(Vectorized(), model=Infinite(), data=data, rounds=1)
    assert stacks == [4]
    assert made.federation.state["w"].isfinite()


def test_a_client_that_raises_is_named_and_the_others_train(
    stacks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    data = Quadratics((1.0, -1.0, 2.0, 1.0), (1.0, 1.0, 2.0, 3.0))
    with caplog.at_level(logging.WARNING):
        alone = fitted(InProcess(), model=Quadratic(), data=data)
        caplog.clear()
        made = fitted(Vectorized(), model=Quadratic(), data=data)
    assert equal_states(alone.federation.state, made.federation.state)
    assert not stacks  # its training step looks at the numbers
    messages = [record.getMessage() for record in caplog.records]
    assert sum("each trains by itself" in message for message in messages) == 1
    assert any("client 1 failed: RuntimeError: no minimum" in message for message in messages)


class Seeing(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        return None


class Manual(Classifier):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False


class Watching(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        return None


class Reading(Classifier):
    def configure_optimizers(self) -> Any:
        assert self.trainer.max_epochs
        return super().configure_optimizers()


class Lists(Classifier):
    def configure_optimizers(self) -> Any:
        return [{"optimizer": super().configure_optimizers()}]


class StepsLater(Classifier):
    """Steps all parameters but the first."""

    def configure_optimizers(self) -> Any:
        return SGD([*self.parameters()][1:], lr=0.1, momentum=0.9)


class Own(Objective):
    """Draws weights at the start, and lets all trainable parameters change the gradients."""

    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        return {name: value + 0.1 * torch.randn(value.shape) for name, value in w.items()}, {}

    def gradient(self, oracle: Oracle, w: State, held: Any, batch: Any) -> tuple[State, Any]:
        v = oracle.step("second", w, {name: 0.1 * value for name, value in w.items()})
        return {name: g + v[name].mean() for name, g in oracle(v, batch).items()}, held


class Again(Objective):
    """Keeps how far gradients are apart at the same weights."""

    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        return w, {"apart": torch.zeros(())}

    def gradient(self, oracle: Oracle, w: State, held: State, batch: Any) -> tuple[State, State]:
        g, other = oracle(w, batch), oracle({k: v.clone() for k, v in w.items()}, batch)
        return g, {"apart": held["apart"] + sum((g[k] - other[k]).abs().sum() for k in g)}

    def end(self, client: ClientContext, w: State, held: State) -> None:
        client.memory["apart"] = float(held["apart"])


def test_a_second_loss_of_a_batch_draws_as_the_first_one(stacks: list[int]) -> None:
    model = Classifier(Dropping(), PLAIN.optimizer)
    made = fitted(Vectorized(), FedAvg(objective=Again()), model, table_data(8))
    assert stacks
    notes = made.federation.clients
    assert all(notes[client]["objective"]["apart"] < 1e-4 for client in range(8))


class Freezing(Callback):
    """Freezes the first layer of the clients with an even number of samples."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        first = next(pl_module.parameters())
        first.requires_grad_(len(trainer.train_dataloader._rows) % 2 == 1)


def test_clients_that_freeze_other_layers_train_by_themselves(stacks: list[int]) -> None:
    settings: dict[str, Any] = {"callbacks": [Freezing()], "data": table_data(8), "rounds": 1}
    alone, stacked = (fitted(engine, **settings) for engine in (InProcess(), Vectorized()))
    assert not stacks
    assert_same_models(alone, stacked)


def test_a_fit_without_an_epoch_for_the_body_says_so() -> None:
    with pytest.raises(FlsuiteError, match="leaves no step for the body"):
        fitted(Vectorized(), FedRep(head_epochs=2))


class Complex(Classifier):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class Embedding(Classifier):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tokens = nn.Embedding(4, 2, padding_idx=0)


class Warm(Classifier):
    extra_epochs = 1


class Scheduled(Classifier):
    def __init__(self, *args: Any, interval: str = "epoch", plateau: bool = False) -> None:
        super().__init__(*args)
        self.interval, self.plateau = interval, plateau

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler: Any = lr_scheduler.ExponentialLR(optimizer, 0.8)
        if self.plateau:
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
        config = {"scheduler": scheduler, "interval": self.interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "frequency": 2}}


SETTINGS: dict[str, dict[str, Any]] = {
    "clipping by norm": {"gradient_clip_val": 0.05},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clipping of gradients that share memory": {
        "gradient_clip_val": 0.05,
        "model": Classifier(TwoShifts(), OPTIMIZERS["SGD"]),
    },
    "a falling rate": {"lr_decay": CosineDecay(rounds=3)},
    "own statistics": {"batchnorm": "local"},
    "own layers": {"aggregator": aggregators.FedBN()},
    "augmentation": {
        "data": images(augment=CropFlip(padding=1)),
        "model": Classifier(InDouble(), OPTIMIZERS["SGD"]),
    },
    "tied weights and a choice of numbers": {
        "model": Classifier(Tied(), OPTIMIZERS["SGD"]),
        "aggregator": FedAvg(transforms=[TopK(0.3)]),
    },
    "tied weights and decay": {
        "model": Classifier(Tied(), partial(SGD, lr=0.1, weight_decay=0.1)),
        "aggregator": FedProx(mu=0.1),
    },
    "tasks": {
        "data": TaskSequence(table_data(), 3, classes_per_task=1, rounds_per_task=1),
        "rounds": 3,
    },
    "an optimizer in a list of dictionaries": {
        "model": Lists(PLAIN.backbone, PLAIN.optimizer),
        "max_epochs": 2,
    },
    **{
        f"numbers of batches, {name}": {
            "aggregator": method,
            "model": ScaledByNumber(PLAIN.backbone, PLAIN.optimizer),
            "max_epochs": 2,
        }
        for name, method in {"Ditto": Ditto(lam=0.5), "MOON": MOON()}.items()
    },
    **{  # PerFedAvg takes the gradients of every first batch away
        f"clipping of no gradients by {algorithm}": {
            "aggregator": PerFedAvg(alpha=0.1),
            "data": table_data(8),
            "max_epochs": 2,
            "gradient_clip_val": 0.05,
            "gradient_clip_algorithm": algorithm,
        }
        for algorithm in ("norm", "value")
    },
    "what is taken from the global model": {"aggregator": FedALA(), "rounds": 3},
    "the dynamic regularizer": {"aggregator": FedDyn()},
}


# Each has a case here, or above, that takes the same steps.
ALIKE = ("tasks", "clipping of no gradients by value", "numbers of batches, MOON", "own layers")


@pytest.mark.parametrize("settings", mostly_long(SETTINGS, *(SETTINGS.keys() - set(ALIKE))))
def test_each_setting_is_that_of_a_single_fit(settings: dict[str, Any], stacks: list[int]) -> None:
    close(stacks, 1e-5, **{"max_epochs": 1, **settings})


def of_both(what: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Return settings for clients of equal and of unequal sizes."""
    sizes = {"equal": IID(), "unequal": Natural()}
    return {f"{what}, {name}": {"data": images(each), **settings} for name, each in sizes.items()}


FITTED = {"model": Classifier(InDouble(), PLAIN.optimizer), "max_epochs": 3}
ODD = {"max_epochs": 3, "keep_optimizers": True, **FITS["SGD"]}  # some batch has no other of a pair
EXACT: dict[str, dict[str, Any]] = {
    **{name: {"model": Classifier(InDouble(), one)} for name, one in OPTIMIZERS.items()},
    **of_both("large layers", model=Classifier(Wide(), OPTIMIZERS["momentum"])),
    # With momentum, a frozen layer would move on if it took a step without a gradient.
    "FedRep": {"aggregator": FedRep(head="network.5."), "schedule": Synchronous(0.7), **ODD},
    "FedBABU": {
        "aggregator": FedBABU(head="network.5."),
        "schedule": Synchronous(0.7),
        **ODD,
        "data": images(IID()),
    },
    **of_both("pairs of batches", aggregator=PerFedAvg(alpha=0.1), **ODD),
    **{
        f"a part of the model, {one.name}": {
            "aggregator": one,
            "data": images(IID()),
            "model": StepsLater(InDouble(), PLAIN.optimizer),
        }
        for one in (FedProx(mu=0.1), Ditto(), FedRep(head="network.5."), PerFedAvg(0.1))
    },
    "an own objective": {
        "aggregator": FedAvg(objective=Own()),
        "model": StepsLater(InDouble(), PLAIN.optimizer),
        "gradient_clip_val": 0.5,
    },
    **of_both("by epoch", **FITTED | {"model": Scheduled(InDouble(), PLAIN.optimizer)}),
    **of_both(
        "by step", **FITTED | {"model": Scheduled(InDouble(), PLAIN.optimizer, interval="step")}
    ),
    # Half the batches of the smallest client are none, so that it fails.
    **of_both("a fraction", limit_train_batches=0.5, **FITTED),
    **of_both("a number", limit_train_batches=2, **FITTED),
    **of_both("steps", max_steps=3, **FITTED),
    **of_both("pairs", limit_train_batches=2, max_steps=3, aggregator=PerFedAvg(), **FITTED),
}
IN_CI = ("SGD", "AdamW", "Adagrad", "NAdam", "RMSprop", "a part of the model, FedProx")
IN_CI += ("a part of the model, FedRep", "by epoch, equal", "a fraction, equal", "a number, equal")
IN_CI += ("steps, equal", "pairs, equal")  # as those of unequal sizes, and fewer of them end early
IN_CI += ("by step, equal", "pairs of batches, equal", "large layers, equal", "FedBABU")


@pytest.mark.parametrize("settings", mostly_long(EXACT, *(EXACT.keys() - set(IN_CI))))
def test_in_double_precision_nothing_differs(settings: dict[str, Any], stacks: list[int]) -> None:
    """Clients have 3 to 20 images, so their steps and the sizes of their batches differ."""
    close(stacks, 1e-12, **{"data": images(), **settings})


def test_a_callback_with_hooks_of_steps_trains_clients_one_by_one(
    stacks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        alone, stacked = (
            fitted(engine, callbacks=[Seeing()]) for engine in (InProcess(), Vectorized())
        )
    assert not stacks
    assert_same_models(alone, stacked)
    (said,) = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert "Seeing has on_train_batch_end, which a stack cannot call" in said


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "manual": ({"model": Manual(PLAIN.backbone, PLAIN.optimizer)}, "manual optimization"),
    "hooks": ({"model": Watching(PLAIN.backbone, PLAIN.optimizer)}, "on_train_batch_start"),
    "complex numbers": ({"model": Complex(PLAIN.backbone, PLAIN.optimizer)}, "complex parameters"),
    "a warm-up": ({"model": Warm(PLAIN.backbone, PLAIN.optimizer)}, "has a warm-up"),
    "padding": ({"model": Embedding(PLAIN.backbone, PLAIN.optimizer)}, "tokens has padding_idx"),
    "a Trainer": ({"model": Reading(PLAIN.backbone, PLAIN.optimizer)}, "needs a Trainer"),
    "LBFGS": ({"model": Classifier(PLAIN.backbone, LBFGS)}, "one of SGD, Adam"),
    "accumulation": ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
    "a scheduler of scores": (
        {"model": Scheduled(PLAIN.backbone, PLAIN.optimizer, plateau=True)},
        "reads a score of one client",
    ),
    "two factors of the rate": (
        {"model": Scheduled(PLAIN.backbone, PLAIN.optimizer), "lr_decay": CosineDecay(4)},
        "would both set the learning rate",
    ),
    "measured durations": (
        {"schedule": Asynchronous(concurrency=2, speeds=Measured())},
        "other ones than Measured",
    ),
    "workers in flight": (
        {"schedule": Asynchronous(concurrency=2), "engine": Vectorized(workers=2)},
        r"set trainer\.engine\.workers to 1",
    ),
}


@pytest.mark.parametrize(("settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stacked_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(FlsuiteError, match=reason) as error:
        fitted(**{"engine": Vectorized(), **settings})
    assert "Processes" in str(error.value)


def test_a_kept_optimizer_state_has_no_more_memory_than_its_client() -> None:
    model = Classifier(InDouble(), OPTIMIZERS["momentum"])
    made = fitted(Vectorized(clients=4), data=images(), keep_optimizers=True, model=model)
    leaves, _ = tree_flatten([made.federation.clients[k] for k in range(6)])
    kept = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    assert kept and all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in kept)
