"""Scores of predictions, by torchmetrics."""

import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from torchmetrics.functional import classification as tm

from flsuite.data.spec import DataSpec
from flsuite.errors import FlsuiteError

HIGHER_IS_BETTER = {
    "accuracy": True,
    "f1_macro": True,
    "balanced_accuracy": True,
    "auroc": True,
    "loss": False,
}
_SPLIT_PREFIX = re.compile(r"^(val|valid|validation|test|eval)[_/]")
_STATISTIC = re.compile(r"_(client_mean|client_worst|client_std|worst|std|first_five)$")
_LOW = {
    *("bpc", "brier", "cer", "distance", "ece", "entropy", "error", "hamming", "kl", "logloss"),
    *("loss", "mae", "mape", "mse", "nll", "perplexity", "ppl", "rmse", "smape", "wer"),
}
_HIGH = {
    *("acc", "accuracy", "ap", "auc", "auprc", "auroc", "bleu", "corr", "correlation", "dice"),
    *("f1", "iou", "jaccard", "kappa", "map", "mcc", "mrr", "ndcg", "pearson", "precision", "psnr"),
    *("r2", "recall", "rouge", "sensitivity", "spearman", "specificity", "ssim", "variance"),
}


def scores(
    outputs: Mapping[str, Tensor], y: Tensor, spec: DataSpec, auroc: bool = True
) -> dict[str, float]:
    """Return accuracy, macro F1, balanced accuracy, AUROC, and the mean of every per-sample column.

    Balanced accuracy is the mean recall over the classes that occur in ``y``. For multi-label data,
    accuracy is the mean over labels of the binary accuracy at one half. Balanced accuracy is then
    the mean over labels of (sensitivity + specificity) / 2, or of the one that the label's samples
    define. A score that is not defined on these samples, such as the AUROC of a single class, is
    left out.

    Args:
        outputs: ``scores`` ``(n, classes)``, if it is a classification, and per-sample columns
            ``(n,)``, such as ``loss``.
        y: Classes, int64 ``(n,)``, or labels, 0/1 ``(n, labels)``.
        spec: The data's task and number of classes.
        auroc: Whether to compute the AUROC, the costly one of the scores.
    """
    values = {
        name: float(column.double().mean()) for name, column in outputs.items() if column.ndim == 1
    }

    if "scores" not in outputs:  # no classification
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


def lower_is_better(name: str) -> bool | None:
    """Return whether low values of a score are good, by the words in its name.

    The result is ``None`` where they do not say, or contradict each other.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    low, high = bool(words & _LOW), bool(words & _HIGH)
    return None if low == high else low


def require_score(owner: str, **names: str) -> None:
    """Refuse the name of a score of which it is not known whether high or low values are good."""
    for argument, name in names.items():
        if lower_is_better(name) is None:
            raise FlsuiteError(
                f"{owner}: {argument} must be one of {', '.join(HIGHER_IS_BETTER)}, or a number "
                "that the model logs with such a word in its name (also error, mae, r2, ...), got "
                f"{name!r}"
            )


def score_name(name: str) -> str:
    """Return the name of a logged number without its split: ``val_loss`` is ``loss``."""
    return _SPLIT_PREFIX.sub("", name).removesuffix("_epoch") or name


def main_scores(names: Iterable[str], monitor: str) -> list[str]:
    """Return the names that stand for themselves: the monitor first, then the loss, then the rest.

    Scores of single classes, tasks or models, and statistics over clients, are left out.
    """
    known = list(dict.fromkeys(names))
    main = [name for name in known if not _is_detail(name, known)]
    return sorted(main, key=lambda name: (name != monitor, name != "loss"))


def _is_detail(name: str, names: Collection[str]) -> bool:
    """Return whether a number is a part or a statistic of another one of these names."""
    stem, *part = name.split("/", 1)
    return (bool(part) and (stem in names or part[0] in names)) or (
        _STATISTIC.sub("", name) in set(names) - {name}
    )


def class_accuracy(probabilities: Tensor, y: Tensor, spec: DataSpec) -> dict[str, float]:
    """Return each class's recall, for classes that occur, or each label's binary accuracy."""
    names = spec.names
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

    return {names[c]: float(values[c]) for c in present}


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
    # A label without positive samples has no sensitivity, one without negative ones no specificity.
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
    # A curve needs positive and negative samples, of every class or of a label.
    if y.ndim == 2:
        defined = (y.any(0) & ~y.bool().all(0)).nonzero().squeeze(1)
        if not len(defined):
            return None
        values = tm.multilabel_auroc(
            probabilities[:, defined], y[:, defined].long(), num_labels=len(defined)
        )
        return float(values)

    if len(y.unique()) < classes:
        return None
    if classes == 2:
        return float(tm.binary_auroc(probabilities[:, 1], y))
    return float(tm.multiclass_auroc(probabilities, y, num_classes=classes))
