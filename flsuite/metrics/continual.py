"""What is kept of a sequence of tasks: summaries of the matrix of accuracies, task by task.

``R[i, j]`` is the accuracy on task j after training on task i, and ``R[-1]``, here the first row, that before any training.

Lopez-Paz and Ranzato 2017, Gradient Episodic Memory for Continual Learning, arXiv:1706.08840, eqs. 2 to 4; Chaudhry et al.
2018, Riemannian Walk for Incremental Learning, arXiv:1801.10112, eq. 4 (forgetting).
"""

import torch
from torch import Tensor

__all__ = ["average_accuracy", "backward_transfer", "forgetting", "forward_transfer"]

# All functions take ``(..., 1 + tasks done, tasks)``, whose first row is the model before any training, and give ``(...)``.


def average_accuracy(matrix: Tensor) -> Tensor:
    """Mean accuracy over the tasks done, after the last of them."""
    done = matrix.shape[-2] - 1
    return matrix[..., done, :done].mean(-1)


def backward_transfer(matrix: Tensor) -> Tensor:
    """``mean_(i<T) R[T, i] - R[i, i]``: what later tasks did to earlier ones; below 0 is forgetting. NaN for one task."""
    rows = matrix[..., 1:, :]
    done = rows.shape[-2]
    learned = torch.diagonal(rows, dim1=-2, dim2=-1)[..., : done - 1]
    return (rows[..., done - 1, : done - 1] - learned).mean(-1)


def forward_transfer(matrix: Tensor) -> Tensor:
    """``mean_(i>1) R[i-1, i] - R[-1, i]``: what a task gains from those before it, before its own begins. NaN for one task."""
    done = matrix.shape[-2] - 1
    ahead = torch.diagonal(matrix[..., 1:done, 1:], dim1=-2, dim2=-1)
    return (ahead - matrix[..., 0, 1:done]).mean(-1)


def forgetting(matrix: Tensor) -> Tensor:
    """``mean_(j<T) max_(i<T) R[i, j] - R[T, j]``: how far each earlier task has fallen from its best. NaN for one task.

    The best is looked for from the task's own training on, so that luck before it does not count.
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
