"""The files of checkpoints: how they are written, moved into place, shared and read.

A kept checkpoint has a reference in place of a tensor that an earlier one holds, bit for bit. It
names that file, the keys that lead to the tensor, and a digest of its bits.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError, likeliest, one_line
from flsuite.common.files import (
    flush_to_disk,
    link_or_copy,
    load_tensors,
    replace_file,
    require_whole,
    save_tensors,
)
from flsuite.common.moved import renewed
from flsuite.common.state import plain, raw_bytes
from flsuite.federation.schedules.base import Clock

_SMALLEST = 4096  # bytes; a reference to a smaller tensor would save next to nothing
_FILE, _KEYS, _BITS = "shared_with", "keys", "sha256"

Keys = tuple[Any, ...]


class KeptTensors:
    """The places of the tensors in the kept checkpoints of a run."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, Keys]] = {}

    def shared(self, content: Any, name: str) -> Any:
        """Return a checkpoint's content with references, and record the tensors that are new.

        Args:
            content: The content. It is not changed.
            name: The name that the file will have.

        Returns:
            The content itself if no earlier checkpoint holds any of its tensors.
        """
        is_shared = False

        def replace(leaf: Any, keys: Keys) -> Any:
            nonlocal is_shared
            is_dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided
            if not is_dense or leaf.nbytes < _SMALLEST:
                return leaf
            bits = _digest(leaf)
            file, place = self._places.setdefault(bits, (name, keys))
            if file == name:
                return leaf
            is_shared = True
            return {_FILE: file, _KEYS: list(place), _BITS: bits}

        replaced = _replaced(content, replace)
        return replaced if is_shared else content


def with_shared(content: Any, path: Path) -> Any:
    """Return a checkpoint's content with tensors in place of references.

    Args:
        content: The content, as it was read.
        path: The file that it was read from. The other checkpoints are in its folder.

    Raises:
        FlsuiteError: If a checkpoint that holds a tensor is missing, damaged or another one.
    """

    @cache
    def read(name: str) -> Any:
        remedy = f"{path.name} shares tensors with it: restore it, or use another checkpoint"
        return load_tensors(path.parent / name, remedy)["federation"]

    def replace(leaf: Any, keys: Keys) -> Any:
        if not _is_reference(leaf):
            return leaf
        try:
            tensor = read(leaf[_FILE])
            for key in leaf[_KEYS]:
                tensor = tensor[key]
        except (KeyError, IndexError, TypeError):
            tensor = None
        if not isinstance(tensor, Tensor) or _digest(tensor) != leaf[_BITS]:
            name = ".".join(map(str, keys))
            raise FlsuiteError(
                f"{path} shares {name} with {leaf[_FILE]}, which does not hold it; restore "
                "both files, or use another checkpoint"
            )
        return tensor.clone()  # entries with equal bits may be changed in place, each for itself

    return _replaced(content, replace)


