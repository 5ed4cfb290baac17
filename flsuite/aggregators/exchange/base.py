"""Base of the codecs: checks of messages, and templates."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability
from flsuite.aggregators.transforms.base import Payload
from flsuite.common.state import mismatch, mismatch_of_keys, non_finite

WITHHELD: Mapping[Capability, str] = dict.fromkeys(
    ("dense changes", "exact changes", "plain updates"), "encodes them"
)
"""The capabilities that every codec withholds."""


def finite_payload(payload: Payload) -> Payload:
    """Return a payload with its change in float32, like its template.

    Raises:
        ValueError: If a number is not finite in float32. The message names the entry.
    """
    narrow = {k: v.float() if v.is_floating_point() else v for k, v in payload.change.items()}
    require_finite(change=narrow, statistics=payload.statistics)
    return payload._replace(change=narrow)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor, with a shape and a dtype but without values."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def require_finite(**trees: Any) -> None:
    """Refuse nested data with NaN or infinity, which no code can represent.

    Raises:
        ValueError: If there is one. The message names the entry.
    """
    for part, tree in trees.items():
        if name := non_finite(tree, part):
            raise ValueError(
                f"{name} is not finite; lower the learning rate, clip gradients with "
                "trainer.gradient_clip_val, or look for such numbers in the samples"
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
    if fault := mismatch_of_keys(got, keys, name):
        raise ValueError(fault)


class TreeCode(ABC):
    """A codec for nested dicts, leaf by leaf. A subclass implements the code of a leaf."""

    def encode(self, tree: Any, part: str) -> Any:
        """Return the packed form of finite nested data.

        Args:
            tree: A tensor, a number, or nested dicts of them.
            part: The name under which its numbers are counted.
        """
        if isinstance(tree, Mapping):
            return {key: self.encode(value, part) for key, value in tree.items()}
        return self._encode(tree, part)

    def decode(self, packed: Any, template: Any, name: str) -> Any:
        """Return the packed data, in the shapes and dtypes of a template.

        Args:
            packed: The return value of :meth:`encode`. It may contain anything.
            template: The original shapes and dtypes.
            name: The name of the data, for errors.

        Raises:
            ValueError: If it does not fit the template.
        """
        if not isinstance(template, Mapping):
            return self._decode(packed, template, name)
        require_keys(packed, template, name)
        return {k: self.decode(packed[k], value, f"{name}.{k}") for k, value in template.items()}

    def template(self, template: Any) -> Any:
        """Return the largest shapes and dtypes of the packed form."""
        if isinstance(template, Mapping):
            return {key: self.template(value) for key, value in template.items()}
        return self._template(template)

    @abstractmethod
    def _encode(self, leaf: Any, part: str) -> Any: ...

    @abstractmethod
    def _decode(self, packed: Any, template: Any, name: str) -> Any: ...

    @abstractmethod
    def _template(self, template: Any) -> Any: ...
