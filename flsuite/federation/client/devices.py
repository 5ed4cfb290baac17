"""Where a client's tensors lie, and in which precision it trains."""

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from flsuite.common.errors import FlsuiteError, one_line

_KEPT = 512 * 2**20  # bytes of free memory that the process may keep
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_MMAP_MOST = 32 * 2**20  # the largest value that older versions of glibc take


@cache
def keep_freed_memory() -> None:
    """Keep freed memory for the next tensors of this process, on Linux with glibc.

    By default, glibc returns freed tensors of many megabytes to the system. The next ones are then
    new pages, which the system clears one by one when they are first written. In a large stack of
    clients, that takes a good part of a round.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_TRIM_THRESHOLD, _KEPT)
        if not mallopt(_MMAP_THRESHOLD, _KEPT):
            mallopt(_MMAP_THRESHOLD, _MMAP_MOST)


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


AUTO = "auto"
_HALF = ("bf16-mixed", "bf16", "16-mixed", "16")  # on a CPU each of them is bfloat16
# Limits of oneDNN that leave out the instructions of AVX512-BF16 and AMX.
_ISA_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")


def resolve_precision(
    precision: str | int | None, arguments: Mapping[str, Any]
) -> tuple[str | int | None, str]:
    """Return the precision for these arguments of Lightning's Trainer, and a reason or warning.

    ``auto`` is ``bf16-mixed`` where the device has instructions for bfloat16, else ``32-true``.
    Any other precision stays, with a warning if it is one that the device only emulates.
    """
    if precision != AUTO and str(precision) not in _HALF:
        return precision, ""
    device, has_bf16 = _device(arguments)
    if precision == AUTO:
        instructions = "instructions" if has_bf16 else "no instructions"
        reason = f"this {device} has {instructions} for bfloat16"
        return "bf16-mixed" if has_bf16 else "32-true", reason
    if has_bf16 or (device == "GPU" and "bf16" not in str(precision)):
        return precision, ""
    return precision, (
        f"trainer: precision {precision} can take ten times as long as float32 here, because this "
        f"{device} has no instructions for bfloat16; set precision to auto or 32-true"
    )


def _device(arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the kind of device that clients train on, and whether it computes in bfloat16."""
    if gpus(arguments):
        return "GPU", torch.cuda.is_bf16_supported(including_emulation=False)
    accelerator = arguments.get("accelerator") or "auto"
    if accelerator == "mps" or (accelerator != "cpu" and torch.backends.mps.is_available()):
        return "GPU", False
    return "CPU", cpu_has_bf16()


def cpu_has_bf16() -> bool:
    """Return whether oneDNN, as it is set here, has instructions of this CPU for bfloat16.

    oneDNN also supports bfloat16 with AVX-512 alone, where it converts to float32 and back, which
    is slower than float32.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    is_limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISA_WITHOUT_BF16
    return torch.cpu._is_avx512_bf16_supported() and not is_limited
