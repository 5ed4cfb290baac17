"""DP-SGD on clients: its gradient by hand, its epsilon, and the model that it leaves as it was."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import (
    SCAFFOLD,
    Ditto,
    DPFedAvg,
    FeatureTerm,
    FedALA,
    FedAvg,
    FedFisher,
    FedRep,
    Objective,
)
from flsuite.callbacks import DPSGD
from flsuite.data import IID, TaskSequence
from flsuite.data.loader import TrainLoader
from flsuite.federation import Faults, InProcess, PowerOfChoice, Processes, Synchronous, Vectorized
from flsuite.metrics.privacy import RandomDraw, epsilon
from flsuite.models import MLP, Classifier
from flsuite.models.backbones import Backbone, ResNet20
from tests.callbacks.test_dp_sgd_alone import few
from tests.conftest import classifier, equal_states, trainer
from tests.federation.engines.test_processes import Images
from tests.federation.engines.test_vectorized import InDouble

pytest.importorskip("opacus", reason="needs Opacus: pip install 'flsuite[privacy]'")
pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'flsuite[privacy]'")


def fit(callback: DPSGD, rounds: int = 1, callbacks: Any = (), **kwargs: Any) -> Any:
    model, data = kwargs.pop("model", None), kwargs.pop("data", None)
    made = trainer(rounds=rounds, callbacks=[callback, *callbacks], **kwargs)
    made.fit(model or classifier(), data or few())
    return made


class Spy(Callback):
    """Notes what the optimizer is about to step along, and what was drawn for it."""

    seen: list[tuple[int, dict[str, torch.Tensor]]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        loader: TrainLoader = trainer.train_dataloader
        gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
        self.seen.append((loader.drawn[len(self.seen) % len(loader)], gradients))


@pytest.fixture
def spy() -> Spy:
    Spy.seen = []
    return Spy()


# The gradient


def in_color() -> Images:
    """Images whose memory has the channels last, as that of all stored images."""
    return Images(clients=1, partition=IID(), batch_size=256, val_fraction=0.0)


@pytest.mark.parametrize(
    ("make", "samples"),
    [(classifier, lambda: few(1, 40)), (lambda: Classifier(InDouble()), in_color)],
    ids=["digits", "a convolution of images in color"],
)
def test_a_step_by_hand(make: Any, samples: Any, spy: Spy) -> None:
    """Draw all of one client's samples, and hardly any noise: the mean of clipped gradients."""
    data, model = samples(), make()
    fit(DPSGD(noise_multiplier=1e-9, max_grad_norm=0.7), data=data, model=model, callbacks=[spy])
    ((drawn, got),) = Spy.seen

    fresh = make()
    before = trainer(rounds=1).prepare(fresh, samples())
    fresh.load_state_dict(before.federation.client_state(None))
    data = before.federation.data
    rows = data.train_rows(0)
    assert drawn == len(rows)
    total = {name: torch.zeros_like(p) for name, p in fresh.named_parameters()}
    clipped = 0
    for row in rows:
        fresh.zero_grad()
        fresh.training_step(next(data.batches_of(data.train, [row[None]])), 0).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in fresh.parameters()))
        clipped += norm > 0.7
        for name, parameter in fresh.named_parameters():
            total[name] += parameter.grad * min(1.0, 0.7 / norm)
    assert clipped > 0
    for name, gradient in got.items():
        assert gradient == pytest.approx(total[name] / len(rows), abs=1e-6)


