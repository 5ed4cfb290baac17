"""The base class of the backbones, and the normalisation of the residual networks."""

from abc import ABC, abstractmethod
from math import gcd
from typing import Annotated, Literal, get_args

from torch import nn

from flsuite.arguments import Range
from flsuite.errors import require_one_of

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


Norm = Literal["batch", "group", "none"]


def make_norm(kind: Norm, channels: int, groups: int = 32) -> nn.Module:
    """Return a normalisation layer for ``(n, channels, height, width)``, with PyTorch's defaults.

    BatchNorm normalises by the statistics of a client's batch, which under label skew differ
    between clients and from those of the global model. GroupNorm has no statistics to average:
    Hsieh et al. 2020, The Non-IID Data Quagmire of Decentralized Machine Learning.

    Args:
        kind: ``batch``, ``group`` or ``none`` (the identity).
        channels: Number of channels.
        groups: Groups of GroupNorm. The default is that of Wu and He 2018. Where it does not divide
            ``channels``, it is their greatest common divisor.

    Raises:
        FlsuiteError: If ``kind`` is none of the three.
    """
    require_one_of("make_norm", get_args(Norm), norm=kind)
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(gcd(groups, channels), channels)
    return nn.Identity()
