"""Scores, and forgetting over tasks.

The scores of continual learning read a matrix of accuracies by task: ``R[i, j]`` is the accuracy on
task j after training on task i. ``R[-1]``, stored as the first row, is the accuracy before any
training. All functions take ``(..., 1 + completed tasks, tasks)`` and return ``(...)``.

Lopez-Paz and Ranzato 2017, Gradient Episodic Memory for Continual Learning, arXiv:1706.08840, eqs.
2 to 4. Chaudhry et al. 2018, Riemannian Walk for Incremental Learning, arXiv:1801.10112, eq. 4
(forgetting).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics.functional import classification as tm

from flsuite.data.federated import DataSpec

_RANKS = 2**20  # numbers that are ranked at a time


def scores(
    outputs: Mapping[str, Tensor], y: Tensor, spec: DataSpec, auroc: bool = True
) -> dict[str, float]:
    """Return accuracy, macro F1, balanced accuracy, AUROC, and the mean of every per-sample column.

    Balanced accuracy is the mean recall over the classes that occur in ``y``. For multi-label data,
    accuracy is the mean over labels of the binary accuracy at threshold one half. Balanced accuracy
    is then the mean over labels of (sensitivity + specificity) / 2, or of whichever of the two is
    defined. A score that is undefined on these samples, such as the AUROC of a single class, is
    omitted.

    Args:
        outputs: ``scores`` ``(n, classes)`` for a classification, and per-sample columns ``(n,)``,
            such as ``loss``.
        y: Classes, int64 ``(n,)``, or labels, 0/1 ``(n, labels)``.
        spec: The data's task and number of classes.
        auroc: Whether to compute the AUROC, which is the most expensive score.
    """
    values = {
        name: float(column.double().mean()) for name, column in outputs.items() if column.ndim == 1
    }

    if "scores" not in outputs:  # not a classification
        return values
    probabilities = outputs["scores"]
    values |= (
        _multilabel(probabilities, y)
        if y.ndim == 2
        else _multiclass(probabilities, y, spec.num_classes)
    )

    if auroc and (value := _auroc(probabilities, y, spec.num_classes)) is not None:
        values["auroc"] = value
    return values


def class_accuracy(probabilities: Tensor, y: Tensor, spec: DataSpec) -> dict[str, float]:
    """Return each class's recall, for classes that occur, or each label's binary accuracy."""
    if y.ndim == 2:
        values = tm.multilabel_accuracy(
            probabilities, y, num_labels=spec.num_classes, average="none"
        )
        present = range(spec.num_classes)
    else:
        values = tm.multiclass_recall(
            probabilities, y, num_classes=spec.num_classes, average="none"
        )
        # A class without samples has no recall.
        present = y.unique().tolist()

    return {spec.names[c]: float(values[c]) for c in present}


def summary(values: list[float], name: str, higher_is_better: bool = True) -> dict[str, float]:
    """Return mean, worst value and standard deviation (ddof 0) over clients."""
    column = torch.tensor(values, dtype=torch.float64)
    # The worst loss is the largest.
    worst = column.min() if higher_is_better else column.max()
    return {
        f"{name}_mean": float(column.mean()),
        f"{name}_worst": float(worst),
        f"{name}_std": float(column.std(correction=0)),
    }


def _multiclass(probabilities: Tensor, y: Tensor, classes: int) -> dict[str, float]:
    predicted = probabilities.argmax(1)
    recall = tm.multiclass_recall(
        predicted, y, num_classes=classes, average="none", validate_args=False
    )

    return {
        "accuracy": float((predicted == y).double().mean()),
        "f1_macro": float(
            tm.multiclass_f1_score(
                predicted, y, num_classes=classes, average="macro", validate_args=False
            )
        ),
        # Only classes that occur have a recall.
        "balanced_accuracy": float(recall[y.unique()].double().mean()),
    }


def _multilabel(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    labels = y.shape[1]
    sensitivity = tm.multilabel_recall(probabilities, y, num_labels=labels, average="none")
    specificity = tm.multilabel_specificity(probabilities, y, num_labels=labels, average="none")
    # Sensitivity requires positive samples of a label, and specificity negative ones.
    defined = torch.stack([y.bool().any(0), ~y.bool().all(0)])

    return {
        "accuracy": float(
            tm.multilabel_accuracy(probabilities, y, num_labels=labels, average="macro")
        ),
        "f1_macro": float(
            tm.multilabel_f1_score(probabilities, y, num_labels=labels, average="macro")
        ),
        "balanced_accuracy": float(
            ((torch.stack([sensitivity, specificity]) * defined).sum(0) / defined.sum(0)).mean()
        ),
    }


def _auroc(probabilities: Tensor, y: Tensor, classes: int) -> float | None:
    """Return the mean over classes, or labels, of the AUROC, or ``None`` if it is undefined.

    It is the probability that a positive sample scores above a negative one, with ties counted as
    one half, from sums of ranks (Mann and Whitney 1947). It equals the area under the curve, and
    takes a fifth of the time on a few hundred samples.
    """
    from scipy.stats import rankdata

    positive = y.bool() if y.ndim == 2 else one_hot(y, classes).bool()
    if y.ndim == 1 and classes == 2:
        positive, probabilities = positive[:, 1:], probabilities[:, 1:]
    ones = positive.sum(0).double()
    pairs = ones * (len(y) - ones)
    # A label without positive or negative samples has no curve, and is left out. A class must have.
    defined = pairs > 0
    if not defined.any() or (y.ndim == 1 and not defined.all()):
        return None
    # Some columns at a time, because ranks need the memory of several copies.
    width = max(1, _RANKS // len(y))
    above = torch.cat(
        [
            (torch.from_numpy(rankdata(part.numpy(), axis=0)) * own).sum(0)
            for part, own in zip(
                probabilities.split(width, 1), positive.split(width, 1), strict=True
            )
        ]
    )
    above -= ones * (ones + 1) / 2
    value = float((above / pairs)[defined].mean())
    return None if math.isnan(value) else value


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
