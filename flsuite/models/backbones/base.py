"""What a backbone is."""

from abc import ABC, abstractmethod

from torch import nn

__all__ = ["Backbone"]


class Backbone(ABC):
    """A recipe for a network, named in the config and built once the data's shape is known.

    A subclass takes its parameters in ``__init__``, keeps each under its own name, and builds a fresh network in :meth:`build`.
    It is plain data: it pickles, prints, and holds no tensors.
    """

    @abstractmethod
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A network from a float batch ``(n, *shape)`` to ``(n, outputs)`` logits.

        Raises:
            FlsuiteError: If the network cannot take this shape; the message names the backbone and what fits.
        """
