"""The base class of the backbones, shared building blocks, and small networks.

The small networks are a perceptron, LeNet-5, and the networks of the FedAvg and AF-FCL papers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Annotated, Literal, get_args

from torch import nn

from flsuite.common.arguments import BelowOne, PositiveInt, Range, Settings
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
            "for tables and smaller images choose MLP, for volumes ResNet3D"
        )
    channels, height, width = shape
    return channels, height, width


def _dense_layers(
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


def make_norm(kind: Norm, channels: int, groups: int = 32, sides: int = 2) -> nn.Module:
    """Return a normalization layer for ``(n, channels, *sides)``, with PyTorch's defaults.

    BatchNorm normalizes by the statistics of a client's batch. Under label skew, these differ
    between clients, and from the statistics of the global model. GroupNorm has no statistics to
    average: Hsieh et al. 2020, The Non-IID Data Quagmire of Decentralized Machine Learning.

    Args:
        kind: ``batch``, ``group`` or ``none`` (the identity).
        channels: Number of channels.
        groups: Groups of GroupNorm. The default follows Wu and He 2018. If it does not divide
            ``channels``, their greatest common divisor is used.
        sides: 2 for images, 3 for volumes.

    Raises:
        FlsuiteError: If ``kind`` is not one of the three.
    """
    require_one_of("make_norm", get_args(Norm), norm=kind)
    if kind == "batch":
        return (nn.BatchNorm3d if sides == 3 else nn.BatchNorm2d)(channels)
    if kind == "group":
        return nn.GroupNorm(gcd(groups, channels), channels)
    return nn.Identity()


@dataclass(frozen=True)
class MLP(Backbone, Settings):
    """Fully connected layers with ReLU, for tables and flattened images.

    Take it for tables and for first tests.

    ``MLP(hidden=())`` is multinomial logistic regression. ``MLP(hidden=(200, 200))`` is the 2NN of
    McMahan et al. 2017.

    Args:
        hidden: Widths of the hidden layers.
        bias: Whether the layers have a bias.
        dropout: Probability of dropping a hidden unit in training, in [0, 1).
    """

    hidden: Widths = (64,)
    bias: bool = True
    dropout: BelowOne = 0.0

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from ``(n, *shape)``, a shape of any rank, to ``(n, outputs)``."""
        features = prod(shape)
        if features < 1:
            raise FlsuiteError(
                f"MLP takes samples of at least one number, not data of shape {tuple(shape)}"
            )

        dense = _dense_layers(features, self.hidden, outputs, self.bias, self.dropout)
        return nn.Sequential(nn.Flatten(), *dense)


@dataclass(frozen=True)
class LeNet5(Backbone, Settings):
    """LeNet-5 with ReLU and max-pools.

    Take it for small images, and for merges of one round.

    LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition. Two 5x5 convolutions
    with 6 and 16 channels and no padding, each followed by a 2x2 max-pool, then 120-84-outputs. The
    flattened size follows the image: 256 at 28x28, 400 at 32x32. ``LeNet5(bias=False)`` is
    FedFisher's network.

    Args:
        bias: Whether convolutions and linear layers have a bias.
        channels: Channels of the two convolutions.
        hidden: Widths of the hidden fully connected layers.
    """

    bias: bool = True
    channels: TwoWidths = (6, 16)
    hidden: Widths = (120, 84)

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from images of at least 16 pixels per side to ``(n, outputs)``."""
        image_shape(self, shape, smallest=16)
        network = CNN(self.bias, self.hidden, padding=False, channels=self.channels)
        return network.build(shape, outputs)


@dataclass(frozen=True)
class CNN(Backbone, Settings):
    """Two 5x5 convolutions with 2x2 max-pools, then fully connected layers.

    Take it for images, as most papers since FedAvg.

    The defaults are the CNN of McMahan et al. 2017, Communication-Efficient Learning of Deep
    Networks from Decentralized Data: 1,663,370 parameters at ``(1, 28, 28)`` with ten classes.
    FedFisher's variant, 1600-512-128-10 at ``(3, 32, 32)``, is
    ``CNN(bias=False, hidden=(512, 128), padding=False)``.

    Args:
        bias: Whether convolutions and linear layers have a bias.
        hidden: Widths of the hidden fully connected layers.
        padding: Whether the convolutions keep the image's size. With padding, an image has at least
            4 pixels per side, without padding 16.
        channels: Channels of the two convolutions.
        norm: What follows each convolution: ``batch``, ``group`` (32 groups at most) or ``none``.
    """

    bias: bool = True
    hidden: Widths = (512,)
    padding: bool = True
    channels: TwoWidths = (32, 64)
    norm: Norm = "none"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from ``(n, channels, height, width)`` to ``(n, outputs)``."""
        channels, height, width = image_shape(self, shape, smallest=4 if self.padding else 16)
        pad = 2 if self.padding else 0

        # The pool comes before the ReLU, with which it commutes, because the ReLU then processes a
        # quarter of the values.
        layers: list[nn.Module] = []
        for maps in self.channels:
            convolution = nn.Conv2d(channels, maps, 5, padding=pad, bias=self.bias)
            norm = [] if self.norm == "none" else [make_norm(self.norm, maps)]
            layers += [convolution, *norm, nn.MaxPool2d(2), nn.ReLU(inplace=True)]
            channels, height, width = maps, (height + 2 * pad - 4) // 2, (width + 2 * pad - 4) // 2

        dense = _dense_layers(channels * height * width, self.hidden, outputs, self.bias)
        return nn.Sequential(*layers, nn.Flatten(), *dense)


@dataclass(frozen=True)
class StridedCNN(Backbone, Settings):
    """Three 4x4 convolutions with stride 2, each followed by a leaky ReLU, then one linear layer.

    Take it as the feature extractor of ``NFClassifier``.

    The default width matches AF-FCL's feature extractor for images of 28x28 pixels: Wuerkaixi et
    al. 2024, Accurate Forgetting for Heterogeneous Federated Continual Learning.

    Args:
        width: Channels of the first convolution. The others have twice and four times as many.
    """

    width: PositiveInt = 64

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from images of at least 8 pixels per side to ``(n, outputs)``."""
        channels, height, width = image_shape(self, shape, smallest=8)
        layers: list[nn.Module] = []
        for maps in (self.width, 2 * self.width, 4 * self.width):
            layers += [nn.Conv2d(channels, maps, 4, stride=2, padding=1), nn.LeakyReLU()]
            channels = maps

        # Three strided convolutions halve each side three times, rounded down.
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(channels * (height // 8) * (width // 8), outputs)
        )
