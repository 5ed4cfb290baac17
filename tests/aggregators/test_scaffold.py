"""SCAFFOLD against algorithm 1 for one number, and its two controls."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from flsuite import FlsuiteError
from flsuite.aggregators import SCAFFOLD
from flsuite.callbacks import FederationCallback
from flsuite.data import DataSpec
from flsuite.federation import Synchronous
from flsuite.federation.client.callbacks import ExponentialDecay
from tests.aggregators.federations import (
    CURVATURES,
    MINIMA,
    Quadratic,
    Quadratics,
    configured,
    federation,
    optimum,
    run,
    update,
)


def scaffold(
    a: Sequence[float],
    m: Sequence[float],
    lr: float,
    steps: int,
    cohorts: Sequence[Sequence[int]],
    server_lr: float = 1.0,
) -> list[float]:
    """Return the state after each round of algorithm 1, option II, for one number."""
    x, c, own, states = 0.0, 0.0, [0.0] * len(a), []
    for cohort in cohorts:
        moved, changed = [], []
        for i in cohort:
            y = x
            for _ in range(steps):
                y -= lr * (a[i] * (y - m[i]) - own[i] + c)
            renewed = own[i] - c + (x - y) / (steps * lr)
            moved.append(y - x)
            changed.append(renewed - own[i])
            own[i] = renewed
        x += server_lr * sum(moved) / len(cohort)
        c += sum(changed) / len(a)
        states.append(x)
    return states


@pytest.mark.parametrize(
    ("curvatures", "lr", "control"),
    [
        ((1.0, 2.0, 5.0, 10.0), 1.0, "displacement"),
        ((1.0, -1.0, 5.0, float("inf")), 0.7, "mean_gradient"),
    ],
)
def test_scaffold_follows_algorithm_1(
    curvatures: tuple[float, ...], lr: float, control: Any
) -> None:
    """With part of the clients per round; one raises, and the update of another is refused."""
    minima = (0.0, 0.5, -1.0, 1.0)
    data = Quadratics(curvatures, minima)
    schedule, states, cohorts = Synchronous(3), [], []

    class Notes(FederationCallback):
        def on_round_end(self, run: Any, round: int) -> None:
            drawn = sorted(fit.client for fit in schedule.ended)
            cohorts.append([i for i in drawn if 0 < curvatures[i] < np.inf])
            assert [update.client for update in run.federation.log.updates] == cohorts[-1]
            states.append(float(run.federation.state["w"]))

    aggregator = SCAFFOLD(lr=lr, control=control)
    trainer = federation(aggregator, 8, max_epochs=5, schedule=schedule, callbacks=[Notes()])
    trainer.fit(Quadratic(), data)
    assert len(states) == 8
    assert len({tuple(c) for c in cohorts}) > 1
    assert states == pytest.approx(scaffold(curvatures, minima, 0.05, 5, cohorts, lr), abs=1e-5)


def test_both_controls_of_scaffold_agree_for_plain_sgd() -> None:
    """Over several epochs and batches per round, each with its own rate, and with buffers."""
    settings = {"rounds": 3, "max_epochs": 2, "schedule": Synchronous(0.75)}
    settings["lr_decay"] = ExponentialDecay(gamma=0.5)
    written, mean = run(SCAFFOLD(), **settings), run(SCAFFOLD(control="mean_gradient"), **settings)
    for name, value in written.federation.state.items():
        torch.testing.assert_close(mean.federation.state[name], value, rtol=1e-3, atol=1e-5)
    kept, other = (
        made.federation.server.memory["objective"]["control"] for made in (written, mean)
    )
    for name, value in kept.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)
    assert kept.keys() == {n for n, _ in written.lightning_module.named_parameters()}


def test_scaffold_never_shares_memory_with_what_it_was_given() -> None:
    aggregator = configured(SCAFFOLD(), "w", clients=4)
    change = {"w": torch.tensor([2.0])}
    old = {"w": torch.zeros(1)}
    aggregator.aggregate(old, iter([update(0, {"w": torch.ones(1)}, control_change=change)]))
    sent = aggregator.broadcast(old)["objective"]["control"]
    assert sent["w"].item() == 0.5
    aggregator.aggregate(old, iter([update(0, {"w": torch.ones(1)}, control_change=change)]))
    kept = aggregator.memory["objective"]["control"]
    assert (sent["w"].item(), kept["w"].item(), change["w"].item()) == (0.5, 1.0, 2.0)


def test_the_servers_control_is_the_mean_of_the_clients_however_late_they_are() -> None:
    """The change of the model is damped by half at staleness 3, but not the change of ``c_i``."""
    server = configured(SCAFFOLD(), "w", clients=4)
    sent = update(0, {"w": torch.tensor([5.0])}, control_change={"w": torch.tensor([2.0])})
    sent = replace(sent, staleness=3, base={"w": torch.tensor([1.0])})
    new = server.aggregate({"w": torch.tensor([10.0])}, [sent])
    assert new["w"].item() == 12.0
    assert server.memory["objective"]["control"]["w"].item() == 0.5


def test_scaffold_counts_the_steps_that_a_parameter_took() -> None:
    """Steps in which a parameter is frozen do not count for it."""

    class Thawing(Quadratic):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if self.current_epoch >= 6 else loss.detach() + 0.0 * self.other

        def build(self, spec: DataSpec) -> None:
            super().build(spec)
            self.other = nn.Parameter(torch.zeros(()))

    data = Quadratics(CURVATURES, MINIMA)
    expected = scaffold(CURVATURES, MINIMA, 0.05, 4, [(0, 1)] * 3)[-1]
    for control in ("displacement", "mean_gradient"):
        assert optimum(SCAFFOLD(control=control), data, 3, model=Thawing()) == pytest.approx(
            expected, abs=1e-6
        )


class Scheduled(Quadratic):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, step_size=2)}


class TwoRates(Quadratic):
    def build(self, spec: DataSpec) -> None:
        super().build(spec)
        self.other = nn.Parameter(torch.zeros(()))

    def configure_optimizers(self) -> Optimizer:
        return SGD([{"params": [self.w]}, {"params": [self.other], "lr": 0.01}], lr=0.05)


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (Quadratic(partial(SGD, lr=0.05, momentum=0.9)), {}, "momentum 0.9"),
        (Quadratic(partial(SGD, lr=0.05, weight_decay=5e-4)), {}, "weight_decay 0.0005"),
        (Quadratic(partial(SGD, lr=0.05, maximize=True)), {}, "maximize True"),
        (Quadratic(partial(SGD, lr=0.0)), {}, "the learning rate is 0"),
        (Quadratic(partial(Adam, lr=0.05)), {}, "Adam"),
        (Scheduled(), {}, "0.05 and 0.005 in one fit"),
        (TwoRates(), {}, "0.05 and 0.01 in one fit"),
        (Quadratic(), {"gradient_clip_val": 1.0}, "gradient_clip_val"),
    ],
)
def test_scaffold_refuses_what_makes_the_displacement_lie(
    model: Quadratic, kwargs: Any, message: str
) -> None:
    data = Quadratics(CURVATURES, MINIMA)
    with pytest.raises(FlsuiteError, match=rf"{message}.*round 1, client 0.*'mean_gradient'"):
        optimum(SCAFFOLD(), data, 1, model=copy.deepcopy(model), **kwargs)
    assert np.isfinite(optimum(SCAFFOLD(control="mean_gradient"), data, 1, model=model, **kwargs))


def test_scaffold_with_momentum_and_decay_finds_the_optimum_of_the_decayed_loss() -> None:
    """Decay adds ``decay / 2 w^2`` to each client's loss; the mean gradient counts it once."""
    a, m, decay = np.array(CURVATURES), np.array(MINIMA), 0.5
    model = Quadratic(partial(SGD, lr=0.02, momentum=0.5, weight_decay=decay))
    reached = optimum(
        SCAFFOLD(control="mean_gradient"), Quadratics(CURVATURES, MINIMA), 40, model=model
    )
    assert reached == pytest.approx((a @ m) / (a + decay).sum(), abs=1e-4)
