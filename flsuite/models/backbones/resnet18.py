"""ResNet-18, torchvision's."""

from functools import partial

from torch import Tensor, nn

from flsuite.models.backbones.base import Backbone
from flsuite.models.backbones.cnn import image_shape
from flsuite.models.backbones.norms import Norm, make_norm

__all__ = ["ResNet18"]

_SMALL = 64  # pixels a side, from which on the stem may reduce the image fourfold


class ResNet18(Backbone):
    """ResNet-18 (He et al. 2016, Deep Residual Learning for Image Recognition) with torchvision's parameter names.

    Args:
        norm: ``batch``, ``group`` (32 groups, Wu & He 2018) or ``none``. Under label skew BatchNorm loses accuracy that
            GroupNorm keeps (Hsieh et al. 2020). With ``none`` there is no norm and no bias in its place; the last
            convolution of each block starts at zero, so that every block starts as its shortcut and the depth does not
            make the signal grow.
        small_images: Whether the stem is one 3x3 convolution with stride 1 and no max-pool. By default it is so below
            64 pixels a side; otherwise torchvision's stem, which reduces the image fourfold.
    """

    def __init__(self, norm: Norm = "batch", small_images: bool | None = None) -> None:
        self.norm: Norm = norm
        self.small_images = small_images

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A network from ``(n, channels, height, width)``, at least 8 pixels a side, to ``(n, outputs)``."""
        from torchvision.models import resnet18

        channels, height, width = image_shape(self, shape, smallest=8)
        small = min(height, width) < _SMALL if self.small_images is None else self.small_images
        network: nn.Module = resnet18(num_classes=outputs, norm_layer=partial(make_norm, self.norm))
        _fit_stem(network, channels, small)
        if self.norm == "none":
            _remove_norms(network)
        return network


def _fit_stem(network: nn.Module, channels: int, small: bool) -> None:
    """Replace the stem where the image asks for another, initialised as torchvision does."""
    if small:
        network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    elif channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    else:
        return
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")


def _remove_norms(network: nn.Module) -> None:
    network.relu = nn.ReLU()
    for name in ("layer1", "layer2", "layer3", "layer4"):
        blocks = network.get_submodule(name).children()
        setattr(network, name, nn.Sequential(*(_PlainBlock(block) for block in blocks)))


class _PlainBlock(nn.Module):
    """``block`` without its norms, under the same names.

    torchvision's block works in place on what its norm has made. Without the norm that is a convolution's output, which
    backward hooks (K-FAC) forbid to overwrite.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        parts = dict(block.named_children())
        self.conv1 = parts["conv1"]
        self.conv2 = parts["conv2"]
        self.downsample = parts.get("downsample")
        self.relu = nn.ReLU()
        for weight in self.conv2.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        residual: Tensor = self.conv2(self.relu(self.conv1(x)))
        return (residual + shortcut).relu_()
