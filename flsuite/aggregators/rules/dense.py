"""DENSE, one-shot learning by a generator and distillation: Zhang et al. 2022, algorithm 1.

DENSE: Data-Free One-Shot Federated Learning, arXiv:2112.12371.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import CohortRule, timed
from flsuite.common.arguments import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    at_least,
)
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import seed_process, torch_generator
from flsuite.common.state import State, cast, clone, mean_of
from flsuite.data.images import CropFlip
from flsuite.models.layers import batchnorm_layers

CHANNELS = (128, 64)
"""Channels of the first and second convolution at width 1."""


class _ImageGenerator(nn.Module):
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
            _UpConv(first, first),
            nn.BatchNorm2d(first),
            nn.LeakyReLU(0.2, inplace=True),
            _UpConv(first, second),
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
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            # Around 1 for BatchNorm, because its weights are factors.
            mean = 1.0 if parameter.ndim == 1 else 0.0
            drawn = torch.empty(parameter.shape).normal_(mean, 0.02, generator=generator)
            parameter.copy_(drawn)


class _UpConv(nn.Module):
    """Nearest-neighbor upsampling by 2, then a 3x3 convolution without bias.

    Both are one transposed convolution with a 4x4 kernel, which costs 16 instead of 36 products per
    input pixel and pair of channels.
    """

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

    def measure(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        distances.append(statistics_distance(norm, inputs[0]))

    norms = batchnorm_layers(module).values()
    with ExitStack() as hooks:
        for norm in norms:
            if norm.running_mean is not None:
                hooks.enter_context(norm.register_forward_pre_hook(measure))
        yield distances


class _Ensemble(nn.Module):
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


log = logging.getLogger("flsuite")

# BatchNorm cannot train on one image.
_BatchSize = Annotated[int, at_least(2)]
# Below this width, the number of channels stays at its minimum.
_LEAST = 1 / min(CHANNELS)
_Width = Annotated[float, at_least(_LEAST)]


@dataclass(frozen=True)
class DENSE(CohortRule, Settings):
    """Distils a student from the clients' ensemble on images that a generator synthesizes.

    Take it for one round of image models with BatchNorm, if the server may compute for long.

    The teacher is the mean of the clients' logits weighted by samples, and the student starts from
    FedAvg's model. Each epoch has two stages. A new generator learns images that the teacher
    assigns to random classes, whose statistics fit the clients' BatchNorm layers, and on which
    student and teacher disagree. The images join a pool, and the student makes one pass over the
    whole pool. The student of the best epoch is kept, by its score on the server's own samples.
    Without such samples, the last epoch's student is kept.

    The paper uses the plain mean of the logits, a student with random weights, and 200 epochs. All
    models receive images scaled like the clients' data.

    All models of a round are in memory at the same time.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation;
    - ``ensemble_accuracy``: the teacher's accuracy on the server's own samples, if there are any;
    - ``kept_epoch``: the epoch of the kept student;
    - ``generator_loss``, ``generator_ce``, ``generator_bn``, ``generator_adv``: the lowest loss of
      the last epoch and its three terms, unweighted;
    - ``student_loss``: the mean distillation loss of the last epoch.

    Args:
        epochs: Number of epochs.
        generator_steps: Adam steps per epoch, on the generator and the latent vectors.
        batch_size: Images per epoch, and per step of the student.
        latent: Length of a latent vector.
        width: Factor of the generator's channels, at least 1/64.
        generator_lr: The generator's learning rate.
        betas: Decay rates of the generator's Adam.
        bn_weight: Weight of the distance to the BatchNorm statistics.
        adv_weight: Weight of the disagreement.
        student_lr: The student's learning rate. The paper uses .001 after pre-training.
        momentum: The student's momentum, in [0, 1).
        temperature: Temperature of both distributions in the distillation.
        generator_crop: Maximum random shift of images, in pixels, while the generator learns.
        student_crop: The same while the student learns. The paper uses 4 on CIFAR.
        flip: Whether to mirror images at random, in both stages.
        precision: ``bf16-mixed`` runs the generator in bfloat16. The models run in float32.
    """

    epochs: PositiveInt = 20
    generator_steps: PositiveInt = 30
    batch_size: _BatchSize = 256
    latent: PositiveInt = 256
    width: _Width = 1.0
    generator_lr: PositiveFloat = 0.001
    betas: tuple[BelowOne, BelowOne] = (0.5, 0.999)
    bn_weight: NonNegativeFloat = 1.0
    adv_weight: NonNegativeFloat = 0.5
    student_lr: PositiveFloat = 0.01
    momentum: BelowOne = 0.9
    temperature: PositiveFloat = 20.0
    generator_crop: NonNegativeInt = 4
    student_crop: NonNegativeInt = 0
    flip: bool = True
    precision: Literal["32-true", "bf16-mixed"] = "32-true"

    weighting = "samples"
    needs = frozenset({"each update", "current models"})

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        arrived = list(updates)
        mean = mean_of((update.state, update.samples) for update in arrived)
        # The student's dropout uses the global generators. They are restored at the end.
        with timed(server), isolate_rng(), torch.enable_grad():
            seed_process(server.tools.seed, "dense", arrived[0].round)
            return self._train(server, cast(mean, server.state), arrived)

    def _train(self, server: Server, mean: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the student's state at the best epoch, or without a score, at the last one."""
        tools = server.tools
        assert tools.module is not None  # prepare has refused
        student = tools.module(mean)
        members = [tools.module(update.state) for update in updates]
        teacher = _Ensemble(members, [float(update.samples) for update in updates])
        if tools.score_module is not None:
            server.metrics["ensemble_accuracy"] = tools.score_module(teacher)

        own = dict(student.named_parameters())
        parameters = [own[name] for name in server.layout.parameters]
        optimizer = torch.optim.SGD(parameters, self.student_lr, self.momentum)
        draws = torch_generator(tools.seed, "dense", updates[0].round)
        images = _ImageGenerator(self.latent, tools.shape, self.width).to(parameters[0].device)

        new, best, pool = mean, -1.0, torch.empty(0, *tools.shape, dtype=torch.uint8)
        for epoch in range(1, self.epochs + 1):
            pool = torch.cat([pool, self._invent(server, images, teacher, student, draws)])
            self._distil(server, student, teacher, optimizer, pool, draws)

            # Keep a later epoch if it is better, or if nothing scores it.
            state = clone({name: student.state_dict()[name] for name in mean})
            accuracy = epoch if tools.score is None else tools.score(state)
            if accuracy > best:
                new, best = state, accuracy
                server.metrics["kept_epoch"] = float(epoch)
        return new

    def _invent(
        self,
        server: Server,
        images: _ImageGenerator,
        teacher: _Ensemble,
        student: nn.Module,
        draws: torch.Generator,
    ) -> Tensor:
        """Return the images of a new generator at its lowest loss, uint8."""
        device = images.start.weight.device
        images.reset(draws)
        z = torch.randn(self.batch_size, self.latent, generator=draws).to(device).requires_grad_()
        labels = torch.randint(server.tools.outputs, (self.batch_size,), generator=draws).to(device)
        learned = [*images.parameters(), z]
        optimizer = torch.optim.Adam(learned, self.generator_lr, self.betas)

        student.eval()
        kept, lowest = torch.empty(0), torch.inf
        with batch_norm_distances(teacher) as distances:
            for _ in range(self.generator_steps):
                # Only the generator: it dominates the cost, and its images become bytes anyway.
                with torch.autocast(device.type, torch.bfloat16, self.precision == "bf16-mixed"):
                    drawn = images(z).float()
                x = self._seen(server, drawn, self.generator_crop, draws)
                distances.clear()
                logits = teacher(x)
                terms = {
                    "ce": F.cross_entropy(logits, labels),
                    "bn": torch.stack(distances).sum() if distances else logits.new_zeros(()),
                    "adv": adversarial_loss(logits, student(x)),
                }
                loss = terms["ce"] + self.bn_weight * terms["bn"] + self.adv_weight * terms["adv"]
                if loss.item() < lowest or not len(kept):
                    kept, lowest = drawn.detach(), loss.item()
                    logged = {"loss": loss, **terms}
                    server.metrics.update((f"generator_{k}", v.item()) for k, v in logged.items())

                optimizer.zero_grad()
                loss.backward(inputs=learned)  # no gradients of the student's weights
                optimizer.step()
        return (kept * 255).round().to("cpu", torch.uint8)

    def _distil(
        self,
        server: Server,
        student: nn.Module,
        teacher: _Ensemble,
        optimizer: torch.optim.Optimizer,
        pool: Tensor,
        draws: torch.Generator,
    ) -> None:
        """Train the student by one pass over the pool."""
        student.train()
        device, losses = teacher.weights.device, []
        for rows in torch.randperm(len(pool), generator=draws).split(self.batch_size):
            x = self._seen(server, pool[rows].to(device) / 255, self.student_crop, draws)
            with torch.no_grad():
                logits = teacher(x)
            loss = distillation_loss(logits, student(x), self.temperature)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        student.eval()
        server.metrics["student_loss"] = sum(losses) / len(losses)

    def _seen(self, server: Server, images: Tensor, crop: int, draws: torch.Generator) -> Tensor:
        """Return images as model inputs: shifted, mirrored and scaled like the clients' data."""
        assert server.tools.to_inputs is not None  # prepare has refused
        return server.tools.to_inputs(CropFlip(crop, self.flip)(images, draws))

    def prepare(self, server: Server) -> None:
        """Refuse a model without logits, and data that an image generator cannot replace."""
        tools = server.tools
        if tools.module is None:
            raise tools.refusal("DENSE", "module", "needs the clients' models as an ensemble")
        if tools.to_inputs is None:
            raise tools.refusal("DENSE", "to_inputs", "synthesizes images")
        if tools.task == "multilabel":
            raise FlsuiteError(
                "DENSE synthesizes images of one class each, but this data has several labels per "
                "image; choose another aggregator"
            )
        if tools.score is None:
            log.info("%s", tools.refusal("DENSE", "score", "keeps the student of its last epoch"))
