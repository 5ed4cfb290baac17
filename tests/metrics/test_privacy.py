"""The accountant against published figures, closed forms, and its own inverse."""

import logging
import math
import sys

import pytest

from flsuite import FlsuiteError
from flsuite.metrics.privacy import (
    RandomDraw,
    calibrated_noise,
    default_delta,
    epsilon,
    noise_beside_count,
)

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'flsuite[privacy]'")


def poisson(population: int, expected: float) -> RandomDraw:
    return RandomDraw(population, expected, is_poisson=True)


def fixed(population: int, cohort: int) -> RandomDraw:
    return RandomDraw(population, cohort, is_poisson=False)


@pytest.mark.parametrize(
    ("sampling", "noise", "rounds", "delta", "published"),
    [
        # tensorflow/privacy, compute_dp_sgd_privacy_lib_test.py: 15 epochs of 60,000 samples in
        # batches of 150, and 30 epochs of 100,000 in batches of 100.
        (poisson(60_000, 150), 1.3, 6_000, 1e-5, 0.7242234026109595),
        (poisson(100_000, 100), 1.0, 30_000, 1e-7, 1.4154988495444845),
        # pytorch/opacus, accountants_test.py: rate 0.04, 90 epochs. It has a few orders more.
        (poisson(100, 4), 1.5, 2_250, 1e-5, 7.32911117143),
    ],
    ids=["tf-privacy-60000", "tf-privacy-100000", "opacus"],
)
def test_published_figures(
    sampling: RandomDraw, noise: float, rounds: int, delta: float, published: float
) -> None:
    assert epsilon(sampling, noise, rounds, delta) == pytest.approx(published, rel=1e-4)


@pytest.mark.parametrize(
    ("sampling", "noise", "rounds", "delta", "published"),
    [
        # McMahan et al. 2018, table 1: 763,430 users, 5,000 of them per round.
        (poisson(763_430, 5_000), 1.0, 5_000, 1e-9, 4.634),
        # tensorflow/privacy, tutorials/README.md: MNIST, batches of 256, 60 epochs.
        (poisson(60_000, 256), 1.1, 14_062, 1e-5, 3.01),
    ],
    ids=["mcmahan", "mnist"],
)
def test_older_figures_are_those_of_the_older_conversion(
    sampling: RandomDraw, noise: float, rounds: int, delta: float, published: float
) -> None:
    """Mironov's conversion of the same divergences; today's is tighter."""
    from dp_accounting import SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    from flsuite.metrics.privacy import _event

    # The orders of those years: TF-Privacy's list.
    orders = [1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512]
    accountant = RdpAccountant(orders)
    accountant.compose(SelfComposedDpEvent(_event(sampling, noise), rounds))
    old = accountant.rdp + math.log(1 / delta) / (accountant.orders - 1)
    assert old.min() == pytest.approx(published, abs=0.005)
    assert 0.8 * published < epsilon(sampling, noise, rounds, delta) < published


def exact(noise: float, rounds: int, delta: float) -> float:
    """Balle and Wang 2018, theorem 8: T mechanisms of multiplier z are one of ``z / sqrt(T)``."""
    step = math.sqrt(rounds) / noise

    def normal_cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def spent(epsilon: float) -> float:
        far = normal_cdf(-step / 2 - epsilon / step)
        return normal_cdf(step / 2 - epsilon / step) - math.exp(epsilon) * far

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(
    ("sampling", "rounds"), [(poisson(50, 50), 1), (poisson(50, 50), 100), (fixed(50, 50), 10)]
)
def test_without_sampling_it_is_the_exact_gaussian_mechanism(
    sampling: RandomDraw, rounds: int
) -> None:
    assert epsilon(sampling, 4.0, rounds, 1e-5) == pytest.approx(exact(4.0, rounds, 1e-5))


