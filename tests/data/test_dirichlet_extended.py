"""Few classes per client in uneven shares, ranks with noise, and Dirichlet mixes of given sizes."""

import numpy as np
import pytest

from flsuite import FlsuiteError
from flsuite.data import DirichletBalanced, DirichletExtended, QuantitySkew, Ranked

LABELS = np.repeat(np.arange(10), 100)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_each_client_has_at_most_its_classes_and_no_sample_is_lost(alpha: float) -> None:
    rows = DirichletExtended(3, alpha)(LABELS, 20, rng())
    assert all(1 <= len(np.unique(LABELS[own])) <= 3 for own in rows)
    assert len(np.unique(np.concatenate(list(rows)))) == len(LABELS)


def test_a_small_alpha_shares_less_evenly() -> None:
    def spread(alpha: float) -> float:
        return float(np.std([len(own) for own in DirichletExtended(2, alpha)(LABELS, 20, rng())]))

    assert spread(0.1) > 3 * spread(1000.0)


def test_more_classes_than_there_are_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="has 10 classes"):
        DirichletExtended(11, 1.0)(LABELS, 5, rng())


def test_mixes_come_in_given_sizes() -> None:
    rows = DirichletBalanced(0.3, sizes=QuantitySkew(sigma=1.0))(LABELS, 8, rng())
    sizes = [len(own) for own in rows]
    assert sum(sizes) == len(LABELS), "all samples are used"
    assert max(sizes) > 2 * min(sizes)
    even = DirichletBalanced(0.3, sizes=QuantitySkew(sigma=0.0))(LABELS, 8, rng())
    assert {len(own) for own in even} == {125}


def test_without_noise_clients_have_neighbouring_classes() -> None:
    rows = Ranked()(LABELS, 5, rng())
    held = sorted(tuple(np.unique(LABELS[own])) for own in rows)
    assert held == [(k, k + 1) for k in range(0, 10, 2)]
    assert {len(own) for own in rows} == {200}


def test_noise_widens_the_range_of_a_client() -> None:
    def width(noise: float) -> float:
        return float(np.mean([LABELS[own].std() for own in Ranked(noise)(LABELS, 5, rng())]))

    assert width(0.0) < width(0.2) < width(5.0)
    assert width(5.0) == pytest.approx(LABELS.std(), rel=0.1)
