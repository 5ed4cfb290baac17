"""The pre-activation ResNet-20."""

from dataclasses import dataclass

from torch import Tensor, nn

from flsuite.common.arguments import PositiveInt, Settings
from flsuite.models.backbones.base import Backbone, Norm, image_shape, make_norm

_GROUPS = 8  # groups of GroupNorm: two channels each in the first stage, eight in the last


@dataclass(frozen=True)
class ResNet20(Backbone, Settings):
    """Pre-activation ResNet-20, "v2".

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


class _PreActResNet(nn.Module):
    """The network of :class:`ResNet20`, from ``(n, channels, height, width)`` to ``(n, outputs)``.

    It has a 3x3 stem with stride 1, three stages of three blocks, a norm and a ReLU, a global
    average pool, and one linear layer. The second and the third stage halve the image. The
    convolutions are initialized by Kaiming's fan-out rule.
    """

    def __init__(self, channels: int, outputs: int, norm: Norm, width: int) -> None:
        super().__init__()
        self.stem = _conv3x3(channels, width)
        self.stages = nn.Sequential(
            _stage(width, width, 1, norm),
            _stage(width, 2 * width, 2, norm),
            _stage(2 * width, 4 * width, 2, norm),
        )
        # The last block ends with a sum, which is not yet normalized or activated.
        self.norm = make_norm(norm, 4 * width, _GROUPS)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * width, outputs)
        _initialise(self, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(n, outputs)``."""
        h: Tensor = self.relu(self.norm(self.stages(self.stem(x))))
        return self.head(h.mean((2, 3)))


class _Block(nn.Module):
    """A block of twice norm, ReLU and 3x3 convolution, plus the shortcut.

    If the shape changes, the shortcut is a 1x1 convolution of the activated input, otherwise the
    raw input. A ReLU overwrites its input only if that is a norm's output. Without a norm, its
    input is the shortcut, or a convolution's output, which must not be overwritten under backward
    hooks (K-FAC).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = make_norm(norm, inputs, _GROUPS)
        self.conv1 = _conv3x3(inputs, outputs, stride)
        self.norm2 = make_norm(norm, outputs, _GROUPS)
        self.conv2 = _conv3x3(outputs, outputs)
        self.relu = nn.ReLU(inplace=norm != "none")
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        residual: Tensor = self.conv2(self.relu(self.norm2(self.conv1(h))))
        return residual + shortcut


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _stage(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        _Block(inputs, outputs, stride, norm),
        _Block(outputs, outputs, 1, norm),
        _Block(outputs, outputs, 1, norm),
    )


def _initialise(network: nn.Module, norm: Norm) -> None:
    """Set the initial weights of the convolutions."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    if norm == "none":
        # Every block starts as its shortcut.
        for module in network.modules():
            if isinstance(module, _Block):
                nn.init.zeros_(module.conv2.weight)
