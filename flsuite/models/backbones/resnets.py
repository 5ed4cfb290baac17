"""Residual networks."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.models.backbones.base import Backbone, Norm, Widths, image_shape, make_norm

_FEATURES = 512  # channels of the last stage
_SMALL = 64  # minimum pixels per side for the stem that reduces the image fourfold


@dataclass(frozen=True)
class ResNet18(Backbone, Settings):
    """ResNet-18 with torchvision's parameter names.

    Take it for larger images, and for pre-trained starts.

    He et al. 2016, Deep Residual Learning for Image Recognition, arXiv:1512.03385. FedFisher's
    network for pre-trained starts, which has neither norms nor biases, is
    ``ResNet18(norm="none", head=(1000, 200), bias=False, kernel=7)``.

    Args:
        norm: ``batch``, ``group`` (32 groups, Wu and He 2018) or ``none``. Under label skew,
            BatchNorm loses accuracy that GroupNorm keeps (Hsieh et al. 2020). With ``none``, there
            are neither norms nor biases to replace them. The last convolution of each block then
            starts at zero, so every block starts as its shortcut, and the signal does not grow with
            depth.
        small_images: Whether the stem is one convolution with stride 1 and no max-pool. The other
            stem is torchvision's, which reduces the image fourfold. Default: below 64 pixels per
            side.
        head: Widths of further linear layers before the last one. There is no activation between
            them, as in FedFisher's network.
        bias: Whether the linear layers have a bias. Convolutions have none, so with ``norm``
            ``none`` and without ``bias``, there is no bias anywhere.
        kernel: Side of the kernel of the stem for small images, whose padding is one pixel. With 7,
            as in FedFisher's network, a side of 32 becomes 28.
    """

    norm: Norm = "batch"
    small_images: bool | None = None
    head: Widths = ()
    bias: bool = True
    kernel: PositiveInt = 3

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from images of at least 8 pixels per side to ``(n, outputs)``."""
        from torchvision.models import resnet18

        channels, height, width = image_shape(self, shape, smallest=max(8, self.kernel))
        small = min(height, width) < _SMALL if self.small_images is None else self.small_images

        network: nn.Module = resnet18(num_classes=outputs, norm_layer=partial(make_norm, self.norm))
        _fit_stem(network, channels, self.kernel if small else None)
        if self.norm == "none":
            _remove_norms(network)
        if self.head or not self.bias:
            network.fc = self._linear_layers(outputs)
        return network

    def _linear_layers(self, outputs: int) -> nn.Module:
        """Return the layers from the pooled features to the logits."""
        widths = (_FEATURES, *self.head, outputs)
        layers = [nn.Linear(*pair, bias=self.bias) for pair in pairwise(widths)]
        return nn.Sequential(*layers) if self.head else layers[0]


def _fit_stem(network: nn.Module, channels: int, kernel: int | None) -> None:
    """Replace the stem if the image needs another one, initialized like torchvision's.

    ``kernel`` is the kernel size of the stem for small images, and ``None`` for large ones.
    """
    if kernel is not None:
        # Reducing a small image fourfold would leave the last stage with a few pixels.
        network.conv1 = nn.Conv2d(channels, 64, kernel, padding=1, bias=False)
        network.maxpool = nn.Identity()
    elif channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    else:
        return
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")


def _remove_norms(network: nn.Module) -> None:
    """Replace every block by one without norms."""
    # Not in place, for the reason in _PlainBlock.
    network.relu = nn.ReLU()
    for name in ("layer1", "layer2", "layer3", "layer4"):
        blocks = network.get_submodule(name).children()
        setattr(network, name, nn.Sequential(*(_PlainBlock(block) for block in blocks)))


class _PlainBlock(nn.Module):
    """A torchvision block without norms, with the same names.

    torchvision's ReLU overwrites the output of the norm. Without the norm, that is a convolution's
    output, which must not be overwritten under backward hooks (K-FAC).
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        children = dict(block.named_children())
        self.conv1 = children["conv1"]
        self.conv2 = children["conv2"]
        self.downsample = children.get("downsample")
        self.relu = nn.ReLU()
        # The block starts as its shortcut.
        for weight in self.conv2.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        residual: Tensor = self.conv2(self.relu(self.conv1(x)))
        return (residual + shortcut).relu_()


_GROUPS = 8  # groups of GroupNorm: two channels each in the first stage, eight in the last


@dataclass(frozen=True)
class ResNet20(Backbone, Settings):
    """Pre-activation ResNet-20, "v2".

    Take it for images of 32x32.

    He et al. 2016, Identity Mappings in Deep Residual Networks, arXiv:1603.05027.

    Args:
        norm: ``batch``, ``group`` (8 groups) or ``none``. Under label skew, BatchNorm loses
            accuracy that GroupNorm keeps (Hsieh et al. 2020). With ``none``, the last convolution
            of each block starts at zero, so every block starts as its shortcut, and the signal does
            not grow with depth.
        width: Channels of the first stage. The other two have twice and four times as many.
    """

    norm: Norm = "batch"
    width: PositiveInt = 16

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from images of at least 4 pixels per side to ``(n, outputs)``."""
        channels, _, _ = image_shape(self, shape, smallest=4)
        return _PreActResNet(channels, outputs, self.norm, self.width)


