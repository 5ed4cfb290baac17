"""Synthetic data: its means, the accuracy that can be reached, and its owners."""

import math

import pytest
import torch

from flsuite.common.random import torch_generator
from flsuite.data.datasets.generated import Synthetic, simplex_means


@pytest.mark.parametrize(("classes", "features"), [(2, 1), (3, 2), (5, 30)])
def test_simplex_means(classes: int, features: int) -> None:
    means = simplex_means(classes, features, 2.5, torch_generator(0, "test"))
    assert means.shape == (classes, features)
    distances = torch.pdist(means)
    assert torch.allclose(distances, torch.full_like(distances, 2.5))
    assert torch.allclose(means.sum(0), torch.zeros(features, dtype=torch.float64), atol=1e-12)


def bayes_accuracy(classes: int, separation: float) -> float:
    """Return the accuracy of the best classifier, which picks the nearest mean.

    In a frame where mean ``k`` is ``a e_k`` with ``a = separation / sqrt(2)``, it is correct if the
    noise along ``e_k`` plus ``a`` exceeds the noise along every other axis. That is the integral
    over ``t`` of ``pdf(t) cdf(t + a) ** (classes - 1)``.
    """
    # The density beyond ten standard deviations is below float64's precision.
    t = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    density = torch.exp(-0.5 * t**2) / math.sqrt(2 * math.pi)
    right = torch.special.ndtr(t + separation / math.sqrt(2)) ** (classes - 1)
    return float(torch.trapezoid(density * right, t))


@pytest.mark.parametrize(("classes", "separation"), [(2, 1.0), (4, 2.0), (10, 3.0)])
def test_the_nearest_mean_reaches_bayes_accuracy(classes: int, separation: float) -> None:
    features, samples = 12, 40000
    data = Synthetic(features, classes, samples, separation, data_seed=3)
    source = data.load()
    means = simplex_means(classes, features, separation, torch_generator(3, "synthetic"))
    x, y = (
        torch.cat([getattr(split, name) for split in (source.train, source.test)]) for name in "xy"
    )
    right = (torch.cdist(x.double(), means).argmin(1) == y).double().mean()
    best = bayes_accuracy(classes, separation)
    assert float(right) == pytest.approx(best, abs=4 * (best * (1 - best) / samples) ** 0.5)


def test_synthetic() -> None:
    data = Synthetic(features=6, classes=3, samples=100, separation=2.0)
    source, again, other = data.load(), data.load(), Synthetic(6, 3, 100, 2.0, data_seed=1).load()
    assert source.spec.shape == (6,) and source.spec.num_classes == 3
    assert source.spec.class_names == ("0", "1", "2")
    train, test = source.train, source.test
    assert train.x.shape == (80, 6) and train.x.dtype == torch.float32 and train.ids is None
    assert test.y.shape == (20,) and test.y.dtype == torch.int64 and source.val is None
    assert torch.cat([train.y, test.y]).bincount().tolist() == [34, 33, 33]
    assert train.x.equal(again.train.x) and not train.x.equal(other.train.x)


def test_synthetic_owners() -> None:
    source = Synthetic(5, 2, 5000, 0.0, owners=4, owner_shift=3.0).load()
    plain = Synthetic(5, 2, 5000, 0.0).load()
    assert source.train.ids is not None and source.train.ids.dtype == torch.int64
    assert source.test.ids is not None and set(source.test.ids.tolist()) == {0, 1, 2, 3}
    shifts = source.train.x - plain.train.x
    for owner in range(4):
        own = shifts[source.train.ids == owner]
        assert torch.allclose(own, own[:1].expand_as(own), atol=1e-5), "one shift for an owner"
    assert torch.pdist(shifts[:4]).min() > 1, "the shifts differ"
    assert torch.equal(source.train.y, plain.train.y), "owners do not change the labels"
