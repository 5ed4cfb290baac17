"""Small autoencoders, each in two halves, so that a client can keep the encoder and share the decoder.

``decoder(encoder(x))`` has the shape of ``x`` and is not squashed: the last layer is linear. What passes between the
halves is the decoder's business. Two are for images of any size from :data:`SMALLEST` pixels a side, one is for tables.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from flsuite.models.backbones.norms import Norm, make_norm

__all__ = [
    "SMALLEST",
    "BottleneckDecoder",
    "BottleneckEncoder",
    "TableDecoder",
    "TableEncoder",
    "UNetDecoder",
    "UNetEncoder",
]

SMALLEST = 4
"""Pixels a side: the U-Net halves an image twice."""

_GROUPS = 8  # of GroupNorm: two channels a group in the widest layer
_STRIDES = 3  # halvings in the bottleneck autoencoder


class UNetEncoder(nn.Module):
    """The contracting half of a U-Net (Ronneberger et al. 2015, arXiv:1505.04597), with two 2x max-pools.

    The skip features are made here: with a private encoder they are private as well, though they reach the image past
    the bottleneck.
    """

    def __init__(self, channels: int, norm: Norm = "batch", width: int = 16) -> None:
        super().__init__()
        self.fine = _double(channels, width, norm)
        self.middle = _double(width, 2 * width, norm)
        self.coarse = _double(2 * width, 4 * width, norm)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images ``(n, c, h, w)`` to features, the coarsest first.

        Returns:
            ``(n, 4 width, h // 4, w // 4)``, ``(n, 2 width, h // 2, w // 2)`` and ``(n, width, h, w)``.
        """
        fine = self.fine(x)
        middle = self.middle(self.pool(fine))
        return self.coarse(self.pool(middle)), middle, fine


class UNetDecoder(nn.Module):
    """The expanding half of a U-Net: transposed convolutions, each joined by the skip features of its size."""

    def __init__(self, channels: int, norm: Norm = "batch", width: int = 16) -> None:
        super().__init__()
        self.up_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.middle = _double(4 * width, 2 * width, norm)
        self.up_fine = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.fine = _double(2 * width, width, norm)
        self.image = nn.Conv2d(width, channels, 1)

    def forward(self, features: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Images ``(n, c, h, w)`` from what :class:`UNetEncoder` gives."""
        coarse, middle, fine = features
        h = self.middle(
            torch.cat([self.up_middle(coarse, output_size=list(middle.shape[-2:])), middle], 1)
        )
        h = self.fine(torch.cat([self.up_fine(h, output_size=list(fine.shape[-2:])), fine], 1))
        image: Tensor = self.image(h)
        return image


class BottleneckEncoder(nn.Module):
    """Three strided 3x3 convolutions and one linear layer: an image becomes ``latent_dim`` numbers."""

    def __init__(
        self, shape: tuple[int, int, int], latent_dim: int, norm: Norm = "batch", width: int = 16
    ) -> None:
        super().__init__()
        widths = [shape[0], *_widths(width)]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=norm == "none")]
            layers += [make_norm(norm, outputs, _GROUPS), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        height, breadth = _sides(shape)[-1]
        self.latent = nn.Linear(widths[-1] * height * breadth, latent_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, c, h, w)`` to ``(n, latent_dim)``."""
        latent: Tensor = self.latent(self.features(x).flatten(1))
        return latent


class BottleneckDecoder(nn.Module):
    """The way back: one linear layer and three transposed convolutions, the last of them without norm and ReLU."""

    def __init__(
        self, shape: tuple[int, int, int], latent_dim: int, norm: Norm = "batch", width: int = 16
    ) -> None:
        super().__init__()
        widths = [*reversed(_widths(width)), shape[0]]
        self.sides = list(reversed(_sides(shape)))
        height, breadth = self.sides[0]
        self.start = nn.Linear(latent_dim, widths[0] * height * breadth)
        pairs = list(pairwise(widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(i, o, 3, stride=2, padding=1) for i, o in pairs)
        self.norms = nn.ModuleList(make_norm(norm, w, _GROUPS) for w in widths[:-1])
        self.relu = nn.ReLU(inplace=norm != "none")

    def forward(self, latent: Tensor) -> Tensor:
        """``(n, latent_dim)`` to ``(n, c, h, w)``."""
        h: Tensor = self.start(latent).unflatten(1, (-1, *self.sides[0]))
        for norm, up, side in zip(self.norms, self.ups, self.sides[1:], strict=True):
            h = up(self.relu(norm(h)), output_size=list(side))
        return h


class TableEncoder(nn.Sequential):
    """Linear layers, each with BatchNorm, leaky ReLU and dropout: ``(n, features)`` becomes ``(n, outputs)``."""

    def __init__(self, features: int, hidden: Sequence[int], outputs: int, dropout: float) -> None:
        super().__init__(
            nn.Flatten(),
            *_dense(features, hidden, dropout),
            nn.Linear(([features, *hidden])[-1], outputs),
        )


class TableDecoder(nn.Sequential):
    """The way back, the widths in reverse: ``(n, latent_dim)`` becomes ``(n, *shape)``."""

    def __init__(
        self, shape: Sequence[int], hidden: Sequence[int], latent_dim: int, dropout: float
    ) -> None:
        widths = list(reversed(hidden))
        last = nn.Linear(([latent_dim, *widths])[-1], prod(shape))
        super().__init__(*_dense(latent_dim, widths, dropout), last, nn.Unflatten(1, tuple(shape)))


def _dense(inputs: int, widths: Sequence[int], dropout: float) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs, *widths]):
        layers += [
            nn.Linear(before, after, bias=False),
            nn.BatchNorm1d(after),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
        ]
    return layers


def _double(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    """3x3 convolution, norm, ReLU, twice; the size stays."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=norm == "none")]
        layers += [make_norm(norm, outputs, _GROUPS), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _widths(width: int) -> list[int]:
    return [width << k for k in range(_STRIDES)]


def _sides(shape: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Height and width of the image and after each halving, which rounds up as a 3x3 convolution with stride 2 does."""
    sides = [(shape[1], shape[2])]
    for _ in range(_STRIDES):
        sides.append((-(-sides[-1][0] // 2), -(-sides[-1][1] // 2)))
    return sides
