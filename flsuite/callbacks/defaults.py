"""The callbacks that every run has, and the default logger."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from flsuite.callbacks.loggers import RoundLogger
from flsuite.callbacks.progress import RoundProgress
from flsuite.callbacks.task_matrix import TaskMatrix
from flsuite.client.setup import refuse_callbacks


def moved_into(folder: Path | None, loggers: Sequence[Logger]) -> list[Logger]:
    """Return Lightning's default logger anew, in the folder of a run, if there is one.

    Lightning makes the logger with the trainer, when the run has no folder yet.
    """
    if folder is None:
        return list(loggers)
    kinds: list[Any] = [type(logger) for logger in loggers]
    return [kind(str(folder)) for kind in kinds]


def with_defaults(callbacks: list[Callback] | Callback | None, progress: bool) -> list[Callback]:
    """Return the user's callbacks, and the usual ones where the user has none of their kind.

    Args:
        callbacks: The callbacks of the user.
        progress: Whether to show the progress of the federation.

    Raises:
        FlsuiteError: If one of them cannot work in a federation.
    """
    given = [] if callbacks is None else callbacks
    chosen = list(given) if isinstance(given, (list, tuple)) else [given]
    refuse_callbacks(chosen)
    usual: list[type[Callback]] = [TaskMatrix, RoundLogger, *([RoundProgress] if progress else [])]
    missing = [kind() for kind in usual if not any(isinstance(c, kind) for c in chosen)]
    return [*chosen, *missing]
