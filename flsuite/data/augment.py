"""Augmentation of whole batches, from a given generator, so that it repeats exactly."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from flsuite.errors import FlsuiteError

__all__ = ["Augment", "CropFlip"]


class Augment(ABC):
    """A random change of a training batch that keeps its shape."""

    @abstractmethod
    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Float images ``(n, c, h, w)`` to the same shape, drawing only from ``generator``."""


class CropFlip(Augment):
    """Zero-pad, crop back at a random place, mirror at random: the usual recipe for small colour images.

    Args:
        padding: Pixels on every side.
        flip: Mirror left and right with probability one half; not for digits or letters.
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        if padding < 0:
            raise FlsuiteError(f"CropFlip: padding must not be negative, got {padding}")
        self.padding = padding
        self.flip = flip

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = x.shape
        draw = torch.randint(0, 2 * self.padding + 1, (2, n, 1), generator=generator)
        rows = draw[0] + torch.arange(height)
        columns = draw[1] + torch.arange(width)
        if self.flip:
            mirrored = torch.rand(n, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        padded = F.pad(x, [self.padding] * 4).permute(0, 2, 3, 1)
        sample = torch.arange(n).view(n, 1, 1)
        rows, columns = rows.to(x.device)[:, :, None], columns.to(x.device)[:, None, :]
        return padded[sample.to(x.device), rows, columns].permute(0, 3, 1, 2)
