"""LeNet-5."""

from dataclasses import dataclass

from torch import nn

from flsuite.common.arguments import Settings
from flsuite.models.backbones.base import Backbone, TwoWidths, Widths, image_shape
from flsuite.models.backbones.cnn import CNN


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