def test_the_deviation_of_the_noise(spy: Spy) -> None:
    """Clip gradients to nearly nothing, so that only the noise is left."""
    model = Classifier(MLP(hidden=(100,)), optimizer=partial(SGD, lr=1e-3))
    clip, noise, size = 1e-3, 1e3, 10
    fit(DPSGD(noise, clip), data=few(1, 20, batch_size=size), model=model, callbacks=[spy])
    draws = [torch.cat([g.flatten() for g in grads.values()]) for _, grads in Spy.seen]
    numbers = len(draws[0])
    for draw in draws:
        expected = noise * clip / size
        assert float(draw.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * numbers))
    correlation = float(torch.corrcoef(torch.stack(draws))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(numbers)


def test_a_step_in_bfloat16_is_clipped_by_the_norm_of_float32(spy: Spy) -> None:
    clip, size = 0.05, 4
    data, quiet = few(1, 40, batch_size=size), DPSGD(noise_multiplier=1e-12, max_grad_norm=clip)
    fit(quiet, callbacks=[spy], precision="bf16-mixed", data=data, max_epochs=6)
    alone = [gradients for drawn, gradients in Spy.seen if drawn == 1]
    norms = [sum(float(g.double().square().sum()) for g in own.values()) ** 0.5 for own in alone]
    assert [norm * size for norm in norms] == pytest.approx([clip] * len(alone), rel=1e-5)
    assert alone


def test_a_batch_without_samples_is_a_step_of_noise_alone(spy: Spy) -> None:
    fit(DPSGD(1e-9, 1.0), data=few(1, 60, batch_size=1), callbacks=[spy])
    sizes = [drawn for drawn, _ in Spy.seen]
    assert {0, 1, 2} <= set(sizes)
    for drawn, gradients in Spy.seen:
        largest = max(float(g.abs().max()) for g in gradients.values())
        assert largest < 1e-7 if drawn == 0 else largest > 1e-4


# The model that it leaves


class Stumbles(Classifier):
    """A classifier whose second client raises in the middle of its fit."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.train_dataloader.client == 1:
            raise RuntimeError("unplugged")
        return loss


def assert_clean(model: nn.Module) -> None:
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert not any(part._forward_hooks or part._backward_hooks for part in model.modules())
    assert not hasattr(model, "autograd_grad_sample_hooks")


def test_the_resident_model_is_as_it_was() -> None:
    model = Stumbles(MLP(hidden=(16,)), optimizer=partial(SGD, lr=0.1))
    made = fit(DPSGD(), rounds=2, model=model)
    assert [failure.client for failure in made.federation.log.failures] == [1]
    assert len(made.federation.log.updates) == 2
    assert_clean(model)
    plain = classifier()
    trainer(rounds=1).prepare(plain, few())
    assert list(model.state_dict()) == list(plain.state_dict())


def test_layers_that_overwrite_their_inputs_do_so_again_afterwards() -> None:
    model = Classifier(ResNet20(norm="group"), optimizer=partial(SGD, lr=0.1))
    made = fit(DPSGD(), data=few(1, 8, batch_size=4), model=model)
    assert not made.federation.log.failures
    after = [part.inplace for part in model.modules() if isinstance(part, nn.ReLU)]
    assert after and all(after)
    assert_clean(model)


# Epsilon, resume and engines


def numbers(made: Any, scope: str = "global") -> list[float]:
    rows = made.run.folder.table.rows
    return [row.value for row in rows if (row.scope, row.metric) == (scope, "sample_epsilon")]


def test_epsilon_of_each_client_and_the_largest() -> None:
    made = fit(DPSGD(2.0, delta=1e-3), rounds=2, data=few(batch_size=8), max_epochs=2)
    sizes = [made.federation.data.samples(client) for client in range(3)]
    for client, size in enumerate(sizes):
        draw = RandomDraw(size, 8.0, is_poisson=True)
        steps = 2 * len(TrainLoader(made.federation.data, client, 0, 1))
        expected = [epsilon(draw, 2.0, steps, 1e-3), epsilon(draw, 2.0, 2 * steps, 1e-3)]
        assert numbers(made, str(client)) == expected
    assert numbers(made) == [max(numbers(made, str(c))[r] for c in range(3)) for r in (0, 1)]
    assert made.run.summary.privacy == {"sample_epsilon": numbers(made)[-1], "sample_delta": 1e-3}


def test_what_was_sent_counts_also_if_nobody_uses_it() -> None:
    def spent(**faults: float) -> list[float]:
        schedule = Faults(Synchronous(), **faults)
        made = fit(DPSGD(), rounds=3, schedule=schedule, data=few(6))
        failed = sum(r.value for r in made.run.folder.table.rows if r.metric == "failed")
        assert bool(failed) == bool(faults)
        return [max(numbers(made, str(client)), default=0.0) for client in range(6)]

    whole = spent()
    assert spent(nan=0.1, shapes=0.1, late=0.1) == whole
    assert sum(spent(raises=0.3)) < sum(whole), "who fails before it sends has told nobody"


def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path: Path) -> None:
    whole = fit(DPSGD(), rounds=4)
    folder = str(tmp_path / "run")
    fit(DPSGD(), rounds=2, run_dir=folder)
    resumed = trainer(rounds=4, callbacks=[DPSGD()], run_dir=folder)
    resumed.fit(classifier(), few(), ckpt_path="last")
    assert equal_states(whole.federation.state, resumed.federation.state)
    assert numbers(resumed) == pytest.approx(numbers(whole), rel=1e-8)


def test_a_second_fit_of_one_object_starts_afresh() -> None:
    callback = DPSGD()
    spent = [numbers(fit(callback)) for _ in range(2)]
    assert spent[0] == spent[1]


def test_engines_and_loops_agree() -> None:
    plain = fit(DPSGD(), rounds=2)
    for kwargs in ({"engine": Processes(workers=2)}, {"callbacks": [Callback(), Slow()]}):
        other = fit(DPSGD(), rounds=2, **kwargs)
        assert equal_states(plain.federation.state, other.federation.state)
        assert numbers(plain) == numbers(other)


class InPart(Backbone):
    """A layer that the optimizer steps, one that it does not, and one that nothing reads."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        first = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.Tanh())
        return nn.Sequential(*first, nn.Linear(8, outputs), _Passed())


class _Passed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SteppedInPart(Classifier):
    def configure_optimizers(self) -> Any:
        return self.optimizer(list(self.parameters())[2:])


def in_part() -> Classifier:
    return SteppedInPart(InPart(), optimizer=partial(SGD, lr=0.1))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"aggregator": FedAvg},
        {"aggregator": SCAFFOLD},
        {"model": in_part, "gradient_clip_val": lambda: 0.05},
    ],
    ids=["FedAvg", "SCAFFOLD", "parameters that take no step count in the norm"],
)
def test_a_stack_takes_the_gradients_that_opacus_takes(
    kwargs: dict[str, Any], stacks: list[int]
) -> None:
    """Compare a stack with fits of single clients: batches of all sizes, some of them empty."""
    alone, stacked = (
        fit(
            DPSGD(max_grad_norm=0.5), data=few(5, 60, 4), rounds=2, max_epochs=2, engine=engine,
            **{name: make() for name, make in kwargs.items()},
        )
        for engine in (InProcess(), Vectorized(clients=3))
    )  # fmt: skip
    assert stacks == 2 * [3, 2]
    for name, value in alone.federation.state.items():
        torch.testing.assert_close(stacked.federation.state[name], value, rtol=1e-5, atol=1e-6)
    assert numbers(stacked) == numbers(alone)