def _replaced(tree: Any, replace: Callable[[Any, Keys], Any], keys: Keys = ()) -> Any:
    """Return nested data with each leaf replaced. References are leaves."""
    if isinstance(tree, Mapping) and not _is_reference(tree):
        return {key: _replaced(value, replace, (*keys, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(v, replace, (*keys, i)) for i, v in enumerate(tree))
    return replace(tree, keys)


def _is_reference(tree: Any) -> bool:
    return isinstance(tree, Mapping) and tree.keys() == {_FILE, _KEYS, _BITS}


def _digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bits."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


_FORMAT = 3
_PARTS = {
    **dict.fromkeys(("federation", "settings", "callbacks", "summary"), dict),
    **dict.fromkeys(("table", "timeline"), int),
}
_FEDERATION = {
    **dict.fromkeys(("clock", "state", "initial", "aggregator", "clients"), dict),
    "schedule": dict | None,
}


def write_checkpoint(content: dict[str, Any], folder: Path, name: str = "last.ckpt") -> Path:
    """Write a checkpoint under a temporary name, and return its path.

    Args:
        content: Its content.
        folder: The run's folder of checkpoints.
        name: The name that :func:`publish_checkpoint` will give it.

    Raises:
        FlsuiteError: If the content would not be readable. The previous checkpoint stays.
        OSError: If the disk is full or read-only. The previous checkpoint stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{name}.tmp"
    # After a kill it may be a link to best.ckpt, which must not be overwritten.
    path.unlink(missing_ok=True)
    readable = {"format": _FORMAT, **plain(content, "checkpoint")}
    try:
        save_tensors(readable, path)
    except OSError:
        with suppress(OSError):  # a partial file wastes space on the full disk
            path.unlink()
        raise
    return path


def publish_checkpoint(path: Path, others: Mapping[str, Path], needed: Iterable[Path]) -> None:
    """Flush a written checkpoint to disk and rename it to ``last.ckpt``.

    Args:
        path: The result of :func:`write_checkpoint`.
        others: Other checkpoints of the round, as written, by their names. They may be ``path``
            itself, which is then linked. They come first: a run that is killed between the two
            steps repeats its round and writes the same files.
        needed: Files and folders that the checkpoint refers to. They are flushed before it.
    """
    folder = path.parent
    flush_to_disk([*needed, *{path, *others.values()}])
    for name, written in others.items():
        if written == path:
            replace_file(lambda twin: link_or_copy(path, twin), folder / name)
        else:
            os.replace(written, folder / name)
    os.replace(path, folder / "last.ckpt")
    flush_to_disk([folder])


def copy_files(parent: Path, own: Path, names: Iterable[str]) -> None:
    """Link or copy files of the parent into the folder of a fork. They never change in place."""
    for name in sorted(names):
        source, target = parent / name, own / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            replace_file(partial(link_or_copy, source), target)
        except FileNotFoundError as error:
            raise FlsuiteError(
                f"{source} is missing; restore the parent's folder, or begin at another round"
            ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a run's checkpoint, and the tensors that it shares with earlier checkpoints of the run.

    Raises:
        FlsuiteError: If it, or an earlier checkpoint that it needs, cannot be read.
    """
    content = load_own_parts(path)
    content["federation"] = with_shared(content["federation"], path)
    return content


def load_own_parts(path: Path) -> dict[str, Any]:
    """Read a checkpoint as plain data, without the tensors that it shares with earlier ones.

    No code in it is executed.

    Raises:
        FlsuiteError: If the file does not exist or is not a checkpoint of this format.
    """
    if not path.is_file():
        near = likeliest(str(path), ("last", "best"), 1)
        hint = f"did you mean {near[0]}?" if near else "name a file in a run's folder checkpoints"
        raise FlsuiteError(f"there is no checkpoint {path}; {hint}")
    try:
        # weights_only: a pickle from elsewhere could run code.
        content = torch.load(path, weights_only=True, map_location="cpu")
        require_whole(path)  # last: torch's errors are clearer for other file types
    except Exception as error:
        is_other = isinstance(error, KeyError)  # from unpickling text, whose bytes are its message
        reason = "it is another kind of file" if is_other else one_line(error, longest=200)
        raise FlsuiteError(
            f"{path} cannot be read as a checkpoint: {reason}; restore it, continue from another "
            "one of the run, such as --ckpt_path best, or start a new run"
        ) from error

    number = content.get("format") if isinstance(content, dict) else None
    if number is None:
        raise FlsuiteError(
            f"{path} is not a checkpoint of a run; give checkpoints/last.ckpt or best.ckpt of a "
            "run's folder"
        )
    if number != _FORMAT:
        raise FlsuiteError(
            f"{path} was written by another version of flsuite (format {number}, this one reads "
            f"{_FORMAT}); resume it with that version, or start a new run"
        )
    _require_parts(content, path)
    return {**content, "settings": renewed(content["settings"])}


def _require_parts(content: Mapping[str, Any], path: Path) -> None:
    federation = content.get("federation", {})
    for parts, kinds in ((content, _PARTS), (federation, _FEDERATION)):
        for name, kind in kinds.items():
            if not isinstance(parts.get(name, ()), kind):
                raise FlsuiteError(
                    f"{path} is not a checkpoint of a run: it has no {name}, or one of another kind"
                    "; restore it, or use another checkpoint of the run"
                )
    clock, rounds = federation["clock"], federation["clients"].values()
    is_clock = clock.keys() == vars(Clock()).keys() and all(
        type(value) in (int, float) for value in clock.values()
    )
    if not is_clock or not all(type(round) is int for round in (clock["round"], *rounds)):
        raise FlsuiteError(f"{path} is damaged: its clock is not one; restore it")


class BackgroundTask:
    """Runs one task at a time in a thread, so the main thread does not wait for the disk."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1)  # its thread starts with a task
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start a task.

        The previous task is finished first, and its error is raised.
        """
        self.wait()
        self._pending = self._executor.submit(work)

    def wait(self) -> None:
        """Wait for the task in progress, and raise its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the task in progress, and end the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
