"""Differential privacy of a client's Fisher: the mechanism by hand, its epsilon, federations."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.aggregators import FedFisher
from flsuite.aggregators.rules.sample_noise import SampleNoise
from flsuite.callbacks import DPSGD
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import flatten_tree
from flsuite.data.loader import TrainLoader
from flsuite.metrics.privacy import RandomDraw, Release, epsilon, epsilon_of
from flsuite.models import MLP, Classifier
from tests.aggregators.test_fedfisher import KINDS, fit as federation
from tests.conftest import digits, equal_states

accounting = pytest.importorskip("dp_accounting", reason="pip install 'flsuite[privacy]'")

SAMPLES = 400


def noisy_mean(noise: SampleNoise, x: Tensor, most: int | None = None, seed: int = 0) -> Any:
    """Return the noisy mean of the rows, and of a millionth of them."""

    def batches() -> Iterator[Any]:
        for part in x.split(70):
            yield part, torch.zeros(len(part))

    def share(one: Any) -> Any:
        return {"a": one[0][0], "deep": {"b": 1e-6 * one[0][0]}}

    generator = torch.Generator().manual_seed(seed)
    return noise.mean(share, batches, len(x), most, generator)


def rows_of(size: int = 30) -> Tensor:
    """Return rows of norm 0.9, whose bound is 1. The bound of a millionth of them is 2^-20."""
    rows = torch.randn(SAMPLES, size, generator=torch.Generator().manual_seed(3)).abs()
    return 0.9 * rows / rows.norm(dim=1, keepdim=True)


def test_without_outliers_and_nearly_without_noise_it_is_the_mean() -> None:
    x = rows_of()
    got = noisy_mean(SampleNoise(1e-9), x)
    assert torch.allclose(got["a"], x.mean(0), atol=1e-6)
    assert torch.allclose(got["deep"]["b"], 1e-6 * x.mean(0), atol=1e-12)


def test_a_tenth_of_the_samples_at_most_is_clipped() -> None:
    x = rows_of()
    x[: SAMPLES // 20] *= 1e9
    got = noisy_mean(SampleNoise(1e-9), x)
    clipped = x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
    assert torch.allclose(got["a"], clipped.mean(0), atol=1e-6)


def test_one_sample_more_moves_the_sums_by_no_more_than_the_noise_is_for() -> None:
    """The bounds are those of the many, whatever the one sample is."""
    x, noise = rows_of(), SampleNoise(1e-9)
    for outlier in (0.0, 1.0, 1e12):
        other = torch.cat([x, outlier * torch.ones(1, 30)])
        a, b = noisy_mean(noise, x), noisy_mean(noise, other)
        moved = SAMPLES * a["a"] - (SAMPLES + 1) * b["a"]
        assert float(moved.norm()) <= 1.0 + 1e-3


def test_the_deviation_of_the_noise() -> None:
    """One sample moves two tensors, so that the noise is larger by the root of two."""
    x = rows_of(4000)
    got, expected = noisy_mean(SampleNoise(2.0), x), 2.0 * math.sqrt(2) / SAMPLES
    assert float((got["a"] - x.mean(0)).std()) == pytest.approx(expected, rel=0.05)
    smaller = got["deep"]["b"] - 1e-6 * x.mean(0)
    assert float(smaller.std()) == pytest.approx(2.0**-20 * expected, rel=0.05)


def test_the_samples_are_drawn_one_by_one() -> None:
    x = torch.ones(SAMPLES, 1)
    sizes = [100 * float(noisy_mean(SampleNoise(1e-9), x, 100, seed)["a"]) for seed in range(60)]
    deviation = math.sqrt(SAMPLES * 0.25 * 0.75)
    assert sum(sizes) / 60 == pytest.approx(100, abs=5 * deviation / math.sqrt(60))
    assert len({round(size) for size in sizes}) > 5


def test_a_client_whose_samples_are_not_drawn_answers_with_noise() -> None:
    """As with so few samples in any case: whether one was drawn must not show."""
    answers = [noisy_mean(SampleNoise(1.0), torch.ones(3, 4), 1, seed)["a"] for seed in range(20)]
    assert all(0 < float(answer.abs().max()) < 1e-9 for answer in answers)


@pytest.mark.parametrize(
    ("samples", "multiplier", "seeds"),
    [(30, 1.0, 20), (400, 1.0, 3), pytest.param(2000, 8.0, 10, marks=pytest.mark.long)],
)
def test_the_noise_of_empty_bins_does_not_raise_the_bound(
    samples: int, multiplier: float, seeds: int
) -> None:
    noise, names = SampleNoise(multiplier), [str(i) for i in range(10)]
    ones = dict.fromkeys(names, torch.ones(()))
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        bounds = noise._bounds(iter([ones] * samples), names, samples, generator)
        assert all(bound <= 1.0 for bound in bounds.values())
        if samples >= 400:
            assert all(bound == 1.0 for bound in bounds.values())


@pytest.mark.parametrize("most", [None, 50, 1000])
def test_epsilon_is_that_of_two_gaussian_mechanisms_on_one_draw(most: int | None) -> None:
    from dp_accounting import (
        ComposedDpEvent,
        GaussianDpEvent,
        PoissonSampledDpEvent,
        get_epsilon_gaussian,
    )
    from dp_accounting.rdp import RdpAccountant

    rate = 1.0 if most is None else min(1.0, most / SAMPLES)
    both = ComposedDpEvent([GaussianDpEvent(1.3), GaussianDpEvent(1.3)])
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, both))
    without_a_draw = get_epsilon_gaussian(1.3 / math.sqrt(2), 1e-5)
    expected = min(accountant.get_epsilon(1e-5), without_a_draw)
    assert SampleNoise(1.3, 1e-5).epsilon(SAMPLES, most) == pytest.approx(expected, rel=1e-6)


# Federations


def fit(
    aggregator: FedFisher, rounds: int = 1, samples: int = 300, hidden: int = 8, **settings: Any
) -> Any:
    data = digits(clients=3, server_samples=30, train_samples=samples)
    model = Classifier(MLP(hidden=(hidden,)))
    return federation(aggregator, rounds=rounds, model=model, data=data, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_stays_semidefinite(kind: Any) -> None:
    """The noise alone would make half of the entries or eigenvalues negative."""
    _, updates = fit(FedFisher(kind, noise=SampleNoise(3.0)), samples=150, hidden=2)
    for update in updates:
        assert 0 < update.metrics["fisher_epsilon"] < 10
        fisher = update.extras["fisher"]
        for part in flatten_tree({"": fisher}).values():
            numbers = part.flatten() if kind == "diag" else torch.linalg.eigvalsh(part.double())
            assert float(numbers.min()) >= -1e-6 * float(numbers.max()) < 0


def test_the_noise_has_a_seed() -> None:
    states = [
        fit(FedFisher("diag", noise=SampleNoise(3.0)), samples=90, hidden=2)[0].federation.state
        for _ in range(2)
    ]
    assert equal_states(*states)


@pytest.mark.long
def test_dp_sgd_counts_the_fishers_too() -> None:
    pytest.importorskip("opacus", reason="needs Opacus: pip install 'flsuite[privacy]'")
    with pytest.raises(FlsuiteError, match="clients of FedFisher also send fisher without noise"):
        fit(FedFisher(), callbacks=[DPSGD()])
    made, _ = fit(FedFisher(noise=SampleNoise(1.0)), rounds=2, callbacks=[DPSGD()])
    rows = made.run.folder.table.rows
    data, rounds = made.federation.data, (1, 2)
    for client in range(3):
        samples = data.samples(client)
        draw = RandomDraw(samples, float(min(data.batch_size, samples)), is_poisson=True)
        steps = len(TrainLoader(data, client, 0, 1))
        fisher = SampleNoise(1.0).release(samples, 2000)
        expected = [
            epsilon_of([Release(draw, 1.0, n * steps), fisher._replace(times=n)], 1e-5)
            for n in rounds
        ]
        assert expected == [
            row.value for row in rows if (row.scope, row.metric) == (str(client), "sample_epsilon")
        ]
        assert expected[0] > epsilon(draw, 1.0, steps, 1e-5)


def test_a_delta_of_one_sample_is_refused_before_round_1() -> None:
    with pytest.raises(
        FlsuiteError, match=r"SampleNoise: delta must be below 1 / \d+, .* got 0\.5"
    ):
        federation(FedFisher("diag", noise=SampleNoise(delta=0.5)))