class Slow(Callback):
    """A callback with a hook of epochs, so that Lightning's loop takes the steps."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None: ...


def test_what_follows_from_the_steps_may_be_sent_beside_the_model() -> None:
    made = fit(DPSGD(), aggregator=DPFedAvg(noise_multiplier=1.0, quantile=0.5))
    assert made.federation.uplink.statistics
    assert made.round == 1 and not made.federation.log.failures


# Refusals


class Normalised(Backbone):
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        flat = math.prod(shape)
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(flat), nn.Linear(flat, outputs))


class Leak(FeatureTerm):
    """Changes the logits by the samples, which the clipping does not bound."""

    def logits(self, outputs: Any, batch: Any, held: Any) -> Any:
        return outputs + batch[0].mean()


class Reads(Objective):
    """Reads the samples where a fit starts."""

    def start(self, client: Any, w: Any) -> Any:
        return {name: value + next(client.fit.batches())[0].mean() for name, value in w.items()}, {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"model": Classifier(Normalised(), optimizer=partial(SGD, lr=0.1))},
            "is a BatchNorm1d, whose output for one sample depends on the rest",
        ),
        ({"accumulate_grad_batches": 2}, r"leave out trainer\.accumulate_grad_batches"),
        (
            {"data": TaskSequence(few(), tasks=2, classes_per_task=5, rounds_per_task=1)},
            "leave out TaskSequence",
        ),
        ({"aggregator": FedFisher("diag")}, "clients of FedFisher also send fisher"),
        (
            {"aggregator": FedALA()},
            "DPSGD needs only noisy gradients, but LocalAggregation reads samples .* when a fit "
            r"starts; change trainer\.callbacks or trainer\.aggregator\.objective",
        ),
        ({"aggregator": Ditto()}, "trains at other weights, without the noise of DPSGD"),
        ({"aggregator": FedAvg(objective=Leak())}, r"Leak\.logits sees samples"),
        ({"aggregator": FedAvg(objective=Reads())}, "reads samples of the client without"),
        ({"aggregator": FedRep(), "max_epochs": 2}, "DPSGD: the aggregator freezes layers"),
        ({"schedule": Synchronous(2, PowerOfChoice())}, "losses of clients, which have no noise"),
        ({"callback": DPSGD(delta=0.025)}, r"delta must be below 1 / 40, .* got 0\.025"),
    ],
    ids=[
        *("batch_norm", "accumulation", "tasks", "fisher", "fedala", "ditto"),
        *("logits", "start", "frozen", "losses", "delta"),
    ],
)
def test_what_it_cannot_do_is_refused(kwargs: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=message) as error:
        fit(kwargs.pop("callback", DPSGD()), run_dir=str(tmp_path / "run"), **kwargs)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
