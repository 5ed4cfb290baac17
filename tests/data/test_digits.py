"""The digits: their sizes, and their fixed split."""

import inspect

import torch

from flsuite.data.datasets.generated import Digits
from tests.data.readers import check


def test_digits() -> None:
    source = Digits().load()
    check(source, (1, 8, 8), train=1437, test=360)
    assert source.val is None and source.spec.task == "multiclass"
    assert source.train.x.max() == 255 and source.train.x.min() == 0
    test, train = source.test.y.bincount(), source.train.y.bincount()
    share = test / (test + train)
    assert torch.all((share - 0.2).abs() < 0.005), "the split is stratified"


def test_digits_split_is_fixed() -> None:
    load = inspect.unwrap(Digits.load)  # the tests read the digits once
    first, second = load(Digits()), load(Digits(seed=7))
    assert torch.equal(first.test.x, second.test.x) and torch.equal(first.train.y, second.train.y)
