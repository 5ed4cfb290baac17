"""CMGA: each mechanism against numbers worked by hand, and the whole against FedAvg."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import CMGA, FedAvg
from flsuite.aggregators.rules.cmga import class_momentum, move_weights, separate
from flsuite.aggregators.transforms.base import FitView
from flsuite.aggregators.uplink import Uplink
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Sums
from flsuite.data import Digits, Pathological
from flsuite.models import ACVAE
from tests.aggregators.federations import ServerHalf
from tests.conftest import classifier, digits, equal_states, trainer

LAYOUT = StateLayout(("w", "mu", "lv"), 3, {"prior_mean": ("mu",), "prior_log_variance": ("lv",)})


def state_of(w: float, mu: Tensor, lv: float, steps: int) -> State:
    log_variances = torch.full_like(mu, lv)
    return {"w": torch.tensor([w]), "mu": mu, "lv": log_variances, "steps": torch.tensor(steps)}


def update(
    client: int, w: float, mu: Any, counts: list[int], lv: float = 0.0, samples: int = 1
) -> ClientUpdate:
    state = state_of(w, torch.tensor(mu), lv, client)
    return ClientUpdate(client, 1, samples, 1, torch.tensor(counts), state)


def start(classes: int = 3) -> State:
    return state_of(1.0, 10.0 * torch.arange(classes).float()[:, None].repeat(1, 2), 0.0, 0)


def cmga(**kwargs: Any) -> ServerHalf:
    return ServerHalf(CMGA(**kwargs), LAYOUT)


def test_step_2_moves_parameters_along_the_mean_change_and_takes_buffers_as_they_are() -> None:
    theta, mean = ({"w": one, "running": one} for one in torch.tensor([[1.0], [3.0]]))
    moved = move_weights(theta, mean, ("w",), lr=0.25)
    assert moved["w"].item() == 1.5 and moved["running"].item() == 3.0


def test_step_3_by_hand() -> None:
    """Seen and held: 0.9 * 1 + 0.1 * 2. New: as observed. Not held: unchanged."""
    momentum = torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    observed = torch.tensor([[2.0], [2.0], [math.nan], [math.nan]])
    seen = torch.tensor([True, False, True, False])
    held = torch.tensor([True, True, False, False])
    torch.testing.assert_close(
        class_momentum(momentum, seen, observed, held, 0.9),
        torch.tensor([[1.1], [2.0], [1.0], [1.0]]),
    )


def test_step_4_by_hand() -> None:
    """At distance 1 and delta 2, each centre is pushed by lambda away from the other."""
    centres = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0]])
    for steps in (1, 2, 3):
        torch.testing.assert_close(
            separate(centres, 2.0, 0.1, steps), torch.tensor([[-0.1, 0.0], [1.1, 0.0], [9.0, 0.0]])
        )
    assert torch.equal(separate(centres, 2.0, 0.1, 0), centres)
    pushed_twice = separate(torch.tensor([[0.0], [1.0], [1.5]]), 2.0, 0.1, 1)
    torch.testing.assert_close(pushed_twice, torch.tensor([[-0.2], [1.0], [1.7]]))


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("before", "after"), [(1.0, 1.2), (1.79, 1.99), (1.85, 2.0), (1.95, 2.0), (2.05, 2.05)]
)
def test_step_4_stops_at_delta(before: float, after: float, steps: int) -> None:
    moved = separate(torch.tensor([[0.0], [before]]), 2.0, 0.1, steps)
    torch.testing.assert_close(moved[1] - moved[0], torch.tensor([after]))


@pytest.mark.parametrize("classes", [3, 4, 10])
def test_step_4_settles_where_every_pair_is_near_delta(classes: int) -> None:
    """All pairs are 1.95 apart, and each centre is pushed by all others."""
    centres = 1.95 / math.sqrt(2) * torch.eye(classes, dtype=torch.float64)
    for steps in (40, 41):
        distances = torch.pdist(separate(centres, 2.0, 0.1, steps))
        torch.testing.assert_close(distances, torch.full_like(distances, 2.0))


def test_coincident_centres_separate_the_same_way_every_time() -> None:
    centres = torch.zeros(4, 3)
    moved = separate(centres, 2.0, 0.1, 3)
    assert torch.equal(moved, separate(centres, 2.0, 0.1, 3))
    assert torch.isfinite(moved).all() and torch.pdist(moved).min() > 0.05
    pair = separate(torch.ones(2, 1), 2.0, 0.1, 3)
    torch.testing.assert_close(pair.mean(), torch.tensor(1.0))
    torch.testing.assert_close((pair[0] - pair[1]).abs(), torch.tensor([0.2]))


def test_a_round_by_hand() -> None:
    """Class 0 is held by clients 0 and 1, class 1 by client 1, class 2 by no client."""
    made = cmga()
    updates = [
        update(0, 2.0, [[1.0, 0.0], [99.0, 99.0], [99.0, 99.0]], [5, 0, 0], lv=-20.0),
        update(1, 4.0, [[3.0, 0.0], [7.0, 7.0], [99.0, 99.0]], [1, 9, 0]),
    ]
    new = made.aggregate(start(), iter(updates))
    assert new["w"].item() == 3.0 and new["steps"].item() == 1
    torch.testing.assert_close(new["mu"], torch.tensor([[2.0, 0.0], [7.0, 7.0], [20.0, 20.0]]))
    torch.testing.assert_close(new["lv"][:, 0], torch.tensor([2 * math.log(0.1), 0.0, 0.0]))
    assert made.memory["rule"]["seen"].tolist() == [True, True, False]
    assert made.metrics["prior_sigma_floored"] == 2

    second = made.aggregate(
        new, iter([update(0, 3.0, [[12.0, 0.0], [0.0, 0.0], [5.0, 5.0]], [1, 0, 1])])
    )
    torch.testing.assert_close(second["mu"], torch.tensor([[3.0, 0.0], [7.0, 7.0], [5.0, 5.0]]))
    assert made.metrics["prior_distance_before"] == pytest.approx(math.sqrt(8))
    assert made.metrics["prior_drift/0"] == pytest.approx(9.0)
    assert "prior_drift/1" not in made.metrics


def test_samples_weigh_networks_and_classes() -> None:
    made = cmga(weighting="samples")
    updates = [
        update(0, 0.0, [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [3, 0, 0], samples=3),
        update(1, 4.0, [[4.0, 0.0], [4.0, 4.0], [0.0, 0.0]], [1, 0, 0], samples=1),
    ]
    new = made.aggregate(start(), iter(updates))
    assert new["w"].item() == 1.0
    torch.testing.assert_close(new["mu"][0], torch.tensor([1.0, 0.0]))


def test_class_counts_leave_a_masked_client_in_its_terms_alone() -> None:
    updates = [
        update(0, 2.0, [[1.0, 0.0], [99.0, 99.0], [99.0, 99.0]], [5, 0, 0]),
        update(1, 4.0, [[3.0, 0.0], [7.0, 7.0], [99.0, 99.0]], [1, 9, 0]),
    ]
    made, sums, sent = cmga(), Sums(), []
    uplink = Uplink(made.aggregator, LAYOUT, start(), classes=3, masks=True)
    for one in updates:
        packed, held = uplink.pack(one, start(), FitView(one.client, 1, 0), {})
        assert not len(packed.class_counts) and not packed.extras
        assert [value.item() for value in packed.state.values()] == [one.client]  # the counter
        sums.add(dict(held))
        sent.append(packed)
    new = made.aggregate(start(), uplink.summed(sums.values, sent))
    assert equal_states(new, cmga().aggregate(start(), updates))


def test_late_priors_say_nothing_about_the_current_model() -> None:
    assert CMGA().needs == {"current models"}


def acvae(**kwargs: Any) -> ACVAE:
    return ACVAE(latent_dim=4, width=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), **kwargs)


def fit(
    aggregator: Any, model: ACVAE | None = None, data: Digits | None = None, **kwargs: Any
) -> FederatedTrainer:
    ckpt_path = kwargs.pop("ckpt_path", None)
    made = trainer(aggregator=aggregator, gradient_clip_val=0.5, **{"rounds": 1, **kwargs})
    few = digits(clients=4, train_samples=200, standardize=False, partition=Pathological(3))
    made.fit(model or acvae(), data or few, ckpt_path=ckpt_path)
    return made


def state(made: FederatedTrainer) -> dict[str, Tensor]:
    assert made.federation is not None
    return made.federation.state


def test_without_its_mechanisms_it_is_fedavg() -> None:
    """Every client holds every class; no momentum, no separation, no floor."""
    off = CMGA(beta=0, separation_weight=0, sigma_floor=0)
    everywhere = digits(clients=3, train_samples=200, standardize=False, partition=None)
    plain = fit(FedAvg("uniform"), acvae(private=[]), everywhere)
    found = fit(off, acvae(private=[]), everywhere)
    for name, value in state(plain).items():
        torch.testing.assert_close(state(found)[name], value, rtol=1e-6, atol=1e-7)


def test_a_model_without_priors_is_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"prior_mean.*such as ACVAE"):
        trainer(aggregator=CMGA(), rounds=1).fit(classifier(), digits())
