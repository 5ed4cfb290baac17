"""The scores of continual learning, worked by hand."""

import math
from typing import Any

import pytest
import torch

from flsuite.metrics import average_accuracy, backward_transfer, forgetting, forward_transfer

ALL = (average_accuracy, backward_transfer, forward_transfer, forgetting)
UNTRAINED = [0.10, 0.20, 0.30]
# The first task is best after the second, and the second is good by luck before training.
MATRIX = torch.tensor(
    [UNTRAINED, [0.90, 0.85, 0.20], [0.95, 0.80, 0.40], [0.60, 0.70, 0.90]], dtype=torch.float64
)


def test_three_tasks_by_hand() -> None:
    assert float(average_accuracy(MATRIX)) == pytest.approx((0.60 + 0.70 + 0.90) / 3)
    assert float(backward_transfer(MATRIX)) == pytest.approx(((0.60 - 0.90) + (0.70 - 0.80)) / 2)
    assert float(forward_transfer(MATRIX)) == pytest.approx(((0.85 - 0.20) + (0.40 - 0.30)) / 2)
    assert float(forgetting(MATRIX)) == pytest.approx(((0.95 - 0.60) + (0.80 - 0.70)) / 2)


def test_two_of_three_tasks_by_hand() -> None:
    """A future task does not count, and an improvement is negative forgetting."""
    so_far = MATRIX[:3]
    assert float(average_accuracy(so_far)) == pytest.approx((0.95 + 0.80) / 2)
    assert float(backward_transfer(so_far)) == pytest.approx(0.95 - 0.90)
    assert float(forward_transfer(so_far)) == pytest.approx(0.85 - 0.20)
    assert float(forgetting(so_far)) == pytest.approx(0.90 - 0.95)


def test_one_task_has_an_average_and_nothing_to_compare() -> None:
    for matrix in (MATRIX[:2], MATRIX[:2, :1]):  # the first of three, and the only one
        assert float(average_accuracy(matrix)) == pytest.approx(0.90)
        assert all(math.isnan(compare(matrix)) for compare in ALL[1:])


@pytest.mark.parametrize("done", [1, 3])
@pytest.mark.parametrize("function", ALL)
def test_matrices_are_summarised_one_by_one(function: Any, done: int) -> None:
    torch.manual_seed(0)
    many = torch.rand(2, 4, 1 + done, 3, dtype=torch.float64)
    found = function(many)
    assert found.shape == (2, 4) and found.dtype == torch.float64
    one_by_one = torch.stack([function(matrix) for matrix in many.flatten(0, 1)]).reshape(2, 4)
    torch.testing.assert_close(found, one_by_one, equal_nan=True)
    assert done == 1 or len(found.unique()) == 8
