"""A convolutional network whose strides take the place of pools."""

from torch import nn

from flsuite.errors import FlsuiteError
from flsuite.models.backbones.base import Backbone
from flsuite.models.backbones.cnn import image_shape

__all__ = ["StridedCNN"]


class StridedCNN(Backbone):
    """Three 4x4 convolutions with stride 2, each followed by a leaky ReLU, then one linear layer.

    With the default width, the feature extractor that AF-FCL (Wuerkaixi et al. 2024, Accurate Forgetting for Heterogeneous
    Federated Continual Learning) takes for images of 28x28 pixels.

    Args:
        width: Channels of the first convolution; the others have twice and four times as many.
    """

    def __init__(self, width: int = 64) -> None:
        if width < 1:
            raise FlsuiteError(f"StridedCNN(width={width}) has no channels; choose at least 1")
        self.width = width

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A network from ``(n, channels, height, width)``, at least 8 pixels a side, to ``(n, outputs)``."""
        channels, height, width = image_shape(self, shape, smallest=8)
        layers: list[nn.Module] = []
        for maps in (self.width, 2 * self.width, 4 * self.width):
            layers += [nn.Conv2d(channels, maps, 4, stride=2, padding=1), nn.LeakyReLU()]
            channels = maps
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(channels * (height // 8) * (width // 8), outputs)
        )
