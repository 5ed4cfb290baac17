"""The clients' trained models on disk, so that another run can start from them."""

from pathlib import Path

from flsuite.errors import FlsuiteError
from flsuite.files import load_tensors, make_folder, replace_file, save_tensors
from flsuite.messages import ClientResult, TrainedFit
from flsuite.state import plain

__all__ = ["UpdateStore"]

_NOT_FROM_TRAINING = ("algorithm",)  # parts of a client's memory that its algorithm has made


class UpdateStore:
    """Keeps one file per fit: ``round-0001/client-00003.pt``.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, result: ClientResult) -> None:
        """Keep what a client's training has led to."""
        update, memory = result.update, result.memory
        content = {
            "state": update.state,
            "memory": {k: v for k, v in memory.items() if k not in _NOT_FROM_TRAINING},
            "steps": update.steps,
            "metrics": result.training,
            "seconds": update.seconds - update.metrics.get("after_fit_seconds", 0.0),
        }
        path = self._path(update.round, update.client)
        make_folder(path.parent)
        named = plain(content, f"the update of client {update.client}")
        replace_file(lambda temporary: save_tensors(named, temporary), path)

    def read(self, round: int, client: int) -> TrainedFit | None:
        """Return what a client's training has led to, or ``None`` if it is not kept.

        Raises:
            FlsuiteError: If the file is damaged, or another kind of file.
            OSError: If the file cannot be opened.
        """
        path = self._path(round, client)
        if not path.exists():
            return None
        remedy = "delete it, so that the client trains again"
        try:
            return TrainedFit(**load_tensors(path, remedy))
        except TypeError as error:  # other fields
            raise FlsuiteError(
                f"{path} cannot be read: it holds no client's trained model; {remedy}"
            ) from error

    def _path(self, round: int, client: int) -> Path:
        return self.folder / f"round-{round:04d}" / f"client-{client:05d}.pt"
