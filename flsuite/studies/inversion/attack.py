"""Generative model inversion, its prior over images, and its figure.

Zhang et al. 2020, The Secret Revealer: Generative Model-Inversion Attacks Against Deep Neural
Networks, CVPR, arXiv:1911.07135. The prior is a Wasserstein GAN with a gradient penalty: Gulrajani
et al. 2017, Improved Training of Wasserstein GANs, arXiv:1704.00028, algorithm 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.common.arguments import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    SmallProbability,
    require,
)
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import seed_process, torch_generator
from flsuite.studies.inversion.target import Target


class Generator(nn.Sequential):
    """A network from latents ``(n, latent)`` to images ``(n, *shape)`` within [0, 1].

    Args:
        shape: ``(channels, height, width)`` of an image.
        width: Channels of the last hidden layer. The two before have two and four times as many.
        latent: Length of a latent vector.
    """

    def __init__(self, shape: tuple[int, ...], width: int = 32, latent: int = 100) -> None:
        sizes = _halved(shape)
        # A transposed convolution takes s to 2 s, or with this padding to 2 s + 1.
        odd = [(height % 2, length % 2) for height, length in sizes]
        smallest = (4 * width, *sizes[3])
        super().__init__(
            nn.Linear(latent, smallest[0] * smallest[1] * smallest[2]),
            nn.Unflatten(1, smallest),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, output_padding=odd[2]),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, output_padding=odd[1]),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, shape[0], 4, 2, 1, output_padding=odd[0]),
            nn.Sigmoid(),
        )


class _Critic(nn.Sequential):
    """A network from images ``(n, *shape)`` to scores ``(n,)``, higher for real ones.

    It has no BatchNorm, because the gradient penalty is per image.

    Args:
        shape: ``(channels, height, width)`` of an image.
        width: Channels of the first layer. The next layers have two and four times as many.
    """

    def __init__(self, shape: tuple[int, ...], width: int = 32) -> None:
        height, length = _halved(shape)[3]
        super().__init__(
            nn.Conv2d(shape[0], width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * width * height * length, 1),
            nn.Flatten(0),
        )


class GAN(NamedTuple):
    """A trained generator and its critic, in evaluation mode and with frozen weights.

    Attributes:
        generator: Maps latents ``(n, latent)`` to images within [0, 1].
        critic: Maps images to numbers ``(n,)``, higher for real ones.
        latent: Length of a latent vector.
    """

    generator: nn.Module
    critic: nn.Module
    latent: int


@dataclass(frozen=True)
class GANTraining(Settings):
    """The training of the GAN.

    Attributes:
        epochs: Passes over the images.
        batch_size: Images per step.
        width: Channels of the thinnest layers. The published networks have 64.
        latent: Length of a latent vector.
        lr: Adam's learning rate.
        betas: Adam's decay rates.
        critic_steps: Steps of the critic per step of the generator.
        penalty: Weight of the gradient penalty.
    """

    epochs: PositiveInt = 30
    batch_size: PositiveInt = 64
    width: PositiveInt = 32
    latent: PositiveInt = 100
    lr: PositiveFloat = 2e-4
    betas: tuple[float, float] = (0.5, 0.999)
    critic_steps: PositiveInt = 5
    penalty: NonNegativeFloat = 10.0

    def train(self, images: Tensor, seed: int) -> GAN:
        """Return a GAN trained on images within [0, 1], ``(n, channels, height, width)``."""
        _require_images(images)
        shape = tuple(images.shape[1:])
        with isolate_rng(), torch.enable_grad():
            seed_process(seed, "inversion/gan")  # the layers' initial weights
            generator, critic = (
                Generator(shape, self.width, self.latent),
                _Critic(shape, self.width),
            )
        for module in (generator, critic):
            module.to(images.device).to(memory_format=torch.channels_last)
        of_generator, of_critic = (
            torch.optim.Adam(module.parameters(), self.lr, self.betas)
            for module in (generator, critic)
        )

        steps = 0
        for epoch in range(self.epochs):
            draws = torch_generator(seed, "inversion/gan", epoch + 1)
            for rows in torch.randperm(len(images), generator=draws).split(self.batch_size):
                real = images[rows]
                with torch.no_grad():
                    fake = generator(self._latents(real, draws))
                of_critic.zero_grad()
                _critic_loss(critic, real, fake, self.penalty, draws).backward()
                of_critic.step()

                steps += 1
                if steps % self.critic_steps == 0:
                    of_generator.zero_grad()
                    (-critic(generator(self._latents(real, draws))).mean()).backward()
                    of_generator.step()

        for module in (generator, critic):
            module.eval().requires_grad_(False)
        return GAN(generator, critic, self.latent)

    def _latents(self, real: Tensor, draws: torch.Generator) -> Tensor:
        return torch.randn(len(real), self.latent, generator=draws).to(real)


def _critic_loss(
    critic: nn.Module, real: Tensor, fake: Tensor, penalty: NonNegativeFloat, draws: torch.Generator
) -> Tensor:
    """Return ``mean D(fake) - mean D(real) + penalty mean (|grad D(x)| - 1)^2``.

    Each x is a random interpolation between a real image and a fake one.
    """
    share = torch.rand(len(real), 1, 1, 1, generator=draws).to(real)
    between = share * real + (1 - share) * fake
    distance = critic(fake).mean() - critic(real).mean()
    return distance + penalty * gradient_penalty(critic, between)


def gradient_penalty(critic: nn.Module, images: Tensor) -> Tensor:
    """Return the mean over images of ``(|grad D(x)| - 1)^2``, with gradients."""
    at = images.detach().requires_grad_()
    # Differentiate the sum, because a critic's value depends only on its own image.
    (slope,) = torch.autograd.grad(critic(at).sum(), at, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def _halved(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the sides of an image and of its three successive halves, rounded down."""
    _, height, length = shape
    return [(height // 2**times, length // 2**times) for times in range(4)]


def _require_images(images: Tensor) -> None:
    """Refuse a batch without images, or with images that cannot be halved three times."""
    if images.ndim != 4 or not len(images):
        raise FlsuiteError(
            "GANTraining needs images (n, channels, height, width) with n above 0, got "
            f"{tuple(images.shape)}"
        )
    if min(images.shape[2:]) < 8:
        raise FlsuiteError(
            f"GANTraining halves images three times, but {tuple(images.shape[2:])} is too small: "
            "set data.resize, such as 28"
        )


def reconstruction_figure(rows: Mapping[str, Tensor], columns: int = 12) -> Figure:
    """Draw images in labeled rows.

    Args:
        rows: Label to images within [0, 1], ``(n, channels, height, width)``. A label may have
            several lines.
        columns: Maximum number of images per row.
    """
    require("reconstruction_figure", PositiveInt, columns=columns)
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
        require("Inversion", PositiveInt, images=images)
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
