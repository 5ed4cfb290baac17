"""Images: resizing, scaling and channels of model inputs, and augmentation of batches."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from flsuite.common.arguments import NonNegativeInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.data.arguments import PlainArguments

_CHUNK = 1024
"""Images per resizing chunk, because float32 takes four times the memory of bytes."""


@dataclass
class Scaling:
    """The map from stored bytes to model inputs: ``x * scale + shift`` per channel.

    Attributes:
        scale, shift: float32 ``(stored channels,)``. The defaults map images in [0, 1] to
            themselves, see :meth:`of_fractions`.
        channels: Channels of the model's input. A gray image is repeated to that number.
        is_identity: Whether samples are stored as model inputs, which are returned unchanged.
    """

    scale: Tensor = field(default_factory=lambda: torch.full((1,), 1 / 255))
    shift: Tensor = field(default_factory=lambda: torch.zeros(1))
    channels: int = 1
    is_identity: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Scale uint8 ``(n, h, w, c)`` to float32 ``(n, channels, h, w)``, channels last in memory.

        Volumes have one more side. Tables, which are not uint8, are returned unchanged.
        """
        if self.is_identity or x.dtype != torch.uint8:
            return x

        # In place, and without a copy for the permutation: stored images are channels_last.
        scaled = x.to(torch.float32).mul_(self.scale).add_(self.shift).movedim(-1, 1)
        if scaled.shape[1] == self.channels:
            return scaled
        # expand alone uses a stride of 0, which is not channels_last.
        repeated = scaled.expand(-1, self.channels, *scaled.shape[2:])
        is_volume = repeated.ndim == 5
        last = torch.channels_last_3d if is_volume else torch.channels_last
        return repeated.contiguous(memory_format=last)

    def of_fractions(self, images: Tensor) -> Tensor:
        """Scale images ``(n, c, h, w)`` in [0, 1] like stored ones, with gradients."""
        scale, shift = (part.to(images)[:, None, None] for part in (self.scale, self.shift))
        # The scaling is defined for stored bytes.
        scaled = images * 255 * scale + shift
        return scaled.expand(-1, max(self.channels, scaled.shape[1]), -1, -1)


def fit_scaling(x: Tensor, standardize: bool, rgb: bool) -> Scaling:
    """Return the scaling for training images uint8 ``(n, h, w, c)``, or for a table.

    Args:
        x: The training samples.
        standardize: Whether to scale each channel to mean 0 and standard deviation 1. Otherwise
            pixels are in [0, 1].
        rgb: Whether to repeat gray images to three channels.
    """
    if x.dtype != torch.uint8:
        return Scaling(torch.ones(1), torch.zeros(1), 1)

    channels = x.shape[-1]
    mean, std = torch.zeros(channels), torch.ones(channels)
    if standardize:
        mean, std = _channel_moments(x)
    return Scaling(1 / (255 * std), -mean / std, 3 if rgb else channels)


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of uint8 images, as fractions of 255.

    They are computed exactly from the histogram of the bytes, without a float copy.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    moments = []
    for channel in x.unbind(-1):
        weights = torch.bincount(channel.reshape(-1), minlength=256).double()
        mean = (weights * values).sum() / weights.sum()
        moments.append((mean, ((weights * (values - mean) ** 2).sum() / weights.sum()).sqrt()))

    mean, std = (torch.stack(m).float() for m in zip(*moments, strict=True))
    # A constant channel has deviation 0, which would be a division by zero.
    return mean, std.clamp_min(1 / 255)


def resize_images(x: Tensor, side: int | None) -> Tensor:
    """Resize images uint8 ``(n, h, w, c)`` bilinearly to ``(n, side, side, c)``.

    Without a side, they are returned unchanged, like tables and images of that size.

    Raises:
        FlsuiteError: If they are volumes.
    """
    if side is not None and x.ndim == 5:
        raise FlsuiteError(
            "data.resize is for images, and these samples are volumes; leave it out, or choose "
            "another data.size"
        )
    if side is None or x.ndim != 4 or x.shape[1:3] == (side, side):
        return x
    return torch.cat([_resize_chunk(chunk, side) for chunk in x.split(_CHUNK)])


def _resize_chunk(x: Tensor, side: int) -> Tensor:
    resized = F.interpolate(
        x.permute(0, 3, 1, 2).float(), size=(side, side), mode="bilinear", antialias=True
    )
    # Back to bytes, so resized images take the same memory per pixel.
    return resized.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


class Augment(PlainArguments, ABC):
    """A random augmentation of a training batch that keeps its shape.

    A subclass stores each parameter of its ``__init__`` under the same name.
    """

    @abstractmethod
    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return augmented float images ``(n, c, h, w)`` or volumes ``(n, c, d, h, w)``.

        Draw only from ``generator``.
        """


@dataclass
class CropFlip(Augment, Settings):
    """Random crop of the zero-padded image and random mirroring, for small color images.

    Take it for CIFAR and other color images without orientation.

    Args:
        padding: Pixels of padding on every side.
        flip: Mirror left and right with probability one half. Unsuitable for digits or letters.
    """

    padding: NonNegativeInt = 4
    flip: bool = True

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        n, _, *sides = x.shape
        axes = len(sides)

        # One offset per image and axis. With index arrays, crop and mirror are one gather.
        offset = torch.randint(0, 2 * self.padding + 1, (axes, n, 1), generator=generator)
        places = [first + torch.arange(side) for first, side in zip(offset, sides, strict=True)]
        if self.flip:
            mirrored = torch.rand(n, 1, generator=generator) < 0.5
            places[-1] = torch.where(mirrored, places[-1].flip(1), places[-1])

        padded = F.pad(x, [self.padding] * 2 * axes).movedim(1, -1)
        index = [torch.arange(n).view(n, *[1] * axes)]
        for axis, place in enumerate(places):
            index.append(place.view(n, *(-1 if axis == other else 1 for other in range(axes))))
        return padded[tuple(one.to(x.device) for one in index)].movedim(-1, 1)
