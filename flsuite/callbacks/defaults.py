"""The default callbacks and the default logger of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from flsuite.callbacks.loggers import RoundLogger
from flsuite.callbacks.progress import RoundProgress
from flsuite.callbacks.task_matrix import TaskMatrix
from flsuite.federation.client.setup import refuse_callbacks, without_replaced


def moved_into(folder: Path | None, loggers: Sequence[Logger]) -> list[Logger]:
    """Recreate Lightning's default logger in the folder of the run, if the run has one.

    Lightning creates the logger together with the trainer, before the folder is known.
    """
    if folder is None:
        return list(loggers)
    kinds: list[Any] = [type(logger) for logger in loggers]
    return [kind(str(folder)) for kind in kinds]


def with_defaults(callbacks: list[Callback] | Callback | None, progress: bool) -> list[Callback]:
    """Return the user's callbacks, plus each default callback whose kind is missing.

    Args:
        callbacks: The user's callbacks.
        progress: Whether to show the progress of the federation.

    Raises:
        FlsuiteError: If one of them cannot work in a federation.
    """
    given = [] if callbacks is None else callbacks
    chosen = list(given) if isinstance(given, (list, tuple)) else [given]
    chosen = without_replaced(chosen)
    refuse_callbacks(chosen)
    usual = [RoundLogger, TaskMatrix, *([RoundProgress] if progress else [])]
    missing = (kind for kind in usual if not any(isinstance(one, kind) for one in chosen))
    return [*chosen, *(kind() for kind in missing)]
