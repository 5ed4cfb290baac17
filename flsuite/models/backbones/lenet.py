"""LeNet-5."""

from dataclasses import dataclass

from torch import nn

from flsuite.arguments import Settings
from flsuite.models.backbones.base import Backbone, TwoWidths, Widths
from flsuite.models.backbones.cnn import image_shape


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
        channels, height, width = image_shape(self, shape, smallest=16)

        # The pool comes before the ReLU, with which it commutes: the ReLU has a quarter of the
        # numbers.
        layers: list[nn.Module] = []
        for maps in self.channels:
            layers += [
                nn.Conv2d(channels, maps, 5, bias=self.bias),
                nn.MaxPool2d(2),
                nn.ReLU(inplace=True),
            ]
            channels = maps

        layers.append(nn.Flatten())
        features = channels * _after(height) * _after(width)
        for units in self.hidden:
            layers += [nn.Linear(features, units, bias=self.bias), nn.ReLU()]
            features = units
        return nn.Sequential(*layers, nn.Linear(features, outputs, bias=self.bias))


def _after(side: int) -> int:
    """Return the side of an image after both convolutions and pools."""
    return ((side - 4) // 2 - 4) // 2
