"""The base class of the backbones."""

from abc import ABC, abstractmethod
from typing import Annotated

from torch import nn

from flsuite.arguments import Range

__all__ = ["Backbone", "TwoWidths", "Widths"]

Widths = Annotated[tuple[int, ...], Range("widths of at least 1", lambda w: min(w, default=1) >= 1)]
TwoWidths = Annotated[
    tuple[int, ...],
    Range("two widths of at least 1, one per convolution", lambda w: len(w) == 2 and min(w) >= 1),
]


class Backbone(ABC):
    """A recipe for a network, named in the config and built once the data's shape is known.

    A subclass takes its parameters in ``__init__``, keeps each under its own name, and builds a new
    network in :meth:`build`. It is plain data: it can be pickled and printed, and holds no tensors.
    """

    @abstractmethod
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a new network from float samples ``(n, *shape)`` to logits ``(n, outputs)``.

        Raises:
            FlsuiteError: If the network does not fit this shape. The message names one that does.
        """