@pytest.mark.parametrize(("cohort", "rounds"), [(1, 1), (10, 100), (50, 1), (99, 1), (99, 100)])
def test_a_cohort_of_fixed_size_never_costs_more_than_without_sampling(
    cohort: int, rounds: int
) -> None:
    """Who is replaced moves the sum twice as far: a Gaussian mechanism of half the noise."""
    whole, spent = exact(2.0, rounds, 1e-3), epsilon(fixed(100, cohort), 4.0, rounds, 1e-3)
    assert spent <= whole * (1 + 1e-9)
    if cohort == 99:  # hardly a sample
        assert spent == pytest.approx(whole, rel=0.02)
    if cohort <= 10:
        assert spent < whole / 2


def test_the_orders_of_a_cohort_of_fixed_size_are_dense_enough() -> None:
    from dp_accounting import NeighboringRelation, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    from flsuite.metrics.privacy import _event

    accountant = RdpAccountant(list(range(30, 60)), NeighboringRelation.REPLACE_ONE)
    accountant.compose(SelfComposedDpEvent(_event(fixed(100, 1), 4.0), 10))
    assert epsilon(fixed(100, 1), 4.0, 10, 1e-5) < 1.01 * accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("make", [poisson, fixed])
def test_less_noise_more_rounds_and_larger_cohorts_cost_more(make) -> None:
    base = epsilon(make(100, 10), 2.0, 20, 1e-2)
    assert epsilon(make(100, 10), 1.5, 20, 1e-2) > base
    assert epsilon(make(100, 10), 2.0, 40, 1e-2) > base
    assert epsilon(make(100, 20), 2.0, 20, 1e-2) > base
    assert epsilon(make(100, 10), 2.0, 20, 1e-3) > base


def test_limits() -> None:
    assert epsilon(poisson(10, 5), 1.0, 0, 1e-2) == 0.0
    assert epsilon(poisson(10, 5), 0.0, 1, 1e-2) == math.inf
    assert default_delta(1000) == pytest.approx(1000**-1.1)


@pytest.mark.parametrize("sampling", [poisson(200, 20), poisson(10, 10), fixed(40, 8)])
def test_a_target_is_reached_and_not_passed(sampling: RandomDraw) -> None:
    noise = calibrated_noise(sampling, target=4.0, rounds=30, delta=1e-3)
    assert type(noise) is type(epsilon(sampling, noise, 30, 1e-3)) is float, "for checkpoints"
    assert 3.99 < epsilon(sampling, noise, 30, 1e-3) <= 4.0
    assert epsilon(sampling, noise - 2e-4, 30, 1e-3) > 4.0


def test_the_noise_is_shared_with_the_count() -> None:
    """Andrew et al. 2021, theorem 1; their example: 100 clients, a count noise of a twentieth."""
    for z, count in ((1.0, 5.0), (0.3, 0.2), (2.0, 1.01)):
        changes = noise_beside_count(z, count)
        assert z**-2 == pytest.approx(changes**-2 + (2 * count) ** -2)
    assert noise_beside_count(1.0, 5.0) == pytest.approx(1.005, abs=1e-3)
    assert noise_beside_count(0.0, 5.0) == 0.0


def test_the_accountant_leaves_logging_alone() -> None:
    handlers, level = list(logging.root.handlers), logging.getLogger("absl").level
    epsilon(poisson(1000, 100), 1.0, 100, 1e-5)  # some of its orders do not converge
    assert logging.root.handlers == handlers and logging.getLogger("absl").level == level


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(FlsuiteError, match=r"pip install 'flsuite\[privacy\]'"):
        epsilon(poisson(9, 3), 1.0, 1, 0.1)
    with pytest.raises(FlsuiteError, match=r"pip install 'flsuite\[privacy\]'"):
        calibrated_noise(poisson(9, 3), 1.0, 1, 0.1)


def test_a_target_out_of_reach_is_one_line() -> None:
    with pytest.raises(FlsuiteError, match="raise target_epsilon"):
        calibrated_noise(poisson(9, 9), 1e-7, 10, 1e-12)
