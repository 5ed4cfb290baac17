"""FedBuff: FedAvg without delay, and stale changes by hand."""

from typing import Any

import pytest
import torch

from flsuite import aggregators as methods
from flsuite.aggregators import FedAsync, FedAvg, FedBuff, Hyperbolic, Polynomial
from flsuite.aggregators.rules.base import Weighting
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import cast, clone, mean_of
from tests.aggregators.federations import assert_same_models, configured, reference, run
from tests.aggregators.stale_updates import assert_same_bits, late, numbers, random_states

AWKWARD = (1, 3, 7, 1_000_003, 17, 333)


class Cutoff(methods.Constant):
    """Zero weight for updates older than two versions."""

    def __call__(self, tau: int) -> float:
        return 0.0 if tau > 2 else 1.0


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("normalize", ["buffer", "weights"])
@pytest.mark.parametrize("base", ["same", "equal", "empty"])
def test_without_delay_delta_is_the_mean_of_the_models_bit_for_bit(
    weighting: Weighting, normalize: Any, base: str
) -> None:
    old, *sent = random_states(7, entries=20_000)
    bases = {"same": old, "equal": clone(old), "empty": {}}
    updates = [
        late(i, state, samples, staleness=i, base=bases[base])
        for i, (state, samples) in enumerate(zip(sent, AWKWARD, strict=True))
    ]
    buffered = FedBuff(eta=1.0, staleness="constant", weighting=weighting, normalize=normalize)
    new = configured(buffered, "w").aggregate(old, iter(updates))
    mean = mean_of((u.state, u.samples if weighting == "samples" else 1.0) for u in updates)
    assert_same_bits(new, cast(mean, old))


def test_in_lockstep_a_whole_run_is_fedavg_bit_for_bit() -> None:
    assert_same_models(run(FedBuff(weighting="samples")), reference(FedAvg))
    assert_same_models(run(FedBuff("mix", eta=1.0)), reference(FedAvg, "uniform"))


@pytest.mark.parametrize("mode", ["delta", "mix"])
@pytest.mark.parametrize("normalize", ["buffer", "weights"])
def test_eta_zero_changes_nothing_bit_for_bit(mode: Any, normalize: Any) -> None:
    *sent, old = random_states(4)  # the counter of the old model is the highest
    old["w"][0] = -0.0
    updates = [late(i, state, 3, i, sent[0]) for i, state in enumerate(sent)]
    aggregator = configured(FedBuff(mode, eta=0.0, normalize=normalize), "w")
    assert_same_bits(aggregator.aggregate(old, iter(updates)), old)
    assert [update.metrics["weight"] for update in updates] == [0.0] * 3


def test_the_new_model_is_rounded_once() -> None:
    """The result does not depend on the precision of the buffer's mean."""
    old, *sent = random_states(4)
    updates = [late(i, state) for i, state in enumerate(sent)]
    new = configured(FedBuff("mix", eta=0.3), "w").aggregate(old, iter(updates))
    mean = sum(state["w"].double() for state in sent) / 3
    assert torch.equal(new["w"], torch.lerp(old["w"].double(), mean, 0.3).float())


def two_late_updates() -> list[ClientUpdate]:
    """Return a change of 2 by one sample, fresh, and one of 4 by three, of staleness 3."""
    return [
        late(0, numbers(w=12.0), 1, 0, numbers(w=10.0)),
        late(1, numbers(w=5.0), 3, 3, numbers(w=1.0)),
    ]


