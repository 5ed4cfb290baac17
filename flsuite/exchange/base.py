"""What the codecs share: checks of messages, and shapes without numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability
from flsuite.aggregators.transforms.base import Payload
from flsuite.state import mismatch, non_finite

__all__ = [
    "WITHHELD",
    "decode_each",
    "empty",
    "finite_payload",
    "require_finite",
    "require_keys",
    "require_match",
]

_REASON = "makes a code of them"
WITHHELD: Mapping[Capability, str] = {"dense changes": _REASON, "plain updates": _REASON}
"""What every codec withholds."""


def finite_payload(payload: Payload) -> Payload:
    """Return a payload whose change is in float32, as its template is.

    Raises:
        ValueError: If a number is not finite in float32. The message names the entry.
    """
    narrow = {k: v.float() if v.is_floating_point() else v for k, v in payload.change.items()}
    require_finite(change=narrow, statistics=payload.statistics)
    return payload._replace(change=narrow)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that has a shape and a dtype, and no numbers."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def require_finite(**trees: Any) -> None:
    """Refuse nested data with a NaN or an infinity, which no code can express.

    Raises:
        ValueError: If there is one. The message names the entry.
    """
    for part, tree in trees.items():
        if name := non_finite(tree, part):
            raise ValueError(
                f"{name} is not finite; lower the learning rate, or clip gradients with "
                "trainer.gradient_clip_val or the model's own clip"
            )


def require_match(got: Any, template: Any, name: str) -> None:
    """Refuse a part of a message that differs from a template in keys, shapes or dtypes.

    Raises:
        ValueError: If it differs. The message names the entry.
    """
    if fault := mismatch(got, template, name):
        raise ValueError(fault)


def require_keys(got: Any, keys: Iterable[str], name: str) -> None:
    """Refuse a part of a message that is not a dict with these keys.

    Raises:
        ValueError: If it is not. The message names the keys.
    """
    entries = dict.fromkeys(got, 0) if isinstance(got, dict) else got
    require_match(entries, dict.fromkeys(keys, 0), name)


def decode_each(
    decode: Callable[[Any, Any, str], Any], packed: Any, template: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Return each entry of a part of a message, decoded under its own name.

    Raises:
        ValueError: If the keys are not those of the template.
    """
    require_keys(packed, template, name)
    return {key: decode(packed[key], value, f"{name}.{key}") for key, value in template.items()}
