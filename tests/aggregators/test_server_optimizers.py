"""FedAvgM, FedAdagrad, FedAdam and FedYogi against their update rules, worked by hand."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import (
    Aggregator,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedYogi,
)
from flsuite.messages import ClientUpdate
from flsuite.state import State
from tests.aggregators.federations import (
    configured,
    fold,
    run,
    update,
)
from tests.aggregators.stale_updates import assert_same_bits, late, numbers, random_states, settle
from tests.conftest import long


def server_steps(
    aggregator: Aggregator, start: float, clients: Sequence[tuple[float, float]]
) -> list[float]:
    """Return the global number after each round, given what two clients send in it."""
    server = configured(aggregator, "w")
    state = {"w": torch.tensor([start])}
    found = []
    for sent in clients:
        state = server.aggregate(
            state, iter([update(i, {"w": torch.tensor([w])}) for i, w in enumerate(sent)])
        )
        found.append(float(state["w"]))
    return found


def test_fedavgm_without_momentum_is_fedavg() -> None:
    plain, server = run(FedAvg()), run(FedAvgM(lr=1.0, momentum=0.0))
    for name, value in plain.federation.state.items():
        torch.testing.assert_close(server.federation.state[name], value)


def test_fedavgm_by_hand() -> None:
    """Deltas 2 and 1: v = 2, then 0.5 * 2 + 1 = 2; the state moves by 0.1 v."""
    assert server_steps(
        FedAvgM(lr=0.1, momentum=0.5), 1.0, [(2.0, 4.0), (2.4, 2.0)]
    ) == pytest.approx([1.2, 1.4])


def test_momentum_goes_on_in_a_round_without_updates() -> None:
    """For example an empty Poisson cohort: v = 2, then 0.5 * 2; buffers stay."""
    server = configured(FedAvgM(momentum=0.5), "w")
    state = server.aggregate(numbers(w=0.0, mean=1.0), [update(0, numbers(w=2.0, mean=5.0))])
    assert (state["w"].item(), state["mean"].item()) == (2.0, 5.0)
    state = server.aggregate(state, [])
    assert (state["w"].item(), state["mean"].item()) == (3.0, 5.0)


@pytest.mark.parametrize("method", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_server_optimizers_by_hand(method: type) -> None:
    """Against lines 11 to 15 of algorithm 2 on one number."""
    lr, beta1, beta2, tau = 0.3, 0.6, 0.8, 0.01
    sent = [(1.0, 2.0), (-1.0, 0.5), (0.7, 0.6)]
    x, m, v, expected = 0.2, 0.0, tau**2, []
    for pair in sent:
        delta = np.mean(pair) - x
        m = beta1 * m + (1 - beta1) * delta
        if method is FedAdagrad:
            v = v + delta**2
        elif method is FedYogi:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + lr * m / (np.sqrt(v) + tau)
        expected.append(x)
    second = {} if method is FedAdagrad else {"beta2": beta2}
    assert server_steps(method(lr=lr, beta1=beta1, tau=tau, **second), 0.2, sent) == pytest.approx(
        expected, rel=1e-5
    )


class InLockstep:
    """The papers' rule without staleness: an optimizer whose gradient is ``w - mean``."""

    def __init__(self, aggregator: FedAvg, state: State) -> None:
        self.weighting = aggregator.weighting
        self.w = state["w"].double()
        self.optimizer = aggregator.server_optimizer([self.w])

    def aggregate(self, state: State, updates: list[ClientUpdate]) -> State:
        weights = [u.samples if self.weighting == "samples" else 1 for u in updates]
        sent = [weight * u.state["w"].double() for weight, u in zip(weights, updates, strict=True)]
        self.w.copy_(state["w"])
        self.w.grad = self.w - sum(sent) / sum(weights)
        self.optimizer.step()
        return {**fold(FedAvg(self.weighting), state, updates), "w": self.w.float()}


@pytest.mark.parametrize("method", [FedAvgM, FedAdagrad, FedAdam, FedYogi])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("has_base", [True, False])
def test_fresh_updates_are_as_in_lockstep_bit_for_bit(
    method: Callable[..., Aggregator], weighting: str, has_base: bool
) -> None:
    """Also with decreasing counters, as from clients that reset their buffers."""
    *sent, start = random_states(5)
    states = [start, start]
    aggregator = method(weighting=weighting)
    optimizers = [configured(aggregator, "w"), InLockstep(aggregator, start)]
    for _ in range(3):
        base = states[0] if has_base else {}
        updates = [
            late(i, value, samples, 0, base)
            for i, (value, samples) in enumerate(zip(sent, (1, 3, 7, 1_000_003), strict=True))
        ]
        states = [o.aggregate(s, updates) for o, s in zip(optimizers, states, strict=True)]
        assert_same_bits(*states)
        sent = [{**value, "w": value["w"] * 0.9} for value in sent]


