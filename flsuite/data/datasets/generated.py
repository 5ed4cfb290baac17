"""Data without files: digits of scikit-learn, and drawn ones."""

import math
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from flsuite.common.arguments import NonNegativeFloat, NonNegativeInt, at_least, check_init
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import torch_generator
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits
from flsuite.data.module import FederatedDataModule

_TEST_FRACTION = 0.2
_SPLIT_SEED = 0


class Digits(FederatedDataModule):
    """Scikit-learn's digits, 1437 training and 360 test images of 8x8 gray pixels, ten classes.

    They need no files. A pixel counts the ink in a 4x4 block, from 0 to 16. It is scaled to 0..255,
    like any other image. There is no published split. The set is split with a fixed seed,
    stratified by class, so all runs have the same test set.

    Source:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
        Repository, 1998 (the part published for testing).
    """

    def load(self) -> PublishedSplits:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
        labels = torch.from_numpy(digits.target.astype(np.int64))
        whole = DataSplit(torch.from_numpy(images), labels)
        row_sets = train_test_split(
            np.arange(len(whole)),
            test_size=_TEST_FRACTION,
            stratify=digits.target,
            random_state=_SPLIT_SEED,
        )
        train, test = (whole.take(torch.from_numpy(np.sort(rows))) for rows in row_sets)
        spec = DataSpec((1, 8, 8), 10, class_names=digits.target_names)
        return PublishedSplits(spec, train, test)


def simplex_means(
    classes: int, features: int, separation: float, generator: torch.Generator
) -> Tensor:
    """Draw the class means, float64 ``(classes, features)``: a randomly oriented regular simplex.

    Any two means are ``separation`` apart, in standard deviations of the noise. They are centered
    at the origin. The corners are the columns of a Helmert matrix.
    """
    step = torch.arange(1, classes, dtype=torch.float64)
    ones = torch.ones(classes - 1, classes, dtype=torch.float64)
    helmert = ones.tril() - torch.diag_embed(step, offset=1)[:-1]
    corners = (helmert / torch.sqrt(step * (step + 1)).unsqueeze(1)).T
    # An orthonormal frame rotates the simplex without changing its distances.
    frame, _ = torch.linalg.qr(
        torch.randn(features, classes - 1, dtype=torch.float64, generator=generator)
    )
    means: Tensor = separation / math.sqrt(2) * corners @ frame.T
    return means


def _test_samples(samples: int) -> int:
    return max(1, int(samples * _TEST_FRACTION))


class Synthetic(FederatedDataModule):
    """A mixture of balanced classes: one spherical Gaussian of variance 1 each, equidistant means.

    Args:
        features: Columns of the table, at least ``classes - 1``.
        classes: Number of classes, at least two.
        samples: Number of rows, at least two per class. The last fifth, which is as random as any
            other, is the test set.
        separation: Distance between any two class means, in standard deviations of the noise.
        owners: Natural owners of the samples, for partitions by owner. With ``n`` owners, sample
            ``i`` belongs to owner ``i % n``. 0 means no owners.
        owner_shift: Standard deviation, per feature, of the vector that is added to all samples of
            an owner. Classes of different owners then overlap, while classes of the same owner keep
            their distance.
        data_seed: The seed of the draw, including means and owners' shifts. It is not the run's
            seed, so all runs have the same data.
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    def __init__(
        self,
        features: int = 20,
        classes: Annotated[int, at_least(2)] = 4,
        samples: int = 2000,
        separation: NonNegativeFloat = 3.0,
        owners: NonNegativeInt = 0,
        owner_shift: NonNegativeFloat = 1.0,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.features = features
        self.classes = classes
        self.samples = samples
        self.separation = separation
        self.owners = owners
        self.owner_shift = owner_shift
        self.data_seed = data_seed
        check_init(self, Synthetic)
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuse inconsistent sizes."""
        if self.samples < 2 * self.classes:
            raise FlsuiteError(
                f"Synthetic: samples must be at least twice the classes, {2 * self.classes}, got "
                f"{self.samples}"
            )
        if self.features < self.classes - 1:
            raise FlsuiteError(
                f"Synthetic: {self.classes} equidistant means need {self.classes - 1} dimensions; "
                f"raise features, which is {self.features}"
            )
        if self.owners > (train_samples := self.samples - _test_samples(self.samples)):
            raise FlsuiteError(
                f"Synthetic: owners must be at most the {train_samples} training samples, got "
                f"{self.owners}"
            )

    def load(self) -> PublishedSplits:
        """Draw the mixture. The last fifth is for testing."""
        samples, features, classes = self.samples, self.features, self.classes
        generator = torch_generator(self.data_seed, "synthetic")

        means = simplex_means(classes, features, self.separation, generator)
        # Balanced classes in random order, so the last fifth is a random sample.
        labels = torch.arange(samples)[torch.randperm(samples, generator=generator)] % classes
        x = means[labels] + torch.randn(samples, features, dtype=torch.float64, generator=generator)
        ids = None
        if self.owners:
            ids = torch.arange(samples) % self.owners
            # Drawn last, so owners do not affect means, labels and noise.
            shifts = torch.randn(self.owners, features, dtype=torch.float64, generator=generator)
            x += self.owner_shift * shifts[ids]

        whole = DataSplit(x.float(), labels, ids)
        rows, held = torch.arange(samples), _test_samples(samples)
        spec = DataSpec((features,), classes, class_names=tuple(map(str, range(classes))))
        return PublishedSplits(spec, whole.take(rows[:-held]), whole.take(rows[-held:]))
