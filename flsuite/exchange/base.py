"""The base class of the compressions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.base import Aggregator
from flsuite.errors import FlsuiteError
from flsuite.state import State, mismatch, non_finite

__all__ = [
    "Compression",
    "empty",
    "require_finite",
    "require_keys",
    "require_match",
    "shapes",
]


class Compression(ABC):
    """How an update is packed for its way to the server.

    A client packs its trained state and its extras with :meth:`encode`. The server unpacks them
    with :meth:`decode`. The bytes that count as sent are those of the packed message. The server
    sends the global model as it is.

    A subclass takes its parameters in ``__init__`` and keeps each under its own name.

    Attributes:
        state_template: Shapes and dtypes of the shared state. :meth:`configure` sets it.
        extras_template: Shapes and dtypes of the extras, likewise.
    """

    state_template: State
    extras_template: dict[str, Any]

    def configure(self, aggregator: Aggregator, state: State, extras: dict[str, Any]) -> None:
        """Prepare for an algorithm and a model, and refuse what cannot be composed.

        It is called once on the server, before the first round and after the aggregator's
        ``configure``. The object travels to the workers after it.

        Args:
            aggregator: The algorithm.
            state: The shared state, as a template.
            extras: A template of the extras, see ``Aggregator.expected_extras``.
        """
        owner, algorithm = type(self).__name__, type(aggregator).__name__
        if aggregator.pooled:
            raise FlsuiteError(
                f"{owner}: {algorithm} trains on pooled data, so that no client sends an update; "
                "leave out trainer.compression"
            )
        if not state and not extras:
            raise FlsuiteError(
                f"{owner}: clients of {algorithm} send nothing; leave out trainer.compression"
            )
        self.state_template, self.extras_template = shapes(state), shapes(extras)

    @abstractmethod
    def encode(
        self, state: State, extras: dict[str, Any], base: State, memory: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the message of a client, and numbers about it for the log.

        Args:
            state: The trained shared state. It is not changed.
            extras: What the client half of the algorithm sends beside it.
            base: The global state that the client started from.
            memory: The client's notes for the compression: plain data that is kept from one of its
                fits to the next and never sent. It is empty at the first fit and may be changed.

        Returns:
            Nested dicts of tensors and numbers. Their size is :func:`flsuite.state.nbytes`.

        Raises:
            ValueError: If a number is not finite.
        """

    @abstractmethod
    def decode(self, message: dict[str, Any], base: State) -> tuple[State, dict[str, Any]]:
        """Return the state and the extras of a message, in the shapes and dtypes of the templates.

        Args:
            message: What a client sent. It may be anything.
            base: The global state that the client started from.

        Raises:
            ValueError: If it is no message of this compression. The text says why.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the bytes of the largest message, which :meth:`configure` decides."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that has a shape and a dtype, and no numbers."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def shapes(tree: Any) -> Any:
    """Return nested data whose tensors have a shape and a dtype, and no numbers."""
    if isinstance(tree, Tensor):
        return empty(tree.shape, tree.dtype)
    if isinstance(tree, Mapping):
        return {key: shapes(value) for key, value in tree.items()}
    return tree


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
