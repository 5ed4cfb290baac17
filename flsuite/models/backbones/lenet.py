"""LeNet-5."""

from torch import nn

from flsuite.models.backbones.base import Backbone
from flsuite.models.backbones.cnn import image_shape

__all__ = ["LeNet5"]


class LeNet5(Backbone):
    """LeNet-5 with ReLU and max-pools.

    LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition. Two 5x5 convolutions
    with 6 and 16 channels and no padding, each followed by a 2x2 max-pool, then 120-84-outputs. The
    flattened size follows the image: 256 at 28x28, 400 at 32x32. ``LeNet5(bias=False)`` is
    FedFisher's network.

    Args:
        bias: Whether convolutions and linear layers have a bias.
    """

    def __init__(self, bias: bool = True) -> None:
        self.bias = bias

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from images of at least 16 pixels per side to ``(n, outputs)``."""
        channels, height, width = image_shape(self, shape, smallest=16)
        features = 16 * _after(height) * _after(width)

        # The pool comes before the ReLU, with which it commutes: the ReLU has a quarter of the
        # numbers.
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5, bias=self.bias),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 16, 5, bias=self.bias),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(features, 120, bias=self.bias),
            nn.ReLU(),
            nn.Linear(120, 84, bias=self.bias),
            nn.ReLU(),
            nn.Linear(84, outputs, bias=self.bias),
        )


def _after(side: int) -> int:
    """Return the side of an image after both convolutions and pools."""
    return ((side - 4) // 2 - 4) // 2
