"""The callbacks that every run has."""

from lightning.pytorch import Callback

from flsuite.callbacks.loggers import RoundLogger
from flsuite.callbacks.progress import RoundProgress
from flsuite.callbacks.task_matrix import TaskMatrix
from flsuite.client.setup import refuse_callbacks

__all__ = ["with_defaults"]


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
