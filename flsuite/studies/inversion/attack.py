"""Generative model inversion, and its figure: Zhang et al. 2020.

The Secret Revealer: Generative Model-Inversion Attacks Against Deep Neural Networks, CVPR,
arXiv:1911.07135.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from flsuite.common.arguments import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    SmallProbability,
)
from flsuite.common.errors import require_at_least
from flsuite.common.random import torch_generator
from flsuite.studies.inversion.gan import GAN
from flsuite.studies.inversion.target import Target


def reconstruction_figure(rows: Mapping[str, Tensor], columns: int = 12) -> Figure:
    """Draw images in labeled rows.

    Args:
        rows: Label to images within [0, 1], ``(n, channels, height, width)``. A label may have
            several lines.
        columns: Maximum number of images per row.
    """
    require_at_least("reconstruction_figure", 1, columns=columns)
    shown = {label: images[:columns].detach().cpu() for label, images in rows.items()}
    columns = max(len(images) for images in shown.values())
    size = 2.4 + 0.62 * columns, 0.72 * len(shown)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    # The labels have their own column.
    panels = figure.subplots(
        len(shown), 1 + columns, squeeze=False, width_ratios=[4] + [1] * columns
    )

    for (label, images), line in zip(shown.items(), panels, strict=True):
        for panel in line:
            panel.axis("off")
        line[0].text(0, 0.5, label, va="center", fontsize=9)
        for panel, image in zip(line[1:], images, strict=False):
            # Draw gray images dark on white, like ink.
            if len(image) == 1:
                panel.imshow(image[0].numpy(), cmap="gray_r", vmin=0, vmax=1)
            else:
                panel.imshow(image.permute(1, 2, 0).numpy())
    return figure


class Reconstructions(NamedTuple):
    """The result of an attack.

    Attributes:
        images: Within [0, 1], ``(n, channels, height, width)``.
        losses: The target's cross-entropy of the label, ``(n,)``.
    """

    images: Tensor
    losses: Tensor


@dataclass(frozen=True)
class Inversion(Settings):
    """The attack: latents whose images look real to the critic and like the label to the target.

    The loss of an image is ``-D(G(z)) + identity CE(T(G(z)), label)``. If the server has the
    client's K-FAC factors, ``factors (sum |A(G(z)) - A|^2 + |G(G(z)) - G|^2)`` is added, with the
    factors of the images that are optimized together.

    Attributes:
        steps: Steps of Nesterov's method per latent.
        lr: Its learning rate.
        momentum: Its momentum.
        identity: Weight of the cross-entropy.
        factors: Weight of the distance to the factors, the mu of FedFisher's experiment, whose
            value is not published.
        relative: Whether the distance to each factor is relative to its norm. Otherwise, as in the
            paper, the largest input factor dominates the sum.
        bound: Each number of a latent stays within ``[-bound, bound]``.
        restarts: Attempts per image. The one with the lowest cross-entropy is kept.
    """

    steps: PositiveInt = 1500
    lr: PositiveFloat = 0.01
    momentum: SmallProbability = 0.9
    identity: NonNegativeFloat = 100.0
    factors: NonNegativeFloat = 10.0
    relative: bool = True
    bound: PositiveFloat = 1.0
    restarts: PositiveInt = 5

    def __call__(
        self, gan: GAN, target: Target, label: int, images: int, seed: int
    ) -> Reconstructions:
        """Return reconstructions of a class.

        Args:
            gan: The attacker's prior, trained without images of the class.
            target: The server's knowledge.
            label: The class.
            images: Number of reconstructions.
            seed: Seed of the initial latents.
        """
        require_at_least("Inversion", 1, images=images)
        draws = torch_generator(seed, "inversion/latents")
        device = next(target.model.parameters()).device
        z = torch.randn(self.restarts, images, gan.latent, generator=draws).to(device)
        z = z.clamp_(-self.bound, self.bound).requires_grad_()
        labels = torch.full((self.restarts * images,), label, device=device)
        optimizer = torch.optim.SGD([z], self.lr, self.momentum, nesterov=True)

        for _ in range(self.steps):
            x = gan.generator(z.flatten(0, 1))
            optimizer.zero_grad()
            loss = self.identity * F.cross_entropy(target.logits(x), labels, reduction="sum")
            loss = loss - gan.critic(x).sum()
            if self.factors and target.factors is not None:
                # Times the number of images, so an image's step does not depend on it.
                groups = x.unflatten(0, (self.restarts, images))
                distances = target.distances(groups, self.relative)
                loss = loss + images * self.factors * distances.sum()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                z.clamp_(-self.bound, self.bound)

        with torch.no_grad():
            x = gan.generator(z.flatten(0, 1))
            losses = F.cross_entropy(target.logits(x), labels, reduction="none")
            losses = losses.view(self.restarts, images)
            best, of_image = losses.argmin(0), torch.arange(images, device=device)
            return Reconstructions(
                x.unflatten(0, (self.restarts, images))[best, of_image], losses[best, of_image]
            )


def share_recognised(judge: Target, images: Tensor, label: int) -> float:
    """Return the fraction of images that a classifier assigns to the label."""
    with torch.no_grad():
        return float((judge.logits(images).argmax(1) == label).float().mean())
