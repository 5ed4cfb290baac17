"""NFClassifier: a classifier with a conditional normalizing flow that replays earlier classes.

Source: Wuerkaixi et al. 2024, "Accurate Forgetting for Heterogeneous Federated Continual Learning",
ICLR (AF-FCL).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F

import flsuite.models.flows as flows
from flsuite.common.arguments import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Share,
    at_least,
    check_init,
)
from flsuite.common.errors import FlsuiteError
from flsuite.data.federated import DataSpec
from flsuite.models.backbones.base import MLP, Backbone, StridedCNN
from flsuite.models.base import ClientModel, require_classes


class NFClassifier(ClientModel):
    """A feature extractor h_a, a head h_b, and a flow g of the features given the class.

    Take it for tasks in sequence, to replay earlier classes without samples.

    The flow models the density p_g(z | y) of ``z = h_a(x)``. One pass over a batch trains

    1. the flow, on ``-log p_g(h_a(x) | y) - k_flow_last log p_g(z' | y')``, with z' drawn from the
       previous task's flow;
    2. the hidden layer of h_b, on replay: the cross-entropy at samples of the flow, of classes that
       the client has met. Each sample is weighted by its
       :func:`~flsuite.models.flows.credibility`, and all of them by
       ``k_replay ((1 - theta) p + theta)``, with p the batch's mean density
       ``exp(log p_g / feature_dim)``;
    3. h_a and h_b, on cross-entropy and on distillation from two classifiers: the previous task's,
       and the one that the fit started with.

    It differs from the authors' code in three ways. Their code takes three steps per batch. It
    compares a sample's features with the Gaussian of the batch's codes, while this model compares
    codes with codes. It does not normalize features.

    Data with tasks (:class:`~flsuite.data.TaskSequence`) calls :meth:`begin_task`. The flow, the
    classifier and the classes of the previous task are the private entries ``previous.``. With one
    task, ``k_flow_last: 0`` and ``k_last: 0`` save every client the memory of a second model.

    Optimization is manual, with one Adam for the classifier and one for the flow. Each gradient is
    clipped by its norm, after an algorithm's callbacks have changed it. The trainer's
    ``gradient_clip_val``, ``accumulate_grad_batches``, ``max_steps`` and ``16-mixed`` are refused,
    and so is multi-label data. The flow and the credibility are computed in float32.

    Clients log, as means over the steps of a fit:

    - ``flow_nll``: the negative log-density, in nats per dimension;
    - ``density``: p;
    - ``credibility``: the mean weight of the generated samples;
    - ``replay``: their weighted cross-entropy;
    - ``gradient_norm`` and ``flow_gradient_norm``: the norms before clipping.

    Args:
        feature_dim: Dimension of z.
        couplings: Couplings of the flow.
        flow_width: Hidden units of the networks in the couplings.
        backbone: h_a up to its last ReLU. Default: :class:`~flsuite.models.backbones.StridedCNN`
            for images and an MLP for tables. ``ResNet18`` suits color images.
        lr: Adam's learning rate for h_a and h_b.
        flow_lr: Adam's learning rate for the flow.
        k_replay: Weight of the replay. 0 turns it off.
        k_flow_last: Weight of the previous flow's samples.
        theta: Mix of two replay weights, in [0, 1]. 1 replays at full weight, and 0 scales the
            replay by the batch's density.
        k_last: Weight of distillation from the previous task's classifier.
        k_global: Weight of distillation from the global classifier, with which the fit starts.
        k_feature: Weight of the features' mean squared distance in both distillations.
        k_output: Weight of the outputs' cross-entropy at temperature 2 in both distillations.
        clip: Maximum norm of a gradient. 0 turns clipping off.
        replay_classes: ``all`` replays the classes that any client has met, like the authors' code,
            if the data has tasks. A client then also learns classes without own samples, from the
            global flow. ``own`` replays only this client's classes.
        normalize_features: Whether to normalize each sample's features to mean 0 and variance 1.
            Otherwise the flow has to follow the scale of features that are still changing.
    """

    private = ("previous.",)
    training_only = ("previous.",)
    parameter_groups = {"flow": ("flow.",)}

    def __init__(
        self,
        feature_dim: Annotated[int, at_least(2)] = 512,
        couplings: PositiveInt = 4,
        flow_width: PositiveInt = 512,
        backbone: Backbone | None = None,
        lr: PositiveFloat = 1e-4,
        flow_lr: PositiveFloat = 1e-3,
        k_replay: NonNegativeFloat = 0.1,
        k_flow_last: NonNegativeFloat = 0.1,
        theta: Share = 0.1,
        k_last: NonNegativeFloat = 0.2,
        k_global: NonNegativeFloat = 0.0,
        k_feature: NonNegativeFloat = 0.5,
        k_output: NonNegativeFloat = 0.1,
        clip: NonNegativeFloat = 1.0,
        replay_classes: Literal["all", "own"] = "all",
        normalize_features: bool = True,
    ) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.couplings = couplings
        self.flow_width = flow_width
        self.backbone = backbone
        self.lr = lr
        self.flow_lr = flow_lr
        self.k_replay = k_replay
        self.k_flow_last = k_flow_last
        self.theta = theta
        self.k_last = k_last
        self.k_global = k_global
        self.k_feature = k_feature
        self.k_output = k_output
        self.clip = clip
        self.replay_classes = replay_classes
        self.normalize_features = normalize_features
        check_init(self, NFClassifier)

        self.automatic_optimization = False
        self._others_met: Tensor | None = None
        # A tuple, because a module as an attribute would become part of the state.
        self._received: tuple[nn.Module, nn.Module] | None = None
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def build(self, spec: DataSpec) -> None:
        require_classes("NFClassifier", spec, one_per_sample=True)

        backbone = self.backbone or (StridedCNN() if len(spec.shape) == 3 else MLP())
        # Without affine parameters, so the features keep their scale.
        features: list[nn.Module] = [backbone.build(spec.shape, self.feature_dim), nn.LeakyReLU()]
        if self.normalize_features:
            features.append(nn.LayerNorm(self.feature_dim, elementwise_affine=False))
        self.extractor = nn.Sequential(*features)

        self.head = _Head(self.feature_dim, spec.num_classes)
        self.flow = flows.ConditionalFlow(
            self.feature_dim, spec.num_classes, self.couplings, self.flow_width
        )
        # With weight 0, a copy is never read and would only cost memory at every client.
        kept: dict[str, nn.Module] = {"flow": self.flow} if self.k_flow_last else {}
        if self.k_last:
            kept |= {"extractor": self.extractor, "head": self.head}
        self.previous = flows.Previous(spec.num_classes, kept)

    def features(self, x: Tensor) -> Tensor:
        """Return z, ``(n, feature_dim)``."""
        return self.extractor(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(n, classes)``."""
        return self.head(self.features(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Take one step of both optimizers.

        The return value is the loss of the classifier.
        """
        x, y = batch
        self.previous.meet(y)
        z = self.features(x)
        logits = self.head(z)

        # The flow learns the features' density without affecting the features.
        codes, log_density = self.flow.density(z.detach(), y)
        flow_loss = -log_density.mean() + self.rehearsal_loss(len(y))

        # Replay must not train the flow, which would fit the density to the classifier.
        loss = F.cross_entropy(logits.float(), y) + self.distillation_loss(x, z, logits)
        if self.k_replay:
            loss = loss + self.replay_loss(codes.detach(), log_density.detach(), y)

        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        # One backward pass for both, because the graphs share no parameters.
        self.manual_backward(loss + flow_loss)
        for optimizer in optimizers:
            optimizer.step()

        self._note("flow_nll", -log_density.mean() / self.feature_dim)
        self._steps += 1
        return loss.detach()

    def rehearsal_loss(self, n: int) -> Tensor | float:
        """Return the weighted flow loss at n samples of the previous flow, or 0 without one."""
        if not self.k_flow_last or not self.previous.classes:
            return 0.0

        # The previous flow only samples. The gradient comes from the current flow's density.
        with torch.no_grad():
            flow: Any = self.previous.get_submodule("flow")
            y = flows.draw_classes(self.previous.past, n)
            z = flow.generate(torch.randn(n, self.feature_dim, device=y.device), y)
        return -self.k_flow_last * self.flow.density(z, y)[1].mean()

    def replay_loss(self, codes: Tensor, log_density: Tensor, y: Tensor) -> Tensor:
        """Return the weighted replay loss.

        Args:
            codes: Codes of the batch, ``(n, feature_dim)``.
            log_density: Log-densities of the batch's features, in nats ``(n,)``.
            y: Classes of the batch, ``(n,)``.
        """
        with torch.no_grad():
            # Per dimension, because the density of hundreds of numbers under- or overflows.
            density = (log_density / self.feature_dim).exp().mean()
            classes = flows.draw_classes(self._replayed(), len(y))
            # A sample's code is the noise that it is generated from, so comparing codes needs no
            # inverse of the flow.
            drawn = torch.randn_like(codes)
            z = self.flow.generate(drawn, classes)
            weights = flows.credibility(codes, y, drawn, classes, density)

        logits = self.head.hidden_only(z).float()
        loss = (weights * F.cross_entropy(logits, classes, reduction="none")).mean()
        self._note("density", density)
        self._note("credibility", weights.mean())
        self._note("replay", loss)
        return self.k_replay * ((1 - self.theta) * density + self.theta) * loss

    def distillation_loss(self, x: Tensor, z: Tensor, logits: Tensor) -> Tensor | float:
        """Return the weighted distance to the previous task's and the fit's initial classifier.

        It is 0 if there is neither.
        """
        teachers: list[tuple[float, nn.Module, nn.Module]] = []
        if self.k_last and self.previous.tasks:
            last = self.previous.get_submodule("extractor"), self.previous.get_submodule("head")
            teachers.append((self.k_last, *last))
        if self._received is not None:
            teachers.append((self.k_global, *self._received))

        loss: Tensor | float = 0.0
        for weight, extractor, head in teachers:
            # The teacher receives the student's batch, with the same augmentation.
            with torch.no_grad():
                teacher_z = extractor(x)
                teacher_logits = head(teacher_z)
            feature = (z.float() - teacher_z.float()).square().mean()
            output = flows.soft_cross_entropy(logits, teacher_logits)
            loss = loss + weight * (self.k_feature * feature + self.k_output * output)
        return loss

    def begin_task(self, task: int, seen: Sequence[int] = (), past: Sequence[int] = ()) -> None:
        """Keep the flow and the classifier that the first fit of a task starts from.

        They are kept until the next task. A client starts in task 0.

        Raises:
            FlsuiteError: If the task or a class does not exist.
        """
        self._check_task(task, (*seen, *past))
        others = self.replay_classes == "all"
        self._others_met = torch.zeros_like(self.previous.met)
        self._others_met[list(seen) if others else []] = 1

        # Later fits of the task keep the modules of its first fit.
        if task != int(self.previous.task):
            self.previous.take(task, past if others else (), self)

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return ``loss``, ``scores``, and ``nll``: ``-log p_g(z | y) / feature_dim``, in nats.

        Only ``loss`` and ``nll`` depend on the label.
        """
        x, y = batch
        z = self.features(x)
        logits = self.head(z).float()
        return {
            "loss": F.cross_entropy(logits, y, reduction="none"),
            "scores": logits.softmax(1),
            "nll": -self.flow.density(z, y)[1] / self.feature_dim,
        }

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``log p_g(h_a(x) | y)`` in nats, float32 ``(n,)``, with gradients for the flow."""
        x, y = batch
        # The likelihood is the flow's, so the features are constants.
        with torch.no_grad():
            z = self.features(x)
        return self.flow.density(z, y)[1]

    def sampled_logits(self, y: Tensor) -> Tensor:
        """Classify one sample of the flow for each class of y ``(n,)``.

        Returns logits ``(n, classes)``.
        """
        u = torch.randn(len(y), self.feature_dim, device=y.device)
        return self.head(self.flow.generate(u, y)).float()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        # Without ``previous``, whose parameters are never trained.
        classifier = [*self.extractor.parameters(), *self.head.parameters()]
        # Fused, so one kernel updates all parameters of an optimizer.
        return [
            torch.optim.Adam(classifier, lr=self.lr, fused=True),
            torch.optim.Adam(self.flow.parameters(), lr=self.flow_lr, fused=True),
        ]

    def on_train_start(self) -> None:
        self._sums, self._steps = {}, 0
        self.previous.look()
        # Set here, because Lightning warns about modules in evaluation mode at the start.
        self.previous.eval()
        if self.k_global:
            self._received = flows.frozen_copy(self.extractor), flows.frozen_copy(self.head)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient after callbacks have changed it.

        A non-finite gradient is not repaired, so the update is refused on arrival.
        """
        parameters = optimizer.param_groups[0]["params"]
        # An infinite bound leaves the gradient unchanged, but still returns the norm to log.
        norm = nn.utils.clip_grad_norm_(parameters, self.clip or float("inf"))
        of_flow = parameters[0] is next(self.flow.parameters())
        self._note("flow_gradient_norm" if of_flow else "gradient_norm", norm)

    def on_train_epoch_end(self) -> None:
        self.log_dict({name: total / self._steps for name, total in self._sums.items()})

    def on_train_end(self) -> None:
        self.previous.train()
        # Free the memory of two networks, which are needed only during training.
        self._received = None

    def configure_callbacks(self) -> Sequence[Callback]:
        """Refuse trainer settings that are incompatible with manual optimization.

        It adds no callback. This is the first hook with a trainer. Lightning's own checks come
        later and do not name the remedy.
        """
        trainer, reason = self.trainer, ""
        if clip := trainer.gradient_clip_val:
            reason = (
                f"clips the gradients of its two optimizers itself: set model.clip to {clip} and "
                "leave trainer.gradient_clip_val unset"
            )
        elif trainer.accumulate_grad_batches != 1:
            reason = "takes one step per batch: leave trainer.accumulate_grad_batches unset"
        elif trainer.max_steps != -1:
            reason = (
                "has two optimizers, but trainer.max_steps counts the steps of both: limit "
                "trainer.max_epochs"
            )
        elif getattr(trainer.precision_plugin, "scaler", None) is not None:
            reason = (
                "cannot clip gradients that 16-mixed has scaled: set trainer.precision to "
                "bf16-mixed or 32-true"
            )
        if reason:
            raise FlsuiteError(f"NFClassifier {reason}")
        return []

    def _replayed(self) -> Tensor:
        """Return the classes to replay, uint8 ``(classes,)``."""
        met = self.previous.met
        if self._others_met is None:
            return met
        return met | self._others_met.to(met.device)  # stored before the fit moved the module

    def _note(self, name: str, value: Tensor) -> None:
        """Add a step's value to the logged sums."""
        # On the device, because reading a number per step would synchronize.
        value = value.detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()

    def _check_task(self, task: int, classes: Sequence[int]) -> None:
        count = len(self.previous.met)
        if unknown := [c for c in classes if not 0 <= c < count]:
            raise FlsuiteError(
                f"NFClassifier: there is no class {unknown[0]}; there are {count} classes"
            )
        if task < 0:
            raise FlsuiteError(f"NFClassifier: there is no task {task}")


class _Head(nn.Module):
    """h_b: features to hidden features to logits."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.output = nn.Linear(features, classes)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits ``(n, classes)``."""
        return self.output(F.leaky_relu(self.hidden(z)))

    def hidden_only(self, z: Tensor) -> Tensor:
        """Return the same logits, with gradients only for the hidden layer."""
        return F.linear(
            F.leaky_relu(self.hidden(z)), self.output.weight.detach(), self.output.bias.detach()
        )
