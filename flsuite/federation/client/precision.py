"""The precision of the clients' fits, where the config leaves it to the device."""

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from flsuite.federation.client.placement import gpus

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