@dataclass(frozen=True)
class ResNet3D(Backbone, Settings):
    """A small residual network for volumes, such as MedMNIST's in three dimensions.

    It is ResNet-20 with 3x3x3 convolutions, a stem that halves the volume, and fewer blocks.

    Take it for volumes: most other backbones are for images.

    Args:
        norm: ``batch``, ``group`` (8 groups) or ``none``, as in ``ResNet20``.
        width: Channels of the first stage. The other two have twice and four times as many.
        blocks: Blocks of each of the three stages.
    """

    norm: Norm = "batch"
    width: PositiveInt = 16
    blocks: PositiveInt = 1

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a network from volumes of at least 8 voxels per side to ``(n, outputs)``."""
        if len(shape) != 4 or min(shape[1:]) < 8 or shape[0] < 1:
            raise FlsuiteError(
                "ResNet3D takes volumes (channels, depth, height, width) of at least 8 voxels per "
                f"side, not data of shape {tuple(shape)}; for images choose ResNet20"
            )
        return _PreActResNet(shape[0], outputs, self.norm, self.width, self.blocks, sides=3)


class _PreActResNet(nn.Module):
    """The network of :class:`ResNet20`, from ``(n, channels, height, width)`` to ``(n, outputs)``.

    It has a 3x3 stem with stride 1, three stages of three blocks, a norm and a ReLU, a global
    average pool, and one linear layer. The second and the third stage halve the image. The
    convolutions are initialized by Kaiming's fan-out rule. With three sides, it is the network of
    :class:`ResNet3D`.
    """

    def __init__(
        self, channels: int, outputs: int, norm: Norm, width: int, blocks: int = 3, sides: int = 2
    ) -> None:
        super().__init__()
        self.stem = _convolution(channels, width, 3, stride=sides - 1, sides=sides)
        self.stages = nn.Sequential(
            _stage(width, width, 1, norm, blocks, sides),
            _stage(width, 2 * width, 2, norm, blocks, sides),
            _stage(2 * width, 4 * width, 2, norm, blocks, sides),
        )
        # The last block ends with a sum, which is not yet normalized or activated.
        self.norm = make_norm(norm, 4 * width, _GROUPS, sides)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * width, outputs)
        _initialise(self, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(n, outputs)``."""
        h: Tensor = self.relu(self.norm(self.stages(self.stem(x))))
        return self.head(h.mean(tuple(range(2, h.ndim))))


class _Block(nn.Module):
    """A block of twice norm, ReLU and 3x3 convolution, plus the shortcut.

    If the shape changes, the shortcut is a 1x1 convolution of the activated input, otherwise the
    raw input. A ReLU overwrites its input only if that is a norm's output. Without a norm, its
    input is the shortcut, or a convolution's output, which must not be overwritten under backward
    hooks (K-FAC).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, sides: int) -> None:
        super().__init__()
        self.norm1 = make_norm(norm, inputs, _GROUPS, sides)
        self.conv1 = _convolution(inputs, outputs, 3, stride, sides)
        self.norm2 = make_norm(norm, outputs, _GROUPS, sides)
        self.conv2 = _convolution(outputs, outputs, 3, 1, sides)
        self.relu = nn.ReLU(inplace=norm != "none")
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else _convolution(inputs, outputs, 1, stride, sides)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        residual: Tensor = self.conv2(self.relu(self.norm2(self.conv1(h))))
        return residual + shortcut


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, sides: int) -> nn.Module:
    kind = nn.Conv3d if sides == 3 else nn.Conv2d
    return kind(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _stage(
    inputs: int, outputs: int, stride: int, norm: Norm, blocks: int, sides: int
) -> nn.Sequential:
    others = (_Block(outputs, outputs, 1, norm, sides) for _ in range(blocks - 1))
    return nn.Sequential(_Block(inputs, outputs, stride, norm, sides), *others)


def _initialise(network: nn.Module, norm: Norm) -> None:
    """Set the initial weights of the convolutions."""
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    if norm == "none":
        # Every block starts as its shortcut.
        for name, weight in network.named_parameters():
            if name.endswith("conv2.weight"):
                nn.init.zeros_(weight)