@pytest.mark.parametrize(
    ("settings", "change", "weights"),
    [
        # (2 + 0.5 * 4) / 2
        ({}, 2.0, (0.5, 0.25)),
        ({"staleness": "constant"}, 3.0, (0.5, 0.5)),
        ({"staleness": Hyperbolic()}, 1.5, (0.5, 0.125)),
        # (1 * 2 + 3 * 0.5 * 4) / (1 + 3)
        ({"weighting": "samples"}, 2.0, (0.25, 0.375)),
        # (2 + 0.5 * 4) / (1 + 0.5)
        ({"normalize": "weights"}, 8 / 3, (2 / 3, 1 / 3)),
        # (1 * 2 + 1.5 * 4) / (1 + 1.5), times 0.5
        ({"weighting": "samples", "normalize": "weights", "eta": 0.5}, 1.6, (0.2, 0.3)),
        # The old model is 10. The models are 2 above it and 5 below it.
        ({"mode": "mix"}, -0.75, (0.25, 0.25)),
        ({"mode": "mix", "eta": 0.8, "weighting": "samples"}, -2.6, (0.2, 0.6)),
        # 0.5 * (2 - 0.5 * 5) / 2
        ({"mode": "mix", "staleness": Polynomial()}, -0.125, (0.25, 0.125)),
    ],
)
def test_late_updates_by_hand(
    settings: dict[str, Any], change: float, weights: tuple[float, float]
) -> None:
    updates = two_late_updates()
    new = configured(FedBuff(**settings), "w").aggregate(numbers(w=10.0), iter(updates))
    assert new["w"].item() == pytest.approx(10.0 + change, rel=1e-12)
    assert [update.metrics["weight"] for update in updates] == pytest.approx(weights, rel=1e-12)


def test_buffers_move_by_the_change_and_counters_take_the_maximum() -> None:
    old = {**numbers(w=1.0, mean=0.5), "count": torch.tensor(40), "seen": torch.tensor(True)}
    base = {**numbers(w=2.0, mean=1.0), "count": torch.tensor(10), "seen": torch.tensor(False)}
    sent = {**numbers(w=1.5, mean=-1.0), "count": torch.tensor(30), "seen": torch.tensor(False)}
    update = late(0, sent, 1, 3, base)
    new = configured(FedBuff(), "w").aggregate(old, iter([update]))
    # Half of the changes -0.5 and -2. A mean may change its sign.
    assert (new["w"].item(), new["mean"].item()) == pytest.approx((0.75, -0.5), rel=1e-12)
    assert (new["count"].item(), new["seen"].item()) == (40, True)


def test_a_variance_stays_positive() -> None:
    """Two clients lower the same variance from 1 to 0.1: the sum of their changes would be -0.8."""
    aggregator = configured(FedBuff(staleness="constant"), "w")
    state = base = numbers(w=1.0, var=1.0)
    for staleness in range(2):
        update = late(staleness, numbers(w=0.1, var=0.1), 1, staleness, base)
        state = aggregator.aggregate(state, iter([update]))
    assert state["var"].item() == pytest.approx(0.1, rel=1e-12)
    assert state["w"].item() == pytest.approx(-0.8, rel=1e-12)

    # The server's rate does not extrapolate a statistic either.
    faster = configured(FedBuff(eta=2.0), "w")
    state = faster.aggregate(base, iter([late(0, numbers(w=0.1, var=0.1))]))
    assert state["var"].item() == pytest.approx(0.1, rel=1e-12)
    assert state["w"].item() == pytest.approx(-0.8, rel=1e-12)


def test_updates_without_weight_are_left_out() -> None:
    old = numbers(w=1.0)
    updates = [late(0, numbers(w=3.0)), late(1, numbers(w=50.0), 1, 3, numbers(w=9.0))]
    aggregator = configured(FedBuff(staleness=Cutoff(), normalize="weights"), "w")
    assert aggregator.aggregate(old, iter(updates))["w"].item() == 3.0
    assert [update.metrics["weight"] for update in updates] == [1.0, 0.0]

    assert_same_bits(aggregator.aggregate(old, iter(updates[1:])), old)
    assert updates[1].metrics["weight"] == 0.0


@pytest.mark.parametrize("staleness", ["constant", "polynomial", "hinge"])
@pytest.mark.parametrize("tau", [0, 1, 7])
def test_a_mixed_buffer_of_one_is_fedasync(staleness: Any, tau: int) -> None:
    old, sent, base = random_states(3)
    models, weights = [], []
    for aggregator in (FedBuff("mix", 0.3, staleness), FedAsync(0.3, staleness)):
        update = late(0, sent, 5, tau, base)
        models.append(configured(aggregator, "w").aggregate(old, iter([update])))
        weights.append(update.metrics["weight"])
    assert_same_bits(*models)
    assert weights[0] == weights[1]
