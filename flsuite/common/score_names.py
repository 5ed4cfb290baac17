"""Names of scores: the split, and whether high values are better. Numbers and tables as text."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flsuite.common.errors import FlsuiteError

if TYPE_CHECKING:
    from rich.table import Table

OF_CLASSES = ("accuracy", "f1_macro", "balanced_accuracy", "auroc", "loss")
"""The scores of every model of classes."""
_PICKS = ("accuracy", "acc", "auroc", "auc", "f1_macro", "f1", "loss")
_SHOWN = {
    "f1_macro": "macro F1",
    "auroc": "AUROC",
    "task_accuracy": "accuracy, mean over tasks",
}

_SPLIT_PREFIX = re.compile(r"^(val|valid|validation|test|eval)[_/]")
_STATISTIC = re.compile(r"_(client_mean|client_worst|client_std|worst|std|first_five)$")
_LOW = {
    *("bce", "bpc", "brier", "ce", "cer", "distance", "ece", "entropy", "error", "forgetting"),
    *("hamming", "kl", "logloss", "loss", "mae", "mape", "mse", "nll", "perplexity", "ppl"),
    *("reconstruction", "rmse", "smape", "std", "wer"),
}
_HIGH = {
    *("acc", "accuracy", "agreement", "ap", "auc", "auprc", "auroc", "bleu", "corr"),
    *("correlation", "dice", "explained", "f1", "iou", "jaccard", "kappa", "map", "mcc", "mrr"),
    *("ndcg", "pearson", "precision", "psnr", "r2", "recall", "rouge", "sensitivity"),
    *("spearman", "specificity", "ssim", "transfer"),
}


def lower_is_better(name: str) -> bool | None:
    """Return whether low values of a score are better, judging by the last word that tells.

    ``dice_loss`` is a loss. In a name with a slash, the first part with such a word counts, because
    the rest names a class. ``None`` if no word tells.
    """
    for part in name.lower().split("/"):
        telling = [word for word in re.split(r"[^a-z0-9]+", part) if word in _LOW | _HIGH]
        if telling:
            return telling[-1] in _LOW
    return None


def usual_score(names: Iterable[str]) -> str:
    """Return the score that picks a round by default, in any case of letters.

    It is an accuracy, an area under a curve, an F1 score or the loss, also with a prefix, such as
    ``node/acc``, else the first one.
    """
    names = list(names)
    for word in _PICKS:
        ends = f"/{word}", f"_{word}"
        have = [n for n in names if n.lower() == word or n.lower().endswith(ends)]
        if have:
            return min(have, key=len)
    return names[0]


def require_score(owner: str, **names: str) -> None:
    """Refuse the name of a score if it is unknown whether high or low values are better."""
    for argument, name in names.items():
        if lower_is_better(name) is None:
            raise FlsuiteError(
                f"{owner}: {argument} must be one of {', '.join(OF_CLASSES)}, or a number "
                "that the model logs with such a word in its name (also error, mae, r2, ...), got "
                f"{name!r}"
            )


def score_name(name: str) -> str:
    """Return the name of a logged metric without its split: ``val_loss`` becomes ``loss``."""
    return _SPLIT_PREFIX.sub("", name).removesuffix("_epoch") or name


def shown_score(name: str) -> str:
    """Return the name of a score for people: ``f1_macro`` is ``macro F1``."""
    return _SHOWN.get(name, name.replace("_", " "))


def shown_number(value: float, digits: int = 4, sign: str = "-") -> str:
    """Return a number for people, in scientific form from a million on."""
    return f"{value:{sign}.{digits}{'f' if abs(value) < 1e6 else 'e'}}"


def score_of(name: str) -> str:
    """Return the score of a statistic over clients: ``accuracy_client_mean`` is of ``accuracy``."""
    return _STATISTIC.sub("", name)


def main_scores(names: Iterable[str], monitor: str) -> list[str]:
    """Return the main scores: the monitor first, then the loss, then the rest.

    Scores of single classes, tasks or models, and statistics over clients, are left out, unless
    the monitor is one.
    """
    known = list(dict.fromkeys(names))
    main = [name for name in known if name == monitor or not _is_detail(name, known)]
    return sorted(main, key=lambda name: (name != monitor, name != "loss"))


def _is_detail(name: str, names: Collection[str]) -> bool:
    """Return whether a name is a part or a statistic of another of these names."""
    stem, *part = name.split("/", 1)
    return (bool(part) and (stem in names or part[0] in names)) or (
        score_of(name) in set(names) - {name}
    )


def text_table(
    title: str,
    headings: Iterable[str],
    rows: Iterable[Sequence[str]],
    words: int = 1,
    **look: Any,
) -> "Table":
    """Return a table for a terminal of 80 characters.

    Args:
        title: The title.
        headings: The headings.
        rows: The cells.
        words: Number of columns of text, from the left. The others hold numbers.
        look: Further arguments of the table.
    """
    from rich.table import Table  # late: most commands print no table

    table = Table(title=title, title_justify="left", **look)
    for number, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*row)
    return table
