"""The base class of the backbones, and shared building blocks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import gcd
from typing import Annotated, Literal, get_args

from torch import nn

from flsuite.common.arguments import Range
from flsuite.common.errors import FlsuiteError, require_one_of

Widths = Annotated[tuple[int, ...], Range("widths of at least 1", lambda w: min(w, default=1) >= 1)]
TwoWidths = Annotated[
    tuple[int, ...],
    Range("two widths of at least 1, one per convolution", lambda w: len(w) == 2 and min(w) >= 1),
]


class Backbone(ABC):
    """A recipe for a network, named in the config and built once the data's shape is known.

    A subclass takes its parameters in ``__init__``, stores each under its own name, and creates a
    new network in :meth:`build`. It is plain data: it can be pickled and printed, and contains no
    tensors.
    """

    @abstractmethod
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a new network from float samples ``(n, *shape)`` to logits ``(n, outputs)``.

        Raises:
            FlsuiteError: If the network does not fit this shape. The message names one that does.
        """


def image_shape(backbone: Backbone, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return ``shape`` as ``(channels, height, width)``.

    Raises:
        FlsuiteError: If it is not the shape of an image of at least ``smallest`` pixels per side.
    """
    if len(shape) != 3 or min(shape[1:]) < smallest or shape[0] < 1:
        raise FlsuiteError(
            f"{type(backbone).__name__} takes images (channels, height, width) of at least "
            f"{smallest} x {smallest} pixels, not data of shape {tuple(shape)}; "
            "for tables and smaller images choose MLP"
        )
    channels, height, width = shape
    return channels, height, width


def dense_layers(
    features: int, hidden: Sequence[int], outputs: int, bias: bool, dropout: float = 0.0
) -> list[nn.Module]:
    """Return fully connected layers with ReLU from ``(n, features)``, and a last one without."""
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(features, units, bias=bias), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        features = units
    return [*layers, nn.Linear(features, outputs, bias=bias)]


Norm = Literal["batch", "group", "none"]


def make_norm(kind: Norm, channels: int, groups: int = 32) -> nn.Module:
    """Return a normalization layer for ``(n, channels, height, width)``, with PyTorch's defaults.

    BatchNorm normalizes by the statistics of a client's batch. Under label skew, these differ
    between clients, and from the statistics of the global model. GroupNorm has no statistics to
    average: Hsieh et al. 2020, The Non-IID Data Quagmire of Decentralized Machine Learning.

    Args:
        kind: ``batch``, ``group`` or ``none`` (the identity).
        channels: Number of channels.
        groups: Groups of GroupNorm. The default follows Wu and He 2018. If it does not divide
            ``channels``, their greatest common divisor is used.

    Raises:
        FlsuiteError: If ``kind`` is not one of the three.
    """
    require_one_of("make_norm", get_args(Norm), norm=kind)
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(gcd(groups, channels), channels)
    return nn.Identity()
