"""The file of a checkpoint: how it is written, moved into place and read."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import (
    flush_to_disk,
    link_or_copy,
    replace_file,
    require_whole,
    save_tensors,
)
from flsuite.common.moved import renewed
from flsuite.common.state import plain
from flsuite.federation.schedules.base import Clock
from flsuite.runs.kept import with_shared

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
        raise FlsuiteError(f"there is no checkpoint {path}")
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
