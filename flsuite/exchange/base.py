"""What the codecs share: checks of messages, and shapes without numbers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability
from flsuite.aggregators.transforms.base import Payload
from flsuite.state import mismatch, mismatch_of_keys, non_finite

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
    if fault := mismatch_of_keys(got, keys, name):
        raise ValueError(fault)


class TreeCode(ABC):
    """A code of nested dicts, leaf by leaf. A subclass has the code of a leaf."""

    def encode(self, tree: Any, part: str) -> Any:
        """Return the packed form of finite nested data.

        Args:
            tree: A tensor, a number, or nested dicts of them.
            part: The name that its numbers are counted under.
        """
        if isinstance(tree, Mapping):
            return {key: self.encode(value, part) for key, value in tree.items()}
        return self._encode(tree, part)

    def decode(self, packed: Any, template: Any, name: str) -> Any:
        """Return the data that was packed, in the shapes and dtypes of a template.

        Args:
            packed: What :meth:`encode` returned. It may be anything.
            template: The shapes and dtypes that were packed.
            name: The name of the data, for errors.

        Raises:
            ValueError: If it does not fit the template.
        """
        if not isinstance(template, Mapping):
            return self._decode(packed, template, name)
        require_keys(packed, template, name)
        return {k: self.decode(packed[k], value, f"{name}.{k}") for k, value in template.items()}

    def template(self, template: Any) -> Any:
        """Return the shapes and dtypes of the packed form, the largest that it may have."""
        if isinstance(template, Mapping):
            return {key: self.template(value) for key, value in template.items()}
        return self._template(template)

    @abstractmethod
    def _encode(self, leaf: Any, part: str) -> Any: ...

    @abstractmethod
    def _decode(self, packed: Any, template: Any, name: str) -> Any: ...

    @abstractmethod
    def _template(self, template: Any) -> Any: ...
