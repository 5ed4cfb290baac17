"""LeNet-5."""

from torch import nn

from flsuite.models.backbones.base import Backbone
from flsuite.models.backbones.cnn import image_shape

__all__ = ["LeNet5"]


class LeNet5(Backbone):
    """LeNet-5 (LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition) with ReLU and max-pools.

    Two 5x5 convolutions with 6 and 16 channels and no padding, each followed by a 2x2 max-pool, then 120-84-outputs.
    The flattened size follows the image: 256 at 28x28, 400 at 32x32. ``LeNet5(bias=False)`` is FedFisher's network.

    The pool comes before the ReLU: the maximum commutes with it, and the ReLU then works on a quarter of the numbers.

    Args:
        bias: Whether convolutions and linear layers have a bias.
    """

    def __init__(self, bias: bool = True) -> None:
        self.bias = bias

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A network from ``(n, channels, height, width)``, at least 16 pixels a side, to ``(n, outputs)``."""
        channels, height, width = image_shape(self, shape, smallest=16)
        features = 16 * _after(height) * _after(width)
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
    """The side of an image after both convolutions and pools."""
    return ((side - 4) // 2 - 4) // 2
