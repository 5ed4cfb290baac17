"""A federation on disk, from which it goes on as if it had never stopped."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch

from flsuite.runs.settings import describe, differences, init_args
from flsuite.errors import FlsuiteError
from flsuite.models.base import ClientModel
from flsuite.runs.folder import atomic_save

__all__ = ["export_model", "load_checkpoint", "refuse_mismatch", "save_checkpoint"]

_FORMAT = 1


def save_checkpoint(content: dict[str, Any], folder: Path, best: bool) -> None:
    """Write ``last.ckpt`` whole or not at all; with ``best``, ``best.ckpt`` is the same file.

    ``best`` comes first: a run killed between the two does its round again, and finds the same best.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def write(path: Path) -> None:
        torch.save({"format": _FORMAT, **content}, path)
        if best:
            atomic_save(lambda twin: _link(path, twin), folder / "best.ckpt")

    atomic_save(write, folder / "last.ckpt")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a federation's checkpoint; plain data only, nothing in it is executed.

    Raises:
        FlsuiteError: If there is none, or it is not one.
    """
    if not path.is_file():
        raise FlsuiteError(f"there is no checkpoint {path}")
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise FlsuiteError(f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise FlsuiteError(f"{path} is not a checkpoint of a federation; resume from checkpoints/last.ckpt of a run's folder")
    return content


def refuse_mismatch(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: Path) -> None:
    """Raise if a run with our settings cannot continue the checkpoint's.

    Raises:
        FlsuiteError: Naming the settings that differ.
    """
    found = [f"{name} is {now!r} here and {then!r} there" for name, now, then in differences(ours, theirs)]
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise FlsuiteError(f"this config does not fit {path}: {'; '.join(found[:3])}{more}")


def export_model(model: ClientModel, path: Path) -> None:
    """Write an ordinary Lightning checkpoint, for ``load_from_checkpoint`` and everything else that reads one.

    Settings that only code can express (an optimizer given as a lambda) are left at their defaults.
    """
    settings = {k: v for k, v in init_args(model).items() if not (isinstance(v, str) and ("lambda" in v or "\n" in v))}
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
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_save(lambda temporary: torch.save(content, temporary), path)
