"""FusedSpaceFed: a classifier that sees each image together with what a half private, half shared autoencoder makes of it.

Source: Di Cecco, Metta, Bianchi, Vegliò, Parton, "Enhanced Federated Learning Through Dual-Space Data Fusion", 2025.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from flsuite.data.spec import DataSpec
from flsuite.errors import FlsuiteError, require_at_least, require_one_of, require_positive
from flsuite.models.autoencoders import (
    SMALLEST,
    BottleneckDecoder,
    BottleneckEncoder,
    UNetDecoder,
    UNetEncoder,
)
from flsuite.models.backbones import Backbone, ResNet20
from flsuite.models.backbones.norms import Norm
from flsuite.models.base import ClientModel
from flsuite.models.classifier import class_probabilities, classification_loss
from flsuite.models.modes import evaluating

__all__ = ["FusedSpaceFed", "reconstruction_error"]

Autoencoder = Literal["unet", "bottleneck"]
Fusion = Literal["sum", "concat"]


def reconstruction_error(reconstruction: Tensor, x: Tensor) -> Tensor:
    """Mean squared error of each image, ``(n,)``, in float32 whatever the precision of the networks."""
    with torch.autocast(x.device.type, enabled=False):
        return (reconstruction.float() - x.float()).square().flatten(1).mean(1)


class FusedSpaceFed(ClientModel):
    """A private encoder E, a shared decoder D and a shared classifier C of ``x + D(E(x))`` (or of both, stacked).

    A fit begins with ``warmup_epochs`` epochs, beside the ones asked for, that re-align the encoder with the decoder it
    has just received: the loss is the reconstruction's alone, D and C stay as they are, BatchNorm statistics included.
    (A plain Trainer knows of no extra epochs: there the warm-up is the first ``warmup_epochs`` of those it runs.) Then
    the joint loss is ``lambda_rec MSE(x~, x) + CE(C(fuse(x, x~)), y) + lambda_sp ||E - E_0||^2``.

    With ``task_aware`` off, x~ is detached for C, and the reconstruction alone trains the autoencoder. The reference
    code then steps the autoencoder first and reconstructs again for C. One forward pass serves both here: the
    autoencoder takes the same step, and C sees the reconstruction from just before it.

    Images are meant to lie in [0, 1]: set ``data.standardize: false``.

    Args:
        autoencoder: ``bottleneck`` (the document) or ``unet`` (the reference code).
        fusion: ``sum``, or ``concat`` along the channels.
        fusion_scale: By what x~ is multiplied before it is fused; 1 in the document, 0 leaves C the plain image.
        latent_dim: Numbers in the bottleneck's latent, ``dz``; the U-Net has none.
        lambda_rec: Weight of the reconstruction in the joint loss.
        warmup_epochs: Epochs before the joint ones. 1 in the document, 2 in the reference runs.
        task_aware: Let the classification's gradients flow through x~ into the autoencoder. The reference does not.
        lambda_sp: Weight of L2-SP (Li et al. 2018, arXiv:1802.01483), which pulls E to its initial weights in the joint
            epochs; 1e-3 in the reference. A model read by ``load_from_checkpoint`` starts a new E_0.
        lr: SGD's learning rate of C.
        autoencoder_lr: Of E and D.
        momentum: Of both.
        weight_decay: Of both.
        norm: Of the autoencoder, and of the default classifier.
        backbone: C; default the pre-activation ResNet-20.

    Attributes:
        head: The prefix of C's entries in the state dict; gradient dissimilarity is measured on them.
    """

    private = ("encoder.",)
    head = "classifier."

    def __init__(
        self,
        autoencoder: Autoencoder = "bottleneck",
        fusion: Fusion = "sum",
        fusion_scale: float = 1.0,
        latent_dim: int = 16,
        lambda_rec: float = 1.0,
        warmup_epochs: int = 1,
        task_aware: bool = True,
        lambda_sp: float = 0.0,
        lr: float = 0.1,
        autoencoder_lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        norm: Norm = "batch",
        backbone: Backbone | None = None,
    ) -> None:
        super().__init__()
        own = "FusedSpaceFed"
        require_one_of(own, get_args(Autoencoder), autoencoder=autoencoder)
        require_one_of(own, get_args(Fusion), fusion=fusion)
        require_one_of(own, get_args(Norm), norm=norm)
        require_at_least(own, 1, latent_dim=latent_dim)
        require_at_least(
            own,
            0,
            warmup_epochs=warmup_epochs,
            fusion_scale=fusion_scale,
            lambda_rec=lambda_rec,
            lambda_sp=lambda_sp,
        )
        require_at_least(own, 0, momentum=momentum, weight_decay=weight_decay)
        require_positive(own, lr=lr, autoencoder_lr=autoencoder_lr)
        self.autoencoder: Autoencoder = autoencoder
        self.fusion: Fusion = fusion
        self.fusion_scale = fusion_scale
        self.latent_dim = latent_dim
        self.lambda_rec = lambda_rec
        self.warmup_epochs = self.extra_epochs = warmup_epochs
        self.task_aware = task_aware
        self.lambda_sp = lambda_sp
        self.lr = lr
        self.autoencoder_lr = autoencoder_lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.norm: Norm = norm
        self.backbone = backbone

    def build(self, spec: DataSpec) -> None:
        if len(spec.shape) != 3 or min(spec.shape[1:]) < SMALLEST:
            raise FlsuiteError(
                f"FusedSpaceFed reconstructs images (channels, height, width) of at least {SMALLEST} x {SMALLEST} pixels, "
                f"not data of shape {spec.shape}; choose an image dataset, or set data.resize"
            )
        channels, height, width = spec.shape
        self.encoder, self.decoder = self._autoencoder((channels, height, width))
        seen = channels if self.fusion == "sum" else 2 * channels
        self.classifier = (self.backbone or ResNet20(self.norm)).build(
            (seen, height, width), spec.num_classes
        )
        if self.lambda_sp:
            self.register_buffer(
                "initial_encoder", _flat(self.encoder).detach().clone(), persistent=False
            )

    def reconstruct(self, x: Tensor) -> Tensor:
        """x~, the shape of ``x``."""
        reconstruction: Tensor = self.decoder(self.encoder(x))
        return reconstruction

    def fuse(self, x: Tensor, reconstruction: Tensor) -> Tensor:
        """What C sees: ``(n, c, h, w)`` for ``sum``, ``(n, 2 c, h, w)`` for ``concat``."""
        scaled = reconstruction if self.fusion_scale == 1 else self.fusion_scale * reconstruction
        return x + scaled if self.fusion == "sum" else torch.cat([x, scaled.to(x.dtype)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(n, classes)``."""
        logits: Tensor = self.classifier(self.fuse(x, self.reconstruct(x)))
        return logits

    @property
    def warming_up(self) -> bool:
        """Whether this epoch is one of the warm-up."""
        return self.current_epoch < self.warmup_epochs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.warming_up:
            with _frozen(self.decoder):
                return reconstruction_error(self.reconstruct(x), x).mean()
        return self.joint_loss(x, y)

    def joint_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of the joint epochs, a scalar."""
        reconstruction = self.reconstruct(x)
        seen = reconstruction if self.task_aware else reconstruction.detach()
        loss = classification_loss(self.classifier(self.fuse(x, seen)), y).mean()
        loss = loss + self.lambda_rec * reconstruction_error(reconstruction, x).mean()
        return loss + self.lambda_sp * self.drift() if self.lambda_sp else loss

    def drift(self) -> Tensor:
        """``||E - E_0||^2``: how far the encoder has moved from its initial weights."""
        return (_flat(self.encoder).float() - self.get_buffer("initial_encoder")).square().sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """In the warm-up, no gradient of an algorithm's callback (a proximal term, a correction) may move D or C."""
        if self.warming_up:
            for parameter in (*self.decoder.parameters(), *self.classifier.parameters()):
                parameter.grad = None

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Beside ``loss`` (the classification's) and ``scores``, the ``reconstruction`` error ``(n,)``."""
        x, y = batch
        reconstruction = self.reconstruct(x)
        logits = self.classifier(self.fuse(x, reconstruction))
        return {
            "loss": classification_loss(logits, y),
            "scores": class_probabilities(logits, y),
            "reconstruction": reconstruction_error(reconstruction, x),
        }

    def classifier_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What C sees without the autoencoder (``x``, or ``[x, 0]`` for ``concat``), and what it sees with it."""
        plain = x if self.fusion == "sum" else self.fuse(x, torch.zeros_like(x))
        return plain, self.fuse(x, self.reconstruct(x))

    def head_losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean classification loss at the plain and at the fused input; gradients reach C only."""
        x, y = batch
        with torch.no_grad():
            plain, fused = self.classifier_inputs(x)
        return classification_loss(self.classifier(plain), y).mean(), classification_loss(
            self.classifier(fused), y
        ).mean()

    def pictures(self, x: Tensor) -> dict[str, Tensor]:
        """``reconstructions``: ``x``, x~ below it, and where they are summed, what C sees."""
        reconstruction = self.reconstruct(x).float()
        seen = (
            [self.fuse(x, reconstruction) / (1 + self.fusion_scale)] if self.fusion == "sum" else []
        )
        rows = [x, reconstruction, *seen]
        return {"reconstructions": torch.stack(rows)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One SGD with two learning rates."""
        autoencoder = [*self.encoder.parameters(), *self.decoder.parameters()]
        groups = [
            {"params": autoencoder, "lr": self.autoencoder_lr},
            {"params": list(self.classifier.parameters()), "lr": self.lr},
        ]
        return torch.optim.SGD(groups, momentum=self.momentum, weight_decay=self.weight_decay)

    def _autoencoder(self, shape: tuple[int, int, int]) -> tuple[nn.Module, nn.Module]:
        if self.autoencoder == "unet":
            return UNetEncoder(shape[0], self.norm), UNetDecoder(shape[0], self.norm)
        return (
            BottleneckEncoder(shape, self.latent_dim, self.norm),
            BottleneckDecoder(shape, self.latent_dim, self.norm),
        )


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Use a module without training it: no gradients for its parameters, no update of its statistics.

    Only the forward pass runs inside: autograd keeps what it has recorded, so that backward may follow outside.
    """
    gradients = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    module.requires_grad_(False)

    try:
        with evaluating(module):
            yield
    finally:
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.reshape(-1) for parameter in module.parameters()])
