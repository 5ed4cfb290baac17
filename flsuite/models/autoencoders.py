"""Autoencoders, and the strides of their convolutions.

Convolutions with strides have a workaround. For a 1x1 convolution with a stride and fewer than 8
input channels, in channels_last, oneDNN's backward pass for the weight writes past its workspace on
a CPU with AVX2 and without AVX-512 (https://github.com/uxlfoundation/oneDNN/issues/6035). The
process crashes or hangs, or the gradient is wrong. Such a convolution reads only every s-th pixel.
The workaround selects these pixels first and convolves them with stride 1.

The layout of the input does not matter: a 1x1 weight keeps the strides of channels_last even
through ``contiguous()``, and then the convolution converts its input.

An autoencoder's ``decoder(encoder(x))`` has the shape of ``x``, and its last layer is linear. Two
autoencoders are for images of at least :data:`SMALLEST` pixels per side, and one is for tables.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.models.backbones.base import Norm, make_norm

_BLOCK = 8  # channels that oneDNN processes at once with AVX2; a smaller number is affected


def slice_strides(model: nn.Module) -> None:
    """Make the affected convolutions of a model use the workaround on a CPU.

    Their classes, hooks and state dict entries are unchanged. On other devices, they compute as
    before. A subclass with its own computation is not changed.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and _is_affected(layer):
            layer._conv_forward = _SlicedConvolution(layer)  # type: ignore[method-assign]


def _is_affected(layer: nn.Conv2d) -> bool:
    is_plain = type(layer)._conv_forward is nn.Conv2d._conv_forward
    has_stride = layer.kernel_size == (1, 1) and max(layer.stride) > 1
    return is_plain and has_stride and layer.in_channels < _BLOCK


class _SlicedConvolution:
    """Replaces the method ``_conv_forward`` of one layer.

    It has no reference to the layer, so a copy of the layer uses its own weight.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        self.stride, self.groups = layer.stride, layer.groups
        self.padding = layer._reversed_padding_repeated_twice
        self.padding_mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if any(self.padding):
            input = F.pad(input, self.padding, self.padding_mode)
        if input.device.type != "cpu":
            return F.conv2d(input, weight, bias, self.stride, groups=self.groups)
        vertical, horizontal = self.stride
        return F.conv2d(input[..., ::vertical, ::horizontal], weight, bias, groups=self.groups)


SMALLEST = 4
"""Pixels per side: the U-Net halves an image twice."""

_GROUPS = 8  # groups of GroupNorm: two channels each in the narrowest layer
_STRIDES = 3  # halvings in the bottleneck autoencoder


class UNetEncoder(nn.Module):
    """The contracting half of a U-Net with two 2x2 max-pools.

    Ronneberger et al. 2015, U-Net: Convolutional Networks for Biomedical Image Segmentation,
    arXiv:1505.04597.

    The skip features come from the encoder. If the encoder is private, so are the skip features,
    although they bypass the bottleneck.
    """

    def __init__(self, channels: int, norm: Norm = "batch", width: int = 16) -> None:
        super().__init__()
        self.fine = _double(channels, width, norm)
        self.middle = _double(width, 2 * width, norm)
        self.coarse = _double(2 * width, 4 * width, norm)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode images ``(n, c, h, w)`` to features, the coarsest first.

        Returns:
            ``(n, 4 width, h // 4, w // 4)``, ``(n, 2 width, h // 2, w // 2)`` and
            ``(n, width, h, w)``.
        """
        fine = self.fine(x)
        middle = self.middle(self.pool(fine))
        return self.coarse(self.pool(middle)), middle, fine


