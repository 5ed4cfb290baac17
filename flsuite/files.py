"""Files that are written whole or not at all."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from flsuite.errors import FlsuiteError

__all__ = ["atomic_save", "flush_to_disk", "make_folder"]


def make_folder(path: Path) -> Path:
    """Make a folder and its parents where they are missing.

    Raises:
        FlsuiteError: If the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlsuiteError(
            f"cannot write to {path}: {error.strerror}; name another folder"
        ) from error
    return path


def atomic_save(write: Callable[[Path], object], path: Path) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it into place.

    A reader sees the old file or the new one, also after a power loss.

    Args:
        write: Writes the content to the path that it is given.
        path: The file to replace.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)  # the rename itself is an entry of the folder
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the entries of a folder, have reached the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # some systems do not open folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
