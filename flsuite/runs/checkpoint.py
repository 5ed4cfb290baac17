"""Checkpoints, from which a run goes on as if it had never stopped."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule

from flsuite.errors import FlsuiteError, one_line
from flsuite.files import atomic_save, flush_to_disk, replace_file, require_whole, save_tensors
from flsuite.runs.settings import describe, differences, init_args
from flsuite.state import State, plain

_FORMAT = 3
_FROZEN = "frozen.pt"


def write_checkpoint(content: dict[str, Any], folder: Path) -> Path:
    """Write a checkpoint under a temporary name, and return its path.

    Raises:
        FlsuiteError: If the content could not be read again. The previous checkpoint stays.
        OSError: If the disk is full or read-only. The previous checkpoint stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".last.ckpt.tmp"
    # A kill may have left it as a link to best.ckpt, which must not be written through.
    path.unlink(missing_ok=True)
    readable = {"format": _FORMAT, **plain(content, "checkpoint")}
    try:
        save_tensors(readable, path)
    except OSError:
        with suppress(OSError):  # a part of a file takes the space that is to be freed
            path.unlink()
        raise
    return path


def publish_checkpoint(path: Path, is_best: bool, needed: Iterable[Path]) -> None:
    """Flush a written checkpoint to disk and rename it to ``last.ckpt``.

    Args:
        path: What :func:`write_checkpoint` returned.
        is_best: Link it as ``best.ckpt`` too. That comes first: a run that is killed between the
            two does its round again, and finds the same best round.
        needed: Files and folders that the checkpoint refers to. They are flushed before it.
    """
    folder = path.parent
    flush_to_disk([*needed, path])
    if is_best:
        replace_file(lambda twin: _link(path, twin), folder / "best.ckpt")
    os.replace(path, folder / "last.ckpt")
    flush_to_disk([folder])


def write_frozen(state: State, folder: Path) -> None:
    """Write the entries that nobody trains, once and not with every checkpoint."""
    if state:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_save(lambda path: save_tensors(state, path), folder / _FROZEN)


def read_frozen(names: Sequence[str], folder: Path) -> State:
    """Read what :func:`write_frozen` has written.

    Raises:
        FlsuiteError: If the file is missing or has other entries.
    """
    if not names:
        return {}
    path = folder / _FROZEN
    try:
        require_whole(path)
        state: State = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise FlsuiteError(
            f"{path} cannot be read, which holds the frozen weights ({one_line(error, 200)}); "
            "restore it, or start a new run"
        ) from error
    if set(state) != set(names):
        raise FlsuiteError(
            f"{path} has {len(state)} frozen entries and the model has {len(names)}; freeze the "
            "same parameters as the run did, or start a new one"
        )
    return state


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a run's checkpoint.

    It is plain data, and nothing in it is executed.

    Raises:
        FlsuiteError: If there is no such file, or it is not a checkpoint of this format.
    """
    if not path.is_file():
        raise FlsuiteError(f"there is no checkpoint {path}")
    try:
        # weights_only: a pickle from elsewhere could run code.
        content = torch.load(path, weights_only=True, map_location="cpu")
        require_whole(path)  # last: of another kind of file, the errors of torch say more
    except Exception as error:
        reason = one_line(error, longest=200)
        raise FlsuiteError(
            f"{path} cannot be read as a checkpoint: {reason}; restore it, go on from another one "
            "of the run, such as --ckpt_path best, or start a new run"
        ) from error

    number = content.get("format") if isinstance(content, dict) else None
    if number is None:
        raise FlsuiteError(
            f"{path} is not a checkpoint of a run; resume from checkpoints/last.ckpt of a run's "
            "folder"
        )
    if number != _FORMAT:
        raise FlsuiteError(
            f"{path} was written by another version of flsuite (format {number}, this one reads "
            f"{_FORMAT}); resume it with that version, or start a new run"
        )
    return content


def refuse_mismatch(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue a checkpoint with other settings.

    Raises:
        FlsuiteError: If settings differ. The message names them.
    """
    named = [
        f"{name} is {now!r} here and {then!r} there"
        for name, now, then in differences(ours, theirs)
    ]
    if named:
        more = f" (and {len(named) - 3} more)" if len(named) > 3 else ""
        raise FlsuiteError(
            f"these settings do not fit {path}: {'; '.join(named[:3])}{more}; use the settings of "
            "the run, or start a new one"
        )


def export_model(model: LightningModule, path: Path) -> None:
    """Write an ordinary Lightning checkpoint, which ``load_from_checkpoint`` reads.

    Settings that only code can express, such as an optimizer given as a lambda, keep their
    defaults.
    """
    # The source of a lambda describes a run, but nothing can be made from it.
    settings = {
        name: value
        for name, value in init_args(model).items()
        if not (isinstance(value, str) and ("lambda" in value or "\n" in value))
    }

    content: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": model.state_dict(),
        "hyper_parameters": {
            "_class_path": f"{type(model).__module__}.{type(model).__qualname__}",
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
            **describe(settings),
        },
    }

    model.on_save_checkpoint(content)
    readable = plain(content, "model")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_save(lambda temporary: save_tensors(readable, temporary), path)


def _link(source: Path, target: Path) -> None:
    try:
        # A hard link takes no time and no space, whatever the size of the model.
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
