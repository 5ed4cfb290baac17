"""A classification problem whose best possible accuracy is known, so that what a method loses can be told exactly."""

import math
from typing import Any

import torch
from torch import Tensor

from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError
from flsuite.random import torch_generator

__all__ = ["Synthetic", "bayes_accuracy", "make_mixture", "simplex_means"]

TEST_FRACTION = 0.2


def simplex_means(
    classes: int, features: int, separation: float, generator: torch.Generator
) -> Tensor:
    """The class means, ``(classes, features)``: a regular simplex in a random orientation.

    Every two means lie ``separation`` apart, in standard deviations of the noise, and their centre is the origin. The
    corners are the columns of a Helmert matrix.
    """
    step = torch.arange(1, classes, dtype=torch.float64)
    helmert = (
        torch.ones(classes - 1, classes, dtype=torch.float64).tril()
        - torch.diag_embed(step, offset=1)[:-1]
    )
    corners = (helmert / torch.sqrt(step * (step + 1)).unsqueeze(1)).T
    frame, _ = torch.linalg.qr(
        torch.randn(features, classes - 1, dtype=torch.float64, generator=generator)
    )
    means: Tensor = separation / math.sqrt(2) * corners @ frame.T
    return means


def bayes_accuracy(classes: int, separation: float) -> float:
    """The accuracy of the best classifier for equally likely classes, unit noise and equidistant means.

    The best classifier takes the nearest mean. Written in a frame where mean ``k`` is ``a e_k`` with
    ``a = separation / sqrt(2)``, it is right when the noise along ``e_k`` plus ``a`` exceeds the noise along every
    other axis: the integral over ``t`` of ``pdf(t) cdf(t + a) ** (classes - 1)``. For two classes that is
    ``cdf(separation / 2)``.
    """
    t = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    density = torch.exp(-0.5 * t**2) / math.sqrt(2 * math.pi)
    right = torch.special.ndtr(t + separation / math.sqrt(2)) ** (classes - 1)
    return float(torch.trapezoid(density * right, t))


def make_mixture(
    features: int,
    classes: int,
    samples: int,
    separation: float = 3.0,
    owners: int = 0,
    owner_shift: float = 1.0,
    seed: int = 0,
) -> PublishedSplits:
    """Draw the mixture; the arguments are those of :class:`Synthetic`.

    Returns:
        Tables float32 ``(n, features)`` with labels int64 ``(n,)``, the last fifth for testing; ``ids`` where there
        are owners.

    Raises:
        FlsuiteError: If an argument is out of range.
    """
    _check(features, classes, samples, separation, owners, owner_shift)
    generator = torch_generator(seed, "synthetic")
    means = simplex_means(classes, features, separation, generator)
    labels = torch.arange(samples)[torch.randperm(samples, generator=generator)] % classes
    x = means[labels] + torch.randn(samples, features, dtype=torch.float64, generator=generator)
    ids = None
    if owners:
        ids = torch.arange(samples) % owners
        x += (
            owner_shift
            * torch.randn(owners, features, dtype=torch.float64, generator=generator)[ids]
        )
    whole = DataSplit(x.float(), labels, ids)
    rows, held = torch.arange(samples), _test_samples(samples)
    spec = DataSpec((features,), classes, "multiclass", tuple(str(k) for k in range(classes)))
    return PublishedSplits(spec, whole.take(rows[:-held]), whole.take(rows[-held:]))


def _test_samples(samples: int) -> int:
    return max(1, int(samples * TEST_FRACTION))


def _check(
    features: int, classes: int, samples: int, separation: float, owners: int, owner_shift: float
) -> None:
    if classes < 2:
        raise FlsuiteError(f"data.classes must be at least 2, got {classes}")
    if features < classes - 1:
        raise FlsuiteError(
            f"{classes} equidistant means need {classes - 1} dimensions; raise data.features, which is {features}"
        )
    if samples < 2 * classes:
        raise FlsuiteError(
            f"data.samples must be at least twice data.classes, {2 * classes}, got {samples}"
        )
    if not (math.isfinite(separation) and separation >= 0):
        raise FlsuiteError(f"data.separation must be a finite number from 0 up, got {separation}")
    if not 0 <= owners <= samples - _test_samples(samples):
        raise FlsuiteError(
            f"data.owners must be between 0 and the number of training samples, got {owners}"
        )
    if not (math.isfinite(owner_shift) and owner_shift >= 0):
        raise FlsuiteError(f"data.owner_shift must be a finite number from 0 up, got {owner_shift}")


class Synthetic(FederatedDataModule):
    """A Gaussian mixture: one spherical Gaussian of variance 1 per class, with equidistant means; classes are balanced.

    Args:
        features: Columns of the table; at least ``classes - 1``.
        classes: Classes, at least two.
        samples: Rows; the last fifth, as random as any other, is the test set.
        separation: Distance between any two class means, in standard deviations of the noise.
        owners: Natural owners of the samples, for partitions by owner: with ``n`` owners the samples belong to owners
            ``0..n-1`` in turn. 0 for none.
        owner_shift: Standard deviation, per feature, of the vector that is added to all samples of an owner: the
            classes of different owners then overlap, though those of one owner are as far apart as ever.
        data_seed: Of the draw, means and owners' shifts included; not the run's seed, so that runs share their data.
        **kwargs: Those of ``FederatedDataModule``.
    """

    def __init__(
        self,
        features: int = 20,
        classes: int = 4,
        samples: int = 2000,
        separation: float = 3.0,
        owners: int = 0,
        owner_shift: float = 1.0,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check(features, classes, samples, separation, owners, owner_shift)
        self.features = features
        self.classes = classes
        self.samples = samples
        self.separation = separation
        self.owners = owners
        self.owner_shift = owner_shift
        self.data_seed = data_seed

    @property
    def bayes_accuracy(self) -> float:
        """What no classifier can beat on average; with owners, what none can beat that is told each owner's shift."""
        return bayes_accuracy(self.classes, self.separation)

    def load(self) -> PublishedSplits:
        return make_mixture(
            self.features,
            self.classes,
            self.samples,
            self.separation,
            self.owners,
            self.owner_shift,
            self.data_seed,
        )
