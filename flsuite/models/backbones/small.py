"""Small networks: a perceptron, LeNet-5 and the networks of the FedAvg paper."""

from dataclasses import dataclass
from math import prod

from torch import nn

from flsuite.common.arguments import BelowOne, PositiveInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.models.backbones.base import (
    Backbone,
    Norm,
    TwoWidths,
    Widths,
    dense_layers,
    image_shape,
    make_norm,
)


@dataclass(frozen=True)
class MLP(Backbone, Settings):
    """Fully connected layers with ReLU, for tables and flattened images.

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

        dense = dense_layers(features, self.hidden, outputs, self.bias, self.dropout)
        return nn.Sequential(nn.Flatten(), *dense)


@dataclass(frozen=True)
class LeNet5(Backbone, Settings):
    """LeNet-5 with ReLU and max-pools.

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

        dense = dense_layers(channels * height * width, self.hidden, outputs, self.bias)
        return nn.Sequential(*layers, nn.Flatten(), *dense)


@dataclass(frozen=True)
class StridedCNN(Backbone, Settings):
    """Three 4x4 convolutions with stride 2, each followed by a leaky ReLU, then one linear layer.

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