class UNetDecoder(nn.Module):
    """The expanding half of a U-Net, with skip features joined to each transposed convolution."""

    def __init__(self, channels: int, norm: Norm = "batch", width: int = 16) -> None:
        super().__init__()
        self.up_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.middle = _double(4 * width, 2 * width, norm)
        self.up_fine = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.fine = _double(2 * width, width, norm)
        self.image = nn.Conv2d(width, channels, 1)

    def forward(self, features: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Decode the features of :class:`UNetEncoder` to images ``(n, c, h, w)``."""
        coarse, middle, fine = features
        # Take the size from the skip features, because halving rounds down and doubling would lose
        # a pixel.
        h = self.middle(
            torch.cat([self.up_middle(coarse, output_size=list(middle.shape[-2:])), middle], 1)
        )
        h = self.fine(torch.cat([self.up_fine(h, output_size=list(fine.shape[-2:])), fine], 1))
        return self.image(h)


class BottleneckEncoder(nn.Module):
    """Three strided 3x3 convolutions and one linear layer."""

    def __init__(
        self, shape: tuple[int, ...], latent_dim: int, norm: Norm = "batch", width: int = 16
    ) -> None:
        super().__init__()
        widths = [shape[0], *_widths(width)]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            # A norm has its own bias.
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=norm == "none")]
            layers += [make_norm(norm, outputs, _GROUPS), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        height, breadth = _sides(shape)[-1]
        self.latent = nn.Linear(widths[-1] * height * breadth, latent_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Encode images ``(n, c, h, w)`` to ``(n, latent_dim)``."""
        return self.latent(self.features(x).flatten(1))


class BottleneckDecoder(nn.Module):
    """One linear layer and three transposed convolutions, each after a norm and a ReLU."""

    def __init__(
        self, shape: tuple[int, ...], latent_dim: int, norm: Norm = "batch", width: int = 16
    ) -> None:
        super().__init__()
        widths = [*reversed(_widths(width)), shape[0]]
        self.sides = list(reversed(_sides(shape)))
        height, breadth = self.sides[0]
        self.start = nn.Linear(latent_dim, widths[0] * height * breadth)
        pairs = list(pairwise(widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(i, o, 3, stride=2, padding=1) for i, o in pairs)
        self.norms = nn.ModuleList(make_norm(norm, w, _GROUPS) for w in widths[:-1])
        # Without a norm, the ReLU's input is a convolution's output, which hooks may need.
        self.relu = nn.ReLU(inplace=norm != "none")

    def forward(self, latent: Tensor) -> Tensor:
        """Decode ``(n, latent_dim)`` to images ``(n, c, h, w)``."""
        h: Tensor = self.start(latent).unflatten(1, (-1, *self.sides[0]))
        for norm, up, side in zip(self.norms, self.ups, self.sides[1:], strict=True):
            # Halving rounds up, so two sizes lead to the same one. A transposed convolution
            # therefore needs the output size.
            h = up(self.relu(norm(h)), output_size=list(side))
        return h


def table_encoder(
    features: int, hidden: Sequence[int], outputs: int, dropout: float
) -> nn.Sequential:
    """Return dense layers with BatchNorm, leaky ReLU and dropout, from ``(n, features)``."""
    layers = _dense(features, hidden, dropout)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear([features, *hidden][-1], outputs))


def table_decoder(
    shape: Sequence[int], hidden: Sequence[int], latent_dim: int, dropout: float
) -> nn.Sequential:
    """Return the layers of :func:`table_encoder` in reverse order, to ``(n, *shape)``."""
    widths = list(reversed(hidden))
    last = nn.Linear([latent_dim, *widths][-1], prod(shape))
    return nn.Sequential(*_dense(latent_dim, widths, dropout), last, nn.Unflatten(1, tuple(shape)))


def _dense(inputs: int, widths: Sequence[int], dropout: float) -> list[nn.Module]:
    """Return the hidden layers of a table's networks."""
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs, *widths]):
        layers += [
            # BatchNorm has its own bias.
            nn.Linear(before, after, bias=False),
            nn.BatchNorm1d(after),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
        ]
    return layers


def _double(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    """Return two 3x3 convolutions with norm and ReLU that preserve the image size."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=norm == "none")]
        layers += [make_norm(norm, outputs, _GROUPS), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _widths(width: int) -> list[int]:
    """Return the channels after each halving."""
    return [width << k for k in range(_STRIDES)]


def _sides(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return height and width of the image and after each halving.

    Halving rounds up, like a 3x3 convolution with stride 2.
    """
    sides = [(shape[1], shape[2])]
    for _ in range(_STRIDES):
        sides.append((-(-sides[-1][0] // 2), -(-sides[-1][1] // 2)))
    return sides
