"""The base class of the backbones."""

from abc import ABC, abstractmethod

from torch import nn

from flsuite.errors import FlsuiteError

__all__ = ["Backbone", "check_widths"]


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


def check_widths(owner: str, layers: int | None = None, **widths: tuple[int, ...]) -> None:
    """Refuse a layer without units, and another number of layers than ``layers``.

    Args:
        owner: Name of the backbone.
        layers: Number of widths that are needed. Default: any.
        **widths: Tuples of widths, by the name of the argument.
    """
    for name, values in widths.items():
        if any(width < 1 for width in values):
            raise FlsuiteError(
                f"{owner}({name}={tuple(values)}) has a layer without units; every width must be "
                "at least 1"
            )
        if layers is not None and len(values) != layers:
            raise FlsuiteError(
                f"{owner}({name}={tuple(values)}) must have {layers} widths, one per convolution"
            )
