"""Samples that differ from client to client by more than their classes: features and labels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flsuite.common.arguments import NonNegativeFloat, Settings, Share
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import torch_generator
from flsuite.data.arguments import PlainArguments
from flsuite.data.federated import DataSpec, DataSplit


class Skew(PlainArguments, ABC):
    """A change of each client's own samples, drawn once per client by the seed of the data."""

    def change_train(self, x: Tensor, y: Tensor, spec: DataSpec, draws: "Draws") -> None:
        """Change a client's training samples in place.

        Args:
            x: Its samples, as stored.
            y: Their targets.
            spec: The data.
            draws: The randomness of the client, and of these samples.
        """
        self.change(x, y, spec, draws)

    @abstractmethod
    def change(self, x: Tensor, y: Tensor, spec: DataSpec, draws: "Draws") -> None:
        """Change a client's samples of any split in place. The arguments are the same."""


class Draws(NamedTuple):
    """Random generators of a client.

    Attributes:
        client: The same draws for all splits, because a client has one camera.
        samples: Other draws for each split, because no two images have the same noise.
    """

    client: torch.Generator
    samples: torch.Generator


def skewed(
    split: DataSplit,
    rows: Sequence[np.ndarray],
    skew: Skew,
    spec: DataSpec,
    seed: int,
    name: Literal["train", "val", "test"],
) -> DataSplit:
    """Return a split with the rows of each client changed. Other rows stay.

    Args:
        split: The samples.
        rows: The rows of each client.
        skew: The change.
        spec: The data.
        seed: The seed of the partition.
        name: What these rows are for.
    """
    if not split.in_memory:
        raise FlsuiteError(
            "data.skew needs samples in memory; leave it out for a map-style dataset"
        )
    split = replace(split, x=split.x.clone(), y=split.y.clone())
    for client, own in enumerate(rows):
        index = torch.from_numpy(np.asarray(own))
        x, y = split.x[index], split.y[index]
        draws = Draws(
            torch_generator(seed, "skew", client=client),
            torch_generator(seed, f"skew/{name}", client=client),
        )
        (skew.change_train if name == "train" else skew.change)(x, y, spec, draws)
        split.x[index], split.y[index] = x, y
    return split


@dataclass
class FeatureSkew(Skew, Settings):
    """Images of each client as if from a scanner of its own.

    Take it if clients measure differently, such as scanners.

    Each client draws its own strengths, uniformly from the ranges below. They apply to all its
    images, for training, validation and test. The changes are rotation, blur, contrast, brightness,
    inversion and noise, in this order. Images that belong to no client are not changed, such as a
    published validation split.

    Args:
        rotation: Largest angle, in degrees to either side.
        blur: Largest standard deviation of a Gaussian blur, in pixels.
        contrast: Largest change of the contrast: 0.3 draws a factor from 0.7 to 1.3.
        brightness: Largest change of the brightness, as a fraction of white, to either side.
        inverted: Probability that a client's images are inverted.
        noise: Largest standard deviation of the pixels' noise, as a fraction of white.
    """

    rotation: NonNegativeFloat = 0.0
    blur: NonNegativeFloat = 0.0
    contrast: Share = 0.0
    brightness: Share = 0.0
    inverted: Share = 0.0
    noise: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(vars(self).values()):
            raise FlsuiteError(
                "data.skew: FeatureSkew changes nothing; set one of rotation, blur, contrast, "
                "brightness, inverted and noise, or leave data.skew out"
            )

    def change(self, x: Tensor, y: Tensor, spec: DataSpec, draws: Draws) -> None:
        if x.dtype != torch.uint8 or x.ndim != 4:
            raise FlsuiteError(
                "data.skew: FeatureSkew changes images of flsuite's own datasets, as bytes "
                f"(n, height, width, channels), and these samples are {x.dtype} {tuple(x.shape)}; "
                "leave it out"
            )
        # Late, because most runs do not need torchvision, whose import takes a second.
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as T

        angle, blur, contrast, brightness, inverted, noise = torch.rand(
            6, generator=draws.client
        ).tolist()
        images = x.permute(0, 3, 1, 2)
        if self.rotation:
            degrees = (2 * angle - 1) * self.rotation
            images = T.rotate(images, degrees, InterpolationMode.BILINEAR)
        if (sigma := blur * self.blur) > 0.05:
            radius = min(int(2 * sigma + 0.5), min(images.shape[2:]) - 1)  # inside the image
            images = T.gaussian_blur(images, [2 * radius + 1] * 2, [sigma] * 2)

        pixels = images.float()
        if self.contrast:
            mean = pixels.mean((1, 2, 3), keepdim=True)
            pixels = mean + (1 + (2 * contrast - 1) * self.contrast) * (pixels - mean)
        if self.brightness:
            pixels = pixels + 255 * (2 * brightness - 1) * self.brightness
        if inverted < self.inverted:
            pixels = 255 - pixels
        if self.noise:
            strength = 255 * noise * self.noise
            pixels = pixels + strength * torch.randn(pixels.shape, generator=draws.samples)
        x.copy_(pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1))


@dataclass
class LabelNoise(Skew, Settings):
    """Wrong labels in training samples, more on some clients than on others.

    Take it if clients label with different care.

    Each client draws its own rate, uniformly up to ``rate``, and each of its training samples gets
    another class with that probability. Samples for validation and test keep theirs.

    Args:
        rate: Largest rate of wrong labels.
    """

    rate: Share = 0.4

    def change_train(self, x: Tensor, y: Tensor, spec: DataSpec, draws: Draws) -> None:
        if y.ndim != 1 or spec.num_classes < 2 or spec.task == "other":
            raise FlsuiteError("data.skew: LabelNoise needs one class per sample; leave it out")
        rate = self.rate * torch.rand((), generator=draws.client)
        is_wrong = torch.rand(len(y), generator=draws.samples) < rate
        shift = torch.randint(1, spec.num_classes, (len(y),), generator=draws.samples)
        y.copy_(torch.where(is_wrong, (y + shift) % spec.num_classes, y))

    def change(self, x: Tensor, y: Tensor, spec: DataSpec, draws: Draws) -> None:
        return
