"""The networks and losses of DENSE: the image generator, the teacher, and the losses."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

CHANNELS = (128, 64)
"""Channels of the first and second convolution at width 1."""


class ImageGenerator(nn.Module):
    """Maps latent vectors ``(n, latent)`` to images ``(n, *shape)`` in [0, 1].

    Args:
        latent: Length of a latent vector.
        shape: ``(channels, height, width)`` of an image. Sides not divisible by 4 are cropped.
        width: Factor of the channels.
    """

    def __init__(self, latent: int, shape: tuple[int, ...], width: float = 1.0) -> None:
        super().__init__()
        self.shape = shape
        first, second = (max(1, round(width * channels)) for channels in CHANNELS)
        # Two upsampling steps by 2.
        height, length = (-(-side // 4) for side in shape[1:])

        self.start = nn.Linear(latent, first * height * length)
        self.unflatten = nn.Unflatten(1, (first, height, length))
        self.body = nn.Sequential(
            nn.BatchNorm2d(first),
            UpConv(first, first),
            nn.BatchNorm2d(first),
            nn.LeakyReLU(0.2, inplace=True),
            UpConv(first, second),
            nn.BatchNorm2d(second),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(second, shape[0], 3, padding=1),
            nn.Sigmoid(),
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, z: Tensor) -> Tensor:
        x = self.unflatten(self.start(z)).contiguous(memory_format=torch.channels_last)
        images: Tensor = self.body(x)
        return images[:, :, : self.shape[1], : self.shape[2]]

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw new weights with standard deviation .02, and set the biases to 0."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.BatchNorm2d, UpConv)):
                # Around 1 for BatchNorm, because its weights are factors.
                mean = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
                drawn = torch.empty(module.weight.shape)
                module.weight.copy_(drawn.normal_(mean, 0.02, generator=generator))
                if module.bias is not None:
                    module.bias.zero_()


class UpConv(nn.Module):
    """Nearest-neighbor upsampling by 2, then a 3x3 convolution without bias.

    Both are one transposed convolution with a 4x4 kernel, which costs 16 instead of 36 products per
    input pixel and pair of channels.
    """

    bias = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        # An input pixel contributes to each output offset through its four copies.
        outputs, inputs = self.weight.shape[:2]
        flipped = self.weight.transpose(0, 1).flip(2, 3).reshape(-1, 1, 3, 3)
        kernels = F.conv2d(flipped, flipped.new_ones(1, 1, 2, 2), padding=1)
        return F.conv_transpose2d(x, kernels.view(inputs, outputs, 4, 4), stride=2, padding=1)


def statistics_distance(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Return ``|running mean - mean| + |running variance - variance|`` of a batch, 2-norms.

    Args:
        norm: A BatchNorm layer with running statistics.
        x: Its input, ``(n, channels, ...)``.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    # The biased variance, which the layer itself normalizes by.
    variance, mean = torch.var_mean(x.transpose(0, 1).flatten(1), dim=1, correction=0)
    return (norm.running_mean - mean).norm() + (norm.running_var - variance).norm()


@contextmanager
def batch_norm_distances(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect :func:`statistics_distance` of every BatchNorm layer, per forward pass in the block.

    Layers without running statistics are excluded.
    """
    distances: list[Tensor] = []

    def measure(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        distances.append(statistics_distance(norm, inputs[0]))

    with ExitStack() as hooks:
        for norm in module.modules():
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
                hooks.enter_context(norm.register_forward_pre_hook(measure))
        yield distances


class Ensemble(nn.Module):
    """The weighted mean of the logits of several fixed models.

    Args:
        members: The models, in evaluation mode.
        weights: Weight of each model. They need not sum to one.
    """

    weights: Tensor

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members).requires_grad_(False).eval()
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        device = next(self.members.parameters()).device
        self.register_buffer("weights", shares.float().to(device))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.stack([member(x) for member in self.members])
        return torch.einsum("m,mno->no", self.weights, logits)


def adversarial_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the negative divergence of the student where its class differs from the teacher's.

    It is ``- mean of 1[argmax S != argmax T] KL(softmax T || softmax S)``, over logits
    ``(n, classes)``.
    """
    differ = teacher.argmax(1) != student.argmax(1)
    return -(differ * _divergence(teacher, student)).mean()


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return ``T^2 KL(softmax(teacher / T) || softmax(student / T))``, averaged over samples."""
    divergence = _divergence(teacher / temperature, student / temperature)
    return temperature**2 * divergence.mean()


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each sample, ``(n,)``."""
    log_teacher, log_student = teacher.log_softmax(1), student.log_softmax(1)
    return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(1)
