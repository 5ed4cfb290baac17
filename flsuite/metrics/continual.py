"""Scores of continual learning, from the matrix of accuracies by task.

``R[i, j]`` is the accuracy on task j after training on task i. ``R[-1]``, stored as the first row,
is the accuracy before any training. All functions take ``(..., 1 + completed tasks, tasks)`` and
return ``(...)``.

Lopez-Paz and Ranzato 2017, Gradient Episodic Memory for Continual Learning, arXiv:1706.08840, eqs.
2 to 4. Chaudhry et al. 2018, Riemannian Walk for Incremental Learning, arXiv:1801.10112, eq. 4
(forgetting).
"""

import torch
from torch import Tensor


def average_accuracy(matrix: Tensor) -> Tensor:
    """Return the mean accuracy over the completed tasks, after the last one."""
    done = matrix.shape[-2] - 1
    return matrix[..., done, :done].mean(-1)


def backward_transfer(matrix: Tensor) -> Tensor:
    """Return ``mean_(i<T) R[T, i] - R[i, i]``, the effect of later tasks on earlier ones.

    It is negative if the model forgets, and NaN for a single task.
    """
    rows = matrix[..., 1:, :]
    done = rows.shape[-2]
    learned = torch.diagonal(rows, dim1=-2, dim2=-1)[..., : done - 1]
    return (rows[..., done - 1, : done - 1] - learned).mean(-1)


def forward_transfer(matrix: Tensor) -> Tensor:
    """Return ``mean_(i>1) R[i-1, i] - R[-1, i]``, the effect of earlier tasks on untrained ones.

    It is NaN for a single task.
    """
    done = matrix.shape[-2] - 1
    ahead = torch.diagonal(matrix[..., 1:done, 1:], dim1=-2, dim2=-1)
    return (ahead - matrix[..., 0, 1:done]).mean(-1)


def forgetting(matrix: Tensor) -> Tensor:
    """Return ``mean_(j<T) max_(j<=i<T) R[i, j] - R[T, j]``, the mean drop from the best accuracy.

    The maximum starts at the task's own training, so a lucky score before it does not count.
    Forgetting is NaN for a single task.
    """
    rows = matrix[..., 1:, :]
    done = rows.shape[-2]
    learned = torch.ones(done - 1, done - 1, dtype=torch.bool).tril()  # i >= j
    best = (
        rows[..., : done - 1, : done - 1].masked_fill(~learned, -torch.inf).amax(-2)
        if done > 1
        else rows[..., :0, 0]
    )
    return (best - rows[..., done - 1, : done - 1]).mean(-1)
