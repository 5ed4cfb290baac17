"""Augmentation of whole batches from a given generator, so that it is reproducible."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flsuite.arguments import NonNegativeInt, Settings
from flsuite.data.arguments import PlainArguments


class Augment(PlainArguments, ABC):
    """A random change of a training batch that keeps its shape.

    A subclass keeps each parameter of its ``__init__`` under the same name.
    """

    @abstractmethod
    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Change float images ``(n, c, h, w)``, drawing only from ``generator``."""


@dataclass
class CropFlip(Augment, Settings):
    """Random crop of the zero-padded image and random mirroring, for small colour images.

    Args:
        padding: Pixels of padding on every side.
        flip: Mirror left and right with probability one half. Unsuitable for digits or letters.
    """

    padding: NonNegativeInt = 4
    flip: bool = True

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = x.shape

        # One offset per image and axis; as index arrays, crop and mirror are one gather.
        offset = torch.randint(0, 2 * self.padding + 1, (2, n, 1), generator=generator)
        rows = offset[0] + torch.arange(height)
        columns = offset[1] + torch.arange(width)
        if self.flip:
            mirrored = torch.rand(n, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)

        padded = F.pad(x, [self.padding] * 4).permute(0, 2, 3, 1)
        sample = torch.arange(n).view(n, 1, 1)
        rows, columns = rows.to(x.device)[:, :, None], columns.to(x.device)[:, None, :]
        return padded[sample.to(x.device), rows, columns].permute(0, 3, 1, 2)
