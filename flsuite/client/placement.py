"""The GPUs of a machine, shared out among workers."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from flsuite.errors import FlsuiteError


def gpus(arguments: Mapping[str, Any], visible: int) -> list[int]:
    """Return the numbers of the GPUs that clients may train on.

    There are none where clients train on another kind of device.

    Args:
        arguments: Arguments of Lightning's Trainer. ``devices`` has its usual meaning: a number of
            GPUs from the first one on, a list of their numbers, or all of them by default.
        visible: Number of GPUs that this process sees.

    Raises:
        FlsuiteError: If ``devices`` names a GPU that is not there.
    """
    if not visible or (arguments.get("accelerator") or "auto") not in ("auto", "gpu", "cuda"):
        return []
    devices = arguments.get("devices")
    if devices in (None, "auto", -1, "-1", [-1]):
        return list(range(visible))

    try:
        chosen = _listed(devices)
    except (TypeError, ValueError) as error:
        raise FlsuiteError(
            f"trainer: devices must be a number of GPUs or a list of their numbers, got {devices!r}"
        ) from error
    if any(not 0 <= gpu < visible for gpu in chosen):
        raise FlsuiteError(
            f"trainer: devices {devices!r} needs other GPUs than those that are visible, which are "
            f"{list(range(visible))}; name some of them, or leave devices out"
        )
    return chosen


def on_one_gpu(
    arguments: Mapping[str, Any], worker: int = 0, visible: int | None = None
) -> dict[str, Any]:
    """Return the arguments of a worker's Trainer, which has one GPU of those that are allowed.

    Worker ``i`` has the ``i``-th of them. With more workers than GPUs, several share one. The
    server, which scores, has that of worker 0.

    Args:
        arguments: Arguments of Lightning's Trainer. They stay as they are on other devices.
        worker: Number of the worker.
        visible: Number of GPUs. Default: those that this process sees.
    """
    allowed = gpus(arguments, torch.cuda.device_count() if visible is None else visible)
    return {**arguments, "devices": [allowed[worker % len(allowed)]]} if allowed else {**arguments}


def require_one_gpu(arguments: Mapping[str, Any]) -> None:
    """Refuse several GPUs that are asked for by number, where one client trains at a time."""
    devices = arguments.get("devices")
    is_open = devices in (None, "auto", -1, "-1", [-1])
    if not is_open and len(gpus(arguments, torch.cuda.device_count())) > 1:
        raise FlsuiteError(
            f"trainer: devices {devices!r} names several GPUs, and clients train one after another "
            "in this process; set devices to 1, or engine to Processes(workers=4)"
        )


def require_one_device(trainer: Trainer) -> None:
    """Refuse a Trainer that would spread one client's fit over several devices."""
    if trainer.world_size > 1:
        raise FlsuiteError("trainer: devices must be 1; spread clients with Processes(workers=4)")


def _listed(devices: Any) -> list[int]:
    """Return the numbers that ``devices`` means, as Lightning reads it."""
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part] if "," in devices else int(devices)
    return list(range(devices)) if isinstance(devices, int) else [int(part) for part in devices]
