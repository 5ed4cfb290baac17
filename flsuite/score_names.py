"""What the name of a score says: its split, and whether high or low values are good."""

import re

from flsuite.errors import FlsuiteError

HIGHER_IS_BETTER = {
    "accuracy": True,
    "f1_macro": True,
    "balanced_accuracy": True,
    "auroc": True,
    "loss": False,
}
_SPLIT_PREFIX = re.compile(r"^(val|valid|validation|test|eval)[_/]")
_LOW = {
    *("bpc", "brier", "cer", "distance", "ece", "entropy", "error", "hamming", "kl", "logloss"),
    *("loss", "mae", "mape", "mse", "nll", "perplexity", "ppl", "rmse", "smape", "wer"),
}
_HIGH = {
    *("acc", "accuracy", "ap", "auc", "auprc", "auroc", "bleu", "corr", "correlation", "dice"),
    *("f1", "iou", "jaccard", "kappa", "map", "mcc", "mrr", "ndcg", "pearson", "precision", "psnr"),
    *("r2", "recall", "rouge", "sensitivity", "spearman", "specificity", "ssim", "variance"),
}


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
