"""FedAsync mixes one model at a time into the global one."""

import pytest
import torch

from flsuite.aggregators import Aggregator, FedAsync, Hyperbolic
from flsuite.common.errors import FederationError
from flsuite.common.state import StateLayout
from tests.aggregators.federations import ServerHalf
from tests.aggregators.stale_updates import assert_same_bits, late, numbers, random_states


def ready(aggregator: Aggregator, samples: int = 0) -> ServerHalf:
    return ServerHalf(aggregator, StateLayout(("w",), clients=4, samples=samples))


def test_one_update_by_hand() -> None:
    """With tau 3, s is 0.5 and a = 0.8 * 0.5: w goes 0.4 of its way from 1 to 6."""
    old = {**numbers(w=1.0, mean=-1.0), "count": torch.tensor(7)}
    update = late(0, {**numbers(w=6.0, mean=9.0), "count": torch.tensor(4)}, staleness=3)
    new = ready(FedAsync(mixing=0.8)).aggregate(old, iter([update]))
    assert (new["w"].item(), new["mean"].item()) == pytest.approx((3.0, 3.0), rel=1e-12)
    assert new["count"].item() == 7
    assert update.metrics == {"weight": pytest.approx(0.4, rel=1e-12)}


def test_several_updates_are_mixed_in_one_after_the_other() -> None:
    """0 -> 4 / 2 = 2, then (2 + 0.25 * (10 - 2)) = 4 with s = 1 / (1 + 1)."""
    updates = [late(0, numbers(w=4.0)), late(1, numbers(w=10.0), staleness=1)]
    new = ready(FedAsync(staleness="hyperbolic")).aggregate(numbers(w=0.0), iter(updates))
    assert new["w"].item() == pytest.approx(4.0, rel=1e-12)
    assert [update.metrics["weight"] for update in updates] == [0.5, 0.25]


def test_samples_weight_by_the_share_of_the_federation() -> None:
    """a = 0.5 * 30 / 120."""
    update = late(0, numbers(w=8.0), samples=30)
    new = ready(FedAsync(weighting="samples"), samples=120).aggregate(
        numbers(w=0.0), iter([update])
    )
    assert update.metrics["weight"] == 0.125
    assert new["w"].item() == 1.0


def test_a_rate_of_one_takes_the_clients_model_bit_for_bit() -> None:
    old, new = random_states(2)
    new["w"][0] = -0.0
    taken = ready(FedAsync(mixing=1.0)).aggregate(old, iter([late(0, new)]))
    assert_same_bits(taken, new)
    assert taken["w"].data_ptr() != new["w"].data_ptr()

    # Also where the two factors only come to 1 together.
    half = FedAsync(mixing=0.5, staleness=Hyperbolic(c=2.0))
    assert_same_bits(ready(half).aggregate(old, iter([late(0, new)])), new)


def test_a_rate_of_zero_keeps_the_old_model_bit_for_bit() -> None:
    class Cutoff(Hyperbolic):
        def __call__(self, tau: int) -> float:
            return 0.0 if tau > 2 else 1.0

    new, old = random_states(2)  # the counter of the old model is the higher one
    old["w"][0] = -0.0
    update = late(0, new, staleness=3)
    assert_same_bits(ready(FedAsync(staleness=Cutoff())).aggregate(old, iter([update])), old)
    assert update.metrics["weight"] == 0.0


@pytest.mark.parametrize("samples", [0, 5])
def test_a_client_that_claims_more_samples_than_there_are_is_named(samples: int) -> None:
    aggregator = ready(FedAsync(weighting="samples"), samples=samples)
    with pytest.raises(FederationError, match=f"client 3 claims 6 .* the federation has {samples}"):
        aggregator.aggregate(numbers(w=0.0), iter([late(3, numbers(w=1.0), samples=6)]))
