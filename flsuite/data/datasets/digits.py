"""The handwritten digits of scikit-learn: real images without a download."""

import numpy as np
import torch

from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits

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
