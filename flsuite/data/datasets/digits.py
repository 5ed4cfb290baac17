"""The handwritten digits that scikit-learn ships: real images that need no download."""

import numpy as np
import torch

from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits

TEST_FRACTION = 0.2
SPLIT_SEED = 0


def read_digits() -> PublishedSplits:
    """Read the 1797 images, 8x8 in grey, ten classes.

    A pixel counts the ink in a 4x4 block, from 0 to 16. It is scaled to 0..255, like any other
    image. The set has no published split. It is split with a fixed seed, stratified by class, into
    1437 training and 360 test images, so that all runs have the same test set.

    Returns:
        ``train`` and ``test`` with images uint8 ``(n, 8, 8, 1)`` and labels int64 ``(n,)``. There
        is no ``val``.

    Source:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
        Repository, 1998 (the part that is published for testing).
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(-1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=TEST_FRACTION,
        stratify=digits.target,
        random_state=SPLIT_SEED,
    )

    whole = DataSplit(images, labels)
    spec = DataSpec(
        shape=(1, 8, 8),
        num_classes=10,
        class_names=tuple(str(name) for name in digits.target_names),
    )
    return PublishedSplits(
        spec,
        whole.take(torch.from_numpy(np.sort(train))),
        whole.take(torch.from_numpy(np.sort(test))),
    )


class Digits(FederatedDataModule):
    """Scikit-learn's digits, 1437 training and 360 test images of 8x8 pixels.

    They need no files.
    """

    def load(self) -> PublishedSplits:
        return read_digits()
