"""DENSE: Zhang et al. 2022, algorithm 1.

DENSE: Data-Free One-Shot Federated Learning, arXiv:2112.12371.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.dense_generator import CHANNELS, ImageGenerator, batch_norm_distances
from flsuite.aggregators.distillation import Ensemble, adversarial_loss, distillation_loss
from flsuite.data.augment import CropFlip
from flsuite.errors import (
    FlsuiteError,
    require_at_least,
    require_below_one,
    require_one_of,
    require_positive,
    require_whole,
)
from flsuite.messages import ClientUpdate
from flsuite.random import seed_process, torch_generator
from flsuite.state import RunningMean, State, StateLayout, clone

__all__ = ["DENSE"]

log = logging.getLogger("flsuite")

Precision = Literal["32-true", "bf16-mixed"]


class DENSE(Aggregator):
    """A student distilled from the clients' ensemble on images that a generator invents.

    The teacher is the mean by samples of the clients' logits, and the student starts from FedAvg's
    model. An epoch has two stages. A new generator learns images that the teacher assigns to random
    classes, whose statistics fit the clients' BatchNorm layers, and on which student and teacher
    disagree. The images join a pool, and the student takes one pass over all of the pool. The
    student of the best epoch is kept, by its score on the server's own samples. Without such
    samples it is that of the last epoch.

    The paper takes the plain mean of the logits, a student with random weights, and 200 epochs.
    Everything sees the images scaled as the clients' data.

    All models of a round are in memory at a time.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation;
    - ``ensemble_accuracy``: the teacher's accuracy on the server's own samples, if there are any;
    - ``kept_epoch``: the epoch of the kept student;
    - ``generator_loss``, ``generator_ce``, ``generator_bn``, ``generator_adv``: the lowest loss of
      the last epoch and its three parts, without their weights;
    - ``student_loss``: the mean distillation loss of the last epoch.

    Args:
        epochs: Number of epochs.
        generator_steps: Steps of Adam per epoch, on the generator and the latent vectors.
        batch_size: Images per epoch, and per step of the student.
        latent: Numbers per latent vector.
        width: Factor of the generator's channels, at least 1/64. Half of them cost about a quarter
            of the time.
        generator_lr: The generator's learning rate.
        betas: Decays of the generator's Adam.
        bn_weight: Weight of the distance to the BatchNorm statistics.
        adv_weight: Weight of the disagreement.
        student_lr: The student's learning rate. The paper takes .001 after pre-training.
        momentum: The student's momentum, in [0, 1).
        temperature: Temperature of both distributions in the distillation.
        generator_crop: Pixels by which images are shifted at random while the generator learns.
        student_crop: The same while the student learns. The paper takes 4 on CIFAR.
        flip: Whether to mirror images at random, in both stages.
        precision: ``bf16-mixed`` runs the generator in bfloat16, which takes a third of the time on
            a CPU with AMX. The models see float32.
    """

    def __init__(
        self,
        epochs: int = 20,
        generator_steps: int = 30,
        batch_size: int = 256,
        latent: int = 256,
        width: float = 1.0,
        generator_lr: float = 0.001,
        betas: tuple[float, float] = (0.5, 0.999),
        bn_weight: float = 1.0,
        adv_weight: float = 0.5,
        student_lr: float = 0.01,
        momentum: float = 0.9,
        temperature: float = 20.0,
        generator_crop: int = 4,
        student_crop: int = 0,
        flip: bool = True,
        precision: Precision = "32-true",
    ) -> None:
        self.epochs = epochs
        self.generator_steps = generator_steps
        self.batch_size = batch_size
        self.latent = latent
        self.width = width
        self.generator_lr = generator_lr
        self.betas = betas
        self.bn_weight = bn_weight
        self.adv_weight = adv_weight
        self.student_lr = student_lr
        self.momentum = momentum
        self.temperature = temperature
        self.generator_crop = generator_crop
        self.student_crop = student_crop
        self.flip = flip
        self.precision = precision
        self._check_arguments()

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        mean, arrived, started = RunningMean(), list(updates), time.perf_counter()
        for update in arrived:
            mean.add(update.state, update.samples)

        # Dropout of the student draws from the global generators. They are restored at the end.
        with isolate_rng(), torch.enable_grad():
            seed_process(self.tools.seed, "dense", arrived[0].round)
            new = self._train(mean.mean(), arrived)
        self.metrics["server_seconds"] = time.perf_counter() - started
        return new

    def _train(self, mean: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the student's state at the best epoch, or at the last one without a score."""
        assert self.tools.module is not None  # configure has refused
        student = self.tools.module(mean)
        teacher = Ensemble(
            [self.tools.module(update.state) for update in updates],
            [float(update.samples) for update in updates],
        )
        if self.tools.score_module is not None:
            self.metrics["ensemble_accuracy"] = self.tools.score_module(teacher)

        own = dict(student.named_parameters())
        parameters = [own[name] for name in self.layout.parameters]
        optimizer = torch.optim.SGD(parameters, self.student_lr, self.momentum)
        draws = torch_generator(self.tools.seed, "dense", updates[0].round)
        images = ImageGenerator(self.latent, self.tools.shape, self.width).to(parameters[0].device)

        new, best, pool = mean, -1.0, torch.empty(0, *self.tools.shape, dtype=torch.uint8)
        for epoch in range(1, self.epochs + 1):
            pool = torch.cat([pool, self._invent(images, teacher, student, draws)])
            self._distil(student, teacher, optimizer, pool, draws)

            # A later epoch must be better, or come without a score.
            state = clone({name: student.state_dict()[name] for name in mean})
            accuracy = None if self.tools.score is None else self.tools.score(state)
            if accuracy is None or accuracy > best:
                new, best = state, -1.0 if accuracy is None else accuracy
                self.metrics["kept_epoch"] = float(epoch)
        return new

    def _invent(
        self,
        images: ImageGenerator,
        teacher: Ensemble,
        student: nn.Module,
        draws: torch.Generator,
    ) -> Tensor:
        """Return the images of the lowest loss of a new generator, uint8."""
        device = images.start.weight.device
        images.reset(draws)
        z = torch.randn(self.batch_size, self.latent, generator=draws).to(device).requires_grad_()
        labels = torch.randint(self.tools.outputs, (self.batch_size,), generator=draws).to(device)
        learned = [*images.parameters(), z]
        optimizer = torch.optim.Adam(learned, self.generator_lr, self.betas)

        student.eval()
        kept, lowest = torch.empty(0), torch.inf
        with batch_norm_distances(teacher) as distances:
            for _ in range(self.generator_steps):
                # The generator alone: it is most of the cost, and its images become bytes.
                with torch.autocast(device.type, torch.bfloat16, self.precision == "bf16-mixed"):
                    drawn = images(z).float()
                x = self._seen(drawn, self.generator_crop, draws)
                distances.clear()
                logits = teacher(x)
                parts = {
                    "ce": F.cross_entropy(logits, labels),
                    "bn": torch.stack(distances).sum() if distances else logits.new_zeros(()),
                    "adv": adversarial_loss(logits, student(x)),
                }
                loss = parts["ce"] + self.bn_weight * parts["bn"] + self.adv_weight * parts["adv"]
                if loss.item() < lowest or not len(kept):
                    kept, lowest = drawn.detach(), loss.item()
                    self.metrics["generator_loss"] = lowest
                    self.metrics |= {f"generator_{k}": part.item() for k, part in parts.items()}

                optimizer.zero_grad()
                loss.backward(inputs=learned)  # no gradients of the student's weights
                optimizer.step()
        return (kept * 255).round().to("cpu", torch.uint8)

    def _distil(
        self,
        student: nn.Module,
        teacher: Ensemble,
        optimizer: torch.optim.Optimizer,
        pool: Tensor,
        draws: torch.Generator,
    ) -> None:
        """Train the student by one pass over the pool."""
        student.train()
        device, losses = teacher.weights.device, []
        for rows in torch.randperm(len(pool), generator=draws).split(self.batch_size):
            x = self._seen(pool[rows].to(device) / 255, self.student_crop, draws)
            with torch.no_grad():
                logits = teacher(x)
            loss = distillation_loss(logits, student(x), self.temperature)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        student.eval()
        self.metrics["student_loss"] = sum(losses) / len(losses)

    def _seen(self, images: Tensor, crop: int, draws: torch.Generator) -> Tensor:
        """Return images as the models see them: shifted, mirrored and scaled as clients' data."""
        assert self.tools.to_inputs is not None  # configure has refused
        return self.tools.to_inputs(CropFlip(crop, self.flip)(images, draws))

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model.

        Refuse one without its logits, and data that no generator of images can stand in for.
        """
        super().configure(layout)
        if self.tools.module is None:
            raise self.tools.refusal("DENSE", "module", "needs the clients' models as an ensemble")
        if self.tools.to_inputs is None:
            raise self.tools.refusal("DENSE", "to_inputs", "invents images")
        if self.tools.task == "multilabel":
            raise FlsuiteError(
                "DENSE invents images of one class each, and this data has several labels per "
                "image; choose another aggregator"
            )
        if self.tools.score is None:
            reason = self.tools.refusal("DENSE", "score", "keeps the student of its last epoch")
            log.info("%s", reason)

    def _check_arguments(self) -> None:
        require_whole("DENSE", 1, epochs=self.epochs, generator_steps=self.generator_steps)
        # BatchNorm cannot train on one image.
        require_whole("DENSE", 2, batch_size=self.batch_size)
        require_whole("DENSE", 1, latent=self.latent)
        require_at_least("DENSE", 0, bn_weight=self.bn_weight, adv_weight=self.adv_weight)
        require_whole("DENSE", 0, generator_crop=self.generator_crop)
        require_whole("DENSE", 0, student_crop=self.student_crop)
        require_positive("DENSE", width=self.width, generator_lr=self.generator_lr)
        # A smaller generator would be that of the least width.
        require_at_least("DENSE", 1 / min(CHANNELS), width=self.width)
        require_positive("DENSE", student_lr=self.student_lr, temperature=self.temperature)
        require_below_one("DENSE", momentum=self.momentum)
        require_one_of("DENSE", get_args(Precision), precision=self.precision)
        for number, beta in enumerate(self.betas):
            require_below_one("DENSE", **{f"betas[{number}]": beta})