def late_round() -> tuple[State, list[ClientUpdate]]:
    """Return a round with delta ``(1 * 2 + 3 * 0.5 * 4) / (1 + 3) = 2`` for every entry.

    The second update is of staleness 3, which has the weight 0.5.
    """
    old = {**numbers(w=10.0, mean=-1.0), "count": torch.tensor(9)}
    fresh = {**numbers(w=12.0, mean=1.0), "count": torch.tensor(4)}
    base = {**numbers(w=1.0, mean=20.0), "count": torch.tensor(1)}
    trained = {**numbers(w=5.0, mean=24.0), "count": torch.tensor(6)}
    return old, [late(0, fresh, 1, 0, old), late(1, trained, 3, 3, base)]


def test_fedavgm_with_late_updates_by_hand() -> None:
    """v = 2, then 0.5 * 2 + 2 = 3; the state moves by 0.1 v, and buffers by the change itself."""
    old, updates = late_round()
    optimizer = configured(FedAvgM(lr=0.1, momentum=0.5), "w")
    new = optimizer.aggregate(old, iter(updates))
    assert new["w"].item() == pytest.approx(10.2, rel=1e-12)
    assert (new["mean"].item(), new["count"].item()) == (1.0, 9)

    # The changes are taken from the bases, wherever the global model is now.
    fresh = late(0, numbers(w=12.2, mean=3.0) | {"count": torch.tensor(1)}, 1, 0, new)
    assert optimizer.aggregate(new, iter([fresh, updates[1]]))["w"].item() == pytest.approx(10.5)


@pytest.mark.parametrize("method", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_optimizers_with_late_updates_by_hand(method: type) -> None:
    """Lines 11 to 15 of algorithm 2 with delta = 2."""
    old, updates = late_round()
    new = configured(method(lr=0.3, beta1=0.6, tau=0.01), "w").aggregate(old, iter(updates))

    first, start = 0.4 * 2.0, 0.01**2
    second = {
        FedAdagrad: start + 4.0,
        FedAdam: 0.99 * start + 0.01 * 4.0,
        FedYogi: start + 0.01 * 4.0,
    }[method]
    expected = 10.0 + 0.3 * first / (np.sqrt(second) + 0.01)
    assert new["w"].item() == pytest.approx(expected, rel=1e-12)
    assert (new["mean"].item(), new["count"].item()) == (1.0, 9)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_without_momentum_a_buffer_is_that_of_fedbuff(weighting: Any) -> None:
    old, *sent = random_states(4)
    bases = random_states(3, seed=1)
    models = []
    for aggregator in (FedAvgM(1.0, 0.0, weighting=weighting), FedBuff(weighting=weighting)):
        updates = [
            late(i, state, 2 * i + 1, i, base)
            for i, (state, base) in enumerate(zip(sent, bases, strict=True))
        ]
        models.append(configured(aggregator, "w").aggregate(old, iter(updates)))
    torch.testing.assert_close(models[0]["w"], models[1]["w"], rtol=1e-6, atol=1e-6)
    assert torch.equal(models[0]["mean"], models[1]["mean"])
    assert torch.equal(models[0]["count"], models[1]["count"])


def test_an_old_counter_does_not_set_back_the_global_one() -> None:
    """Also where no update is damped."""
    old, updates = late_round()
    optimizer = configured(FedAvgM(staleness="constant"), "w")
    assert optimizer.aggregate(old, iter(updates))["count"].item() == 9


def test_staleness_damps_an_update_that_is_alone() -> None:
    """Normalized by the buffer's size, as in FedBuff. Otherwise a lone update is never damped."""
    moved = []
    for staleness in ("polynomial", "constant"):
        optimizer = configured(FedAvgM(momentum=0.0, staleness=staleness), "w")
        sent = late(0, numbers(w=5.0), 7, 3, numbers(w=1.0))
        moved.append(optimizer.aggregate(numbers(w=10.0), iter([sent]))["w"].item())
    assert moved == pytest.approx([12.0, 14.0], rel=1e-12)


def test_damping_of_all_updates_alike_cancels_from_adam() -> None:
    """m and sqrt(v) shrink by the same factor, if tau is small."""
    steps = []
    for tau in (0, 8):
        optimizer = configured(FedAdam(lr=0.1, tau=1e-9), "w")
        sent = late(0, numbers(w=2.0), 1, tau, numbers(w=1.0))
        steps.append(optimizer.aggregate(numbers(w=1.0), iter([sent]))["w"].item() - 1.0)
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        partial(FedAvgM, lr=0.1, momentum=0.5),
        *long(partial(FedAdagrad, lr=0.1), partial(FedAdam, lr=0.01), partial(FedYogi, lr=0.01)),
    ],
)
def test_with_late_updates_they_stay_near_the_mean_optimum(make: Callable[[], Aggregator]) -> None:
    """Equal curvatures, and half of the clients in each buffer, with a staleness of up to three."""
    path = settle(make(), [1.0] * 4, (0.0, 1.0, 2.0, 5.0), 2, 1500)[1000:]
    assert sum(path) / len(path) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("method", [FedAvgM, FedAdagrad, FedAdam, FedYogi])
def test_a_staleness_without_a_name_is_refused(method: type) -> None:
    with pytest.raises(FlsuiteError, match="staleness must be one of"):
        method(staleness="linear")
    assert method(staleness="hinge").staleness == "hinge"
