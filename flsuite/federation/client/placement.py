"""Assignment of a machine's GPUs to workers."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from flsuite.common.errors import FlsuiteError, one_line

_ALL = (None, "auto", -1, "-1")  # values of ``devices`` that name no GPUs


def gpus(arguments: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the GPUs that clients may train on.

    The list is empty if clients train on another kind of device.

    Args:
        arguments: Arguments of Lightning's Trainer. ``devices`` has its usual meaning: a number of
            GPUs from the first one on, a list of their numbers, or all of them by default.

    Raises:
        FlsuiteError: If Lightning refuses ``devices``, such as a GPU that does not exist.
    """
    visible = torch.cuda.device_count()
    if not visible or (arguments.get("accelerator") or "auto") not in ("auto", "gpu", "cuda"):
        return []
    devices = arguments.get("devices")
    try:
        return CUDAAccelerator.parse_devices(-1 if devices in _ALL else devices) or []
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise FlsuiteError(
            f"trainer: devices must be a number of GPUs or a list of their numbers, got {devices!r}"
            f" ({one_line(error)}); visible are {list(range(visible))}"
        ) from error


def on_one_gpu(arguments: Mapping[str, Any], worker: int = 0) -> dict[str, Any]:
    """Return the arguments of a worker's Trainer, which uses one of the allowed GPUs.

    Worker ``i`` uses the ``i``-th allowed GPU. With more workers than GPUs, several workers share
    one. The server, which scores, uses the GPU of worker 0.

    Args:
        arguments: Arguments of Lightning's Trainer. They are unchanged for other devices.
        worker: Number of the worker.
    """
    allowed = gpus(arguments)
    return {**arguments, "devices": [allowed[worker % len(allowed)]]} if allowed else {**arguments}


def require_one_gpu(arguments: Mapping[str, Any]) -> None:
    """Refuse an explicit request for several GPUs if one client trains at a time."""
    devices = arguments.get("devices")
    if devices not in _ALL and len(gpus(arguments)) > 1:
        raise FlsuiteError(
            f"trainer: devices {devices!r} names several GPUs, but clients train one after another "
            "in this process; set devices to 1, or engine to Processes(workers=4)"
        )


def require_one_device(trainer: Trainer) -> None:
    """Refuse a Trainer that would spread one client's fit over several devices."""
    if trainer.world_size > 1:
        raise FlsuiteError("trainer: devices must be 1; spread clients with Processes(workers=4)")
