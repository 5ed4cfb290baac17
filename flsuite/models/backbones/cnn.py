"""Convolutional networks from papers: one with pooling, and one with strides."""

from dataclasses import dataclass

from torch import nn

from flsuite.common.arguments import PositiveInt, Settings
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
