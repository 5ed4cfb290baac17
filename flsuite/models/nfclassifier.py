"""NFClassifier: a classifier, and a conditional normalizing flow of its features that keeps earlier classes in its mind.

Source: Wuerkaixi, Cui, Zhang, Yan, Han, Niu, Fang, Zhang, Sugiyama, "Accurate Forgetting for Heterogeneous Federated
Continual Learning", ICLR 2024 (AF-FCL).
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.data.spec import DataSpec
from flsuite.errors import FlsuiteError, require_at_least, require_one_of, require_positive
from flsuite.models.backbones import MLP, Backbone, StridedCNN
from flsuite.models.base import ClientModel
from flsuite.models.flows import ConditionalFlow
from flsuite.models.replay import (
    Previous,
    credibility,
    draw_classes,
    frozen_copy,
    soft_cross_entropy,
)

__all__ = ["NFClassifier"]

ReplayClasses = Literal["all", "own"]


class NFClassifier(ClientModel):
    """A feature extractor h_a, a head h_b, and a flow g: the density p_g(z | y) of features ``z = h_a(x)`` given the class.

    A step trains, from one pass over a batch (the public code takes three steps, one after the other):

    1. the flow, on ``-log p_g(h_a(x) | y) - k_flow_last log p_g(z' | y')``, with z' drawn from the flow of the previous task;
    2. the hidden layer of h_b, on replay: cross-entropy at samples of the flow, of classes that the client has met, each
       weighed by its :func:`credibility`, and all by ``k_replay ((1 - theta) p + theta)``, p the batch's mean density
       ``exp(log p_g / feature_dim)``;
    3. h_a and h_b, on cross-entropy, plus distillation of features (mean squared distance) and outputs (cross-entropy at
       temperature 2) from the classifier of the previous task, and from the one that the fit started with.

    The public code compares a sample's features with the Gaussian of the batch's codes; here codes are compared with codes.

    A new task begins with :meth:`begin_task`, which data with tasks (:class:`~flsuite.data.TaskSequence`) brings about. What is
    kept from the one before (flow, classifier, which classes) are entries ``previous.`` of the state, private. With one task
    there is no previous one, and this is ordinary federated learning: then ``k_flow_last: 0`` and ``k_last: 0`` save every
    client the memory of a second model.

    Optimisation is manual: two Adams, the gradient of each clipped by its norm at ``clip``, after what an algorithm's callbacks
    add to it. ``trainer.gradient_clip_val``, ``accumulate_grad_batches`` and ``16-mixed`` are refused. The flow is float32.

    Logged by clients, as means over the steps of a fit: ``flow_nll``, nats per dimension; ``density``, p; ``credibility``;
    ``replay``, its weighted loss; ``gradient_norm`` and ``flow_gradient_norm``, before clipping. Multi-label data is refused.

    Args:
        feature_dim: Numbers in z.
        couplings: Of the flow.
        flow_width: Hidden units of the networks in its couplings.
        backbone: h_a, up to its last ReLU; default :class:`~flsuite.models.backbones.StridedCNN`, for tables an MLP.
            ``ResNet18`` for colour images.
        lr: Adam's learning rate of h_a and h_b.
        flow_lr: Of the flow.
        k_replay: Weight of the replay; 0 leaves it out.
        k_flow_last: Weight of the previous flow's samples.
        theta: In [0, 1]. 1: replay whatever the flow makes of the batch; 0: only as far as the flow knows it.
        k_last: Weight of distillation from the previous task's classifier.
        k_global: Weight of distillation from the classifier that the fit started with: the global one.
        k_feature: Weight of features in both.
        k_output: Weight of outputs in both.
        clip: Largest norm of a gradient; 0 for any.
        replay_classes: ``all`` replays and rehearses the classes that any client has met, as far as the data tells of others'
            (in tasks; then a client learns of classes it has no sample of, from the global flow), as the public code does;
            ``own`` those of this client.
        normalize_features: Bring each sample's features to mean 0 and variance 1. The public code does not; but while the
            extractor learns, the scale of its features moves, and a flow that has to follow it learns little else: on
            Fashion-MNIST the head puts 41 % of the samples of a flow trained for 600 steps without it into their class, and
            76 % after 400 steps with it (95 % after 300 with a ``flow_lr`` of 3e-3).
    """

    private = ("previous.",)
    training_only = ("previous.",)
    parameter_groups = {"flow": ("flow.",)}

    def __init__(
        self,
        feature_dim: int = 512,
        couplings: int = 4,
        flow_width: int = 512,
        backbone: Backbone | None = None,
        lr: float = 1e-4,
        flow_lr: float = 1e-3,
        k_replay: float = 0.1,
        k_flow_last: float = 0.1,
        theta: float = 0.1,
        k_last: float = 0.2,
        k_global: float = 0.0,
        k_feature: float = 0.5,
        k_output: float = 0.1,
        clip: float = 1.0,
        replay_classes: ReplayClasses = "all",
        normalize_features: bool = True,
    ) -> None:
        super().__init__()
        own = "NFClassifier"
        require_at_least(own, 2, feature_dim=feature_dim)
        require_at_least(own, 1, couplings=couplings, flow_width=flow_width)
        require_at_least(
            own, 0, k_replay=k_replay, k_flow_last=k_flow_last, k_last=k_last, k_global=k_global
        )
        require_at_least(own, 0, k_feature=k_feature, k_output=k_output, clip=clip)
        require_one_of(own, get_args(ReplayClasses), replay_classes=replay_classes)
        require_positive(own, lr=lr, flow_lr=flow_lr)
        if not 0 <= theta <= 1:
            raise FlsuiteError(f"NFClassifier: theta must be in [0, 1], got {theta}")
        self.automatic_optimization = False
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
        self.replay_classes: ReplayClasses = replay_classes
        self.normalize_features = normalize_features
        self._sums: dict[str, Tensor] = {}
        self._steps = 0
        self._told: Tensor | None = None  # the classes that other clients have met
        self._received: tuple[nn.Module, nn.Module] | None = (
            None  # a tuple, so that it is no part of the state
        )

    def build(self, spec: DataSpec) -> None:
        if spec.task == "multilabel":
            raise FlsuiteError(
                "NFClassifier's flow knows one class a sample, and multi-label data has several: choose other"
            )
        backbone = self.backbone or (StridedCNN() if len(spec.shape) == 3 else MLP())
        features: list[nn.Module] = [backbone.build(spec.shape, self.feature_dim), nn.LeakyReLU()]
        if self.normalize_features:
            features.append(nn.LayerNorm(self.feature_dim, elementwise_affine=False))
        self.extractor = nn.Sequential(*features)
        self.head = _Head(self.feature_dim, spec.num_classes)
        self.flow = ConditionalFlow(
            self.feature_dim, spec.num_classes, self.couplings, self.flow_width
        )
        self.previous = Previous(
            spec.num_classes,
            {"flow": self.flow} if self.k_flow_last else {},
            {"extractor": self.extractor, "head": self.head} if self.k_last else {},
        )

    def begin_task(self, task: int, seen: Sequence[int] = (), past: Sequence[int] = ()) -> None:
        """At a client's first fit in a task, keeps flow and classifier as they are now, that is, as the fit is about to start
        from them, for the tasks to come. Task 0 is the one that a client is in from the start.

        Raises:
            FlsuiteError: If there is no such task or class.
        """
        classes = len(self.previous.met)
        for c in (*seen, *past):
            if not 0 <= c < classes:
                raise FlsuiteError(
                    f"NFClassifier: there is no class {c}; there are {classes} classes"
                )
        if task < 0:
            raise FlsuiteError(f"NFClassifier: there is no task {task}")
        others = self.replay_classes == "all"
        self._told = torch.zeros_like(self.previous.met)
        self._told[list(seen) if others else []] = 1
        if task != int(self.previous.task):
            modules: dict[str, nn.Module] = {
                "flow": self.flow,
                "extractor": self.extractor,
                "head": self.head,
            }
            self.previous.take(task, past if others else (), modules)

    def features(self, x: Tensor) -> Tensor:
        """z, ``(n, feature_dim)``."""
        z: Tensor = self.extractor(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, classes)``."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """``log p_g(h_a(x) | y)`` ``(n,)``, in nats, float32; gradients reach the flow only."""
        x, y = batch
        with torch.no_grad():
            z = self.features(x)
        return self.flow.density(z, y)[1]

    def sampled_logits(self, y: Tensor) -> Tensor:
        """Logits ``(n, classes)`` at one sample of the flow for each class of y ``(n,)``."""
        logits: Tensor = self.head(
            self.flow.generate(torch.randn(len(y), self.feature_dim, device=y.device), y)
        )
        return logits.float()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The classifier's loss; the flow's is logged."""
        x, y = batch
        self.previous.meet(y)
        z = self.features(x)
        logits = self.head(z)
        codes, log_density = self.flow.density(z.detach(), y)
        flow_loss = -log_density.mean() + self.rehearsal_loss(len(y))
        loss = F.cross_entropy(logits.float(), y) + self.distillation_loss(x, z, logits)
        if self.k_replay:
            loss = loss + self.replay_loss(codes.detach(), log_density.detach(), y)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss + flow_loss)  # two graphs without a common parameter
        for optimizer in optimizers:
            optimizer.step()
        self._note("flow_nll", -log_density.mean() / self.feature_dim)
        self._steps += 1
        return loss.detach()

    def rehearsal_loss(self, n: int) -> Tensor | float:
        """``-k_flow_last log p_g(z' | y')`` at n samples of the previous flow; 0 where there is none."""
        if not self.k_flow_last or not self.previous.classes:
            return 0.0
        with torch.no_grad():
            flow: Any = self.previous.get_submodule("flow")
            y = draw_classes(self.previous.past, n)
            z = flow.generate(torch.randn(n, self.feature_dim, device=y.device), y)
        return -self.k_flow_last * self.flow.density(z, y)[1].mean()

    def replay_loss(self, codes: Tensor, log_density: Tensor, y: Tensor) -> Tensor:
        """Step 2, from the batch's codes ``(n, feature_dim)``, their log-densities and classes ``(n,)``."""
        with torch.no_grad():
            density = (log_density / self.feature_dim).exp().mean()
            met = self.previous.met
            replayed = (
                met if self._told is None else met | self._told.to(met.device)
            )  # told before the fit moved the module
            classes = draw_classes(replayed, len(y))
            drawn = torch.randn_like(codes)
            z = self.flow.generate(drawn, classes)
            weights = credibility(codes, y, drawn, classes, density)
        losses = F.cross_entropy(self.head.hidden_only(z).float(), classes, reduction="none")
        loss = (weights * losses).mean()
        for name, value in (
            ("density", density),
            ("credibility", weights.mean()),
            ("replay", loss),
        ):
            self._note(name, value)
        return self.k_replay * ((1 - self.theta) * density + self.theta) * loss

    def distillation_loss(self, x: Tensor, z: Tensor, logits: Tensor) -> Tensor | float:
        """From the classifier of the previous task, and from the one that the fit started with; 0 where there are none."""
        teachers: list[tuple[float, nn.Module, nn.Module]] = []
        if self.k_last and self.previous.tasks:
            last = self.previous.get_submodule("extractor"), self.previous.get_submodule("head")
            teachers.append((self.k_last, *last))
        if self._received is not None:
            teachers.append((self.k_global, *self._received))
        loss: Tensor | float = 0.0
        for weight, extractor, head in teachers:
            with torch.no_grad():
                wanted = extractor(x)
                outputs = head(wanted)
            features = (z.float() - wanted.float()).square().mean()
            loss = loss + weight * (
                self.k_feature * features + self.k_output * soft_cross_entropy(logits, outputs)
            )
        return loss

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Beside ``loss`` and ``scores``, which know no label: ``nll`` ``(n,)``, ``-log p_g(z | y) / feature_dim`` in nats."""
        x, y = batch
        z = self.features(x)
        logits = self.head(z).float()
        return {
            "loss": F.cross_entropy(logits, y, reduction="none"),
            "scores": logits.softmax(1),
            "nll": -self.flow.density(z, y)[1] / self.feature_dim,
        }

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        classifier = [*self.extractor.parameters(), *self.head.parameters()]
        flow = self.flow.parameters()
        return [
            torch.optim.Adam(classifier, lr=self.lr, fused=True),
            torch.optim.Adam(flow, lr=self.flow_lr, fused=True),
        ]

    def configure_callbacks(self) -> Sequence[Callback]:
        """None; the first moment at which a Trainer can be told what it must not do, before it says so in its own words."""
        if self.trainer.gradient_clip_val:
            raise FlsuiteError(
                f"NFClassifier clips the gradients of its two optimizers itself: set model.clip to "
                f"{self.trainer.gradient_clip_val} and leave trainer.gradient_clip_val unset"
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise FlsuiteError(
                "NFClassifier steps once a batch: leave trainer.accumulate_grad_batches unset"
            )
        if self.trainer.max_steps != -1:
            raise FlsuiteError(
                "NFClassifier has two optimizers, and trainer.max_steps counts both: limit trainer.max_epochs"
            )
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            raise FlsuiteError(
                "NFClassifier clips gradients that 16-mixed has scaled: set trainer.precision to bf16-mixed"
            )
        return []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, after what callbacks have added to the gradient; one that is not finite makes the update so, for all to see."""
        parameters = optimizer.param_groups[0]["params"]
        norm = nn.utils.clip_grad_norm_(parameters, self.clip or float("inf"))
        self._note(
            "flow_gradient_norm"
            if parameters[0] is next(self.flow.parameters())
            else "gradient_norm",
            norm,
        )

    def on_train_start(self) -> None:
        self._sums, self._steps = {}, 0
        self.previous.look()
        self.previous.eval()  # as long as the fit lasts: Lightning warns of modules that a fit finds so
        if self.k_global:
            self._received = frozen_copy(self.extractor), frozen_copy(self.head)

    def on_train_epoch_end(self) -> None:
        self.log_dict({name: total / self._steps for name, total in self._sums.items()})

    def on_train_end(self) -> None:
        self.previous.train()
        self._received = None

    def _note(self, name: str, value: Tensor) -> None:
        self._sums[name] = (
            self._sums[name] + value.detach() if name in self._sums else value.detach().clone()
        )


class _Head(nn.Module):
    """h_b: features to features to logits."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.output = nn.Linear(features, classes)

    def forward(self, z: Tensor) -> Tensor:
        logits: Tensor = self.output(F.leaky_relu(self.hidden(z)))
        return logits

    def hidden_only(self, z: Tensor) -> Tensor:
        """The same logits; gradients reach the hidden layer only."""
        return F.linear(
            F.leaky_relu(self.hidden(z)), self.output.weight.detach(), self.output.bias.detach()
        )
