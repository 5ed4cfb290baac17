"""The older versions of the global model that clients in flight have started from."""

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from lightning.pytorch import Callback

from flsuite.errors import FlsuiteError
from flsuite.files import load_tensors, replace_file, save_tensors
from flsuite.messages import Broadcast
from flsuite.state import plain

__all__ = ["CopyCallbacks", "VersionStore"]

CopyCallbacks = Callable[[], tuple[Callback, ...]]
"""Returns copies of the user's Lightning callbacks as they are now."""


class VersionStore:
    """Keeps each version as long as a client in flight started from it.

    Memory and disk are bounded by the clients in flight, not by the length of the run. Each version
    is written once, in a file of its own, so that a checkpoint does not hold all of them.

    Args:
        folder: Folder of the files. ``None`` keeps versions in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._kept: dict[int, Broadcast] = {}
        self._written: set[int] = set()

    def add(self, broadcast: Broadcast) -> None:
        """Keep a version, until a commit says that it is not needed."""
        self._kept[broadcast.round - 1] = broadcast

    def get(self, version: int, callbacks: CopyCallbacks) -> Broadcast | None:
        """Return a version as it was sent, or ``None`` if it is not kept.

        Args:
            version: The number of the version.
            callbacks: Returns the callbacks that a version read from disk is given. Their state is
                that of the version.
        """
        if version not in self._kept and version in self._written:
            self._kept[version] = self._read(version, callbacks())
        return self._kept.get(version)

    def commit(self, needed: Collection[int]) -> list[Path]:
        """Forget what is not needed, and write what is needed and not yet on disk.

        Returns:
            The files and the folder that were written, which have yet to be flushed to disk.
        """
        self._kept = {version: kept for version, kept in self._kept.items() if version in needed}
        new = sorted(self._kept.keys() - self._written)
        if self.folder is None or not new:
            return []
        self.folder.mkdir(exist_ok=True)
        for version in new:
            self._write(self._kept[version])
        return [*(self._path(version) for version in new), self.folder]

    def restore(self, needed: Collection[int]) -> None:
        """Go back to these versions, which are read when they are needed.

        Raises:
            FlsuiteError: If one of them is missing.
        """
        self._kept = {}
        self._written = set()
        for version in needed:
            if self.folder is None or not self._path(version).is_file():
                raise FlsuiteError(
                    f"version {version} of the global model, from which clients in flight have "
                    f"started, is not in {self.folder}; resume with --ckpt_path last (best is "
                    "enough for scores alone), or start a new run"
                )
            self._written.add(version)

    def remove_unused(self, needed: Collection[int]) -> None:
        """Delete the files of versions that are not needed."""
        if self.folder is None or not self.folder.exists():
            return
        used = {self._path(version) for version in needed}
        self._written &= set(needed)
        for path in self.folder.glob("version-*.pt"):
            if path not in used:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _write(self, broadcast: Broadcast) -> None:
        content = {
            "state": broadcast.state,
            "extras": broadcast.extras,
            "callbacks": [callback.state_dict() for callback in broadcast.callbacks],
        }
        version = broadcast.round - 1
        readable = plain(content, f"version {version} of the global model")
        replace_file(lambda path: save_tensors(readable, path), self._path(version))
        self._written.add(version)

    def _read(self, version: int, callbacks: tuple[Callback, ...]) -> Broadcast:
        content = load_tensors(self._path(version), "go on from best.ckpt, or start a new run")
        for callback, state in zip(callbacks, content["callbacks"], strict=True):
            if state:
                callback.load_state_dict(state)
        return Broadcast(version + 1, content["state"], content["extras"], callbacks)

    def _path(self, version: int) -> Path:
        assert self.folder is not None
        return self.folder / f"version-{version:06d}.pt"
