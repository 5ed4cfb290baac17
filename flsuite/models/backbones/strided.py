"""A convolutional network with strides instead of pools."""

from dataclasses import dataclass

from torch import nn

from flsuite.arguments import PositiveInt, Settings
from flsuite.models.backbones.base import Backbone
from flsuite.models.backbones.cnn import image_shape

__all__ = ["StridedCNN"]


@dataclass(frozen=True)
class StridedCNN(Backbone, Settings):
    """Three 4x4 convolutions with stride 2, each followed by a leaky ReLU, then one linear layer.

    The default width is that of AF-FCL's feature extractor for images of 28x28 pixels: Wuerkaixi et
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

        # Three strides halve each side three times, rounded down.
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(channels * (height // 8) * (width // 8), outputs)
        )
