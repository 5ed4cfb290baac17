"""The replay's weights and losses by hand."""

import math

import torch

from flsuite.models.flows import credibility, soft_cross_entropy


def test_credibility_by_hand() -> None:
    """Class 0 has codes (0, 1) and (2, 1), class 1 has one code, and class 2 none."""
    codes, y = torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0]]), torch.tensor([0, 0, 1])
    drawn = torch.tensor([[1.0, 1.0], [2.0, 1.01], [5.0, 5.0], [0.0, 0.0]])
    found = credibility(codes, y, drawn, torch.tensor([0, 0, 1, 2]), torch.tensor(0.25))
    top = 1 / math.sqrt(2 * math.pi)
    first = (top + 100 * top) / 2
    second = (top * math.exp(-0.5) + 100 * top * math.exp(-0.5)) / 2
    torch.testing.assert_close(
        found, torch.tensor([first, second, 0.25, 0.25]), rtol=1e-4, atol=1e-5
    )


def test_soft_cross_entropy_is_least_at_the_teachers_outputs() -> None:
    teacher = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    p = (teacher / 2).softmax(1)
    torch.testing.assert_close(soft_cross_entropy(teacher, teacher), -(p * p.log()).sum(1).mean())
    assert soft_cross_entropy(-teacher, teacher) > soft_cross_entropy(teacher, teacher)
