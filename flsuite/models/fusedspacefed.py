"""FusedSpaceFed: a classifier of images fused with their reconstructions.

Source: Di Cecco, Metta, Bianchi, Vegliò, Parton 2025, "Enhanced Federated Learning Through
Dual-Space Data Fusion".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from flsuite.common.arguments import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_init,
)
from flsuite.common.errors import FlsuiteError
from flsuite.data.federated import DataSpec
from flsuite.models.autoencoders import (
    SMALLEST,
    BottleneckDecoder,
    BottleneckEncoder,
    UNetDecoder,
    UNetEncoder,
)
from flsuite.models.backbones.base import Backbone, Norm
from flsuite.models.backbones.resnets import ResNet20
from flsuite.models.base import ClientModel, require_classes
from flsuite.models.classifier import class_probabilities, classification_loss
from flsuite.models.modes import evaluating


def reconstruction_error(reconstruction: Tensor, x: Tensor) -> Tensor:
    """Return the mean squared error of each image, ``(n,)``, in float32 at any precision."""
    # bfloat16 has too few digits for a mean of small squares.
    with torch.autocast(x.device.type, enabled=False):
        return (reconstruction.float() - x.float()).square().flatten(1).mean(1)


class FusedSpaceFed(ClientModel):
    """A private encoder E, a shared decoder D, and a shared classifier C of x and ``x~ = D(E(x))``.

    Take it for images of different scanners, with an encoder that stays private.

    A fit begins with ``warmup_epochs`` extra epochs that re-align the encoder with the newly
    received decoder. Their loss is the reconstruction error alone, and D and C do not change,
    including BatchNorm statistics. The loss of the following epochs, the joint loss, is
    ``lambda_rec MSE(x~, x) + CE(C(fuse(x, x~)), y) + lambda_sp ||E - E_0||^2``. A plain Trainer has
    no extra epochs, so the warm-up is the first ``warmup_epochs`` of its own.

    With ``task_aware`` off, x~ is detached for C, and only the reconstruction error trains the
    autoencoder. The reference code then steps the autoencoder first and reconstructs again for C.
    Here, one forward pass serves both. The autoencoder takes the same step, but C receives the
    reconstruction from before that step.

    Images must be in [0, 1]: set ``data.standardize: false``.

    Args:
        autoencoder: ``bottleneck`` (the paper) or ``unet`` (the reference code).
        fusion: ``sum``, or ``concat`` along the channels.
        fusion_scale: Factor of x~ in the fusion, 1 in the paper. With 0, C receives the plain
            image.
        latent_dim: Dimension of the bottleneck's latent, ``dz``. The U-Net has none.
        lambda_rec: Weight of the reconstruction error in the joint loss.
        warmup_epochs: Epochs before the joint ones, 1 in the paper and 2 in the reference runs.
        task_aware: Whether the classification's gradients reach the autoencoder through x~. In the
            reference code they do not.
        lambda_sp: Weight of L2-SP (Li et al. 2018, arXiv:1802.01483), which pulls E to its initial
            weights in the joint epochs. It is 1e-3 in the reference code. A model loaded by
            ``load_from_checkpoint`` has another E_0: the weights that it is built with.
        lr: SGD's learning rate for C.
        autoencoder_lr: SGD's learning rate for E and D.
        momentum: SGD's momentum for all three.
        weight_decay: SGD's weight decay for all three.
        norm: Normalization of the autoencoder and of the default classifier.
        backbone: C. Default: the pre-activation ResNet-20.

    Attributes:
        head: Prefix of C's entries in the state dict, for gradient dissimilarity.
    """

    private = ("encoder.",)
    head = "classifier."

    def __init__(
        self,
        autoencoder: Literal["unet", "bottleneck"] = "bottleneck",
        fusion: Literal["sum", "concat"] = "sum",
        fusion_scale: NonNegativeFloat = 1.0,
        latent_dim: PositiveInt = 16,
        lambda_rec: NonNegativeFloat = 1.0,
        warmup_epochs: NonNegativeInt = 1,
        task_aware: bool = True,
        lambda_sp: NonNegativeFloat = 0.0,
        lr: PositiveFloat = 0.1,
        autoencoder_lr: PositiveFloat = 0.01,
        momentum: NonNegativeFloat = 0.9,
        weight_decay: NonNegativeFloat = 5e-4,
        norm: Norm = "batch",
        backbone: Backbone | None = None,
    ) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        self.fusion = fusion
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
        self.norm = norm
        self.backbone = backbone
        check_init(self, FusedSpaceFed)

    def build(self, spec: DataSpec) -> None:
        require_classes("FusedSpaceFed", spec)
        if len(spec.shape) != 3 or min(spec.shape[1:]) < SMALLEST:
            raise FlsuiteError(
                f"FusedSpaceFed reconstructs images (channels, height, width) of at least "
                f"{SMALLEST} x {SMALLEST} pixels, not data of shape {spec.shape}; "
                "choose an image dataset, or set data.resize"
            )

        channels, height, width = spec.shape
        self.encoder, self.decoder = self._autoencoder(spec.shape)
        seen = channels if self.fusion == "sum" else 2 * channels
        self.classifier = (self.backbone or ResNet20(self.norm)).build(
            (seen, height, width), spec.num_classes
        )

        if self.lambda_sp:
            # Not persistent, because E_0 must not be sent or averaged.
            self.register_buffer(
                "initial_encoder", _flat(self.encoder).detach().clone(), persistent=False
            )

    def reconstruct(self, x: Tensor) -> Tensor:
        """Return x~, in the shape of ``x``."""
        return self.decoder(self.encoder(x))

    def fuse(self, x: Tensor, reconstruction: Tensor) -> Tensor:
        """Return C's input: ``(n, c, h, w)`` for ``sum``, ``(n, 2 c, h, w)`` for ``concat``."""
        # Skip a factor of 1, which would cost a copy of the images.
        scaled = reconstruction if self.fusion_scale == 1 else self.fusion_scale * reconstruction
        return x + scaled if self.fusion == "sum" else torch.cat([x, scaled.to(x.dtype)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(n, classes)``."""
        return self.classifier(self.fuse(x, self.reconstruct(x)))

    @property
    def warming_up(self) -> bool:
        """Return whether this epoch is one of the warm-up."""
        return self.current_epoch < self.warmup_epochs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the reconstruction error in the warm-up, and the joint loss afterwards."""
        x, y = batch
        if self.warming_up:
            # D and C are new from the server, so only E must adapt.
            with _frozen(self.decoder):
                return reconstruction_error(self.reconstruct(x), x).mean()
        return self.joint_loss(x, y)

    def joint_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the joint epochs, a scalar."""
        reconstruction = self.reconstruct(x)
        # Detached for C only, because the reconstruction error always trains E and D.
        seen = reconstruction if self.task_aware else reconstruction.detach()
        loss = classification_loss(self.classifier(self.fuse(x, seen)), y).mean()
        loss = loss + self.lambda_rec * reconstruction_error(reconstruction, x).mean()
        return loss + self.lambda_sp * self.drift() if self.lambda_sp else loss

    def drift(self) -> Tensor:
        """Return ``||E - E_0||^2``, the squared distance of the encoder to its initial weights."""
        # float32, because squares of small differences vanish in half precision.
        return (_flat(self.encoder).float() - self.get_buffer("initial_encoder")).square().sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients of D and C in the warm-up.

        They come from an algorithm's callbacks, such as a proximal term, and must not move D or C.
        """
        if self.warming_up:
            # None instead of zero, because momentum and weight decay apply to any gradient.
            for parameter in (*self.decoder.parameters(), *self.classifier.parameters()):
                parameter.grad = None

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the classification ``loss``, ``scores``, and the ``reconstruction`` error."""
        x, y = batch
        reconstruction = self.reconstruct(x)
        logits = self.classifier(self.fuse(x, reconstruction))
        return {
            "loss": classification_loss(logits, y),
            "scores": class_probabilities(logits, y),
            "reconstruction": reconstruction_error(reconstruction, x),
        }

    def classifier_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return C's input without the autoencoder and with it.

        The input without it is ``x`` for ``sum`` and ``[x, 0]`` for ``concat``.
        """
        # Zeros instead of x~ preserve the number of channels.
        plain = x if self.fusion == "sum" else self.fuse(x, torch.zeros_like(x))
        return plain, self.fuse(x, self.reconstruct(x))

    def head_losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean classification loss at the plain and at the fused input.

        Gradients reach only C.
        """
        x, y = batch
        # The inputs are constants, because only gradients of C are compared.
        with torch.no_grad():
            plain, fused = self.classifier_inputs(x)
        plain_loss = classification_loss(self.classifier(plain), y).mean()
        return plain_loss, classification_loss(self.classifier(fused), y).mean()

    def pictures(self, x: Tensor) -> dict[str, dict[str, Tensor]]:
        """Return ``reconstructions``, with rows of x and of x~.

        With ``sum``, the third row is C's input, scaled to [0, 1].
        """
        reconstruction = self.reconstruct(x).float()
        rows = {"image": x, "reconstruction": reconstruction}
        if self.fusion == "sum":
            rows["their sum"] = self.fuse(x, reconstruction) / (1 + self.fusion_scale)
        return {"reconstructions": rows}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one SGD with two learning rates."""
        # One optimizer, so automatic optimization and the trainer's clipping apply.
        autoencoder = [*self.encoder.parameters(), *self.decoder.parameters()]
        groups = [
            {"params": autoencoder, "lr": self.autoencoder_lr},
            {"params": list(self.classifier.parameters()), "lr": self.lr},
        ]
        return torch.optim.SGD(groups, momentum=self.momentum, weight_decay=self.weight_decay)

    def _autoencoder(self, shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
        if self.autoencoder == "unet":
            return UNetEncoder(shape[0], self.norm), UNetDecoder(shape[0], self.norm)
        return (
            BottleneckEncoder(shape, self.latent_dim, self.norm),
            BottleneckDecoder(shape, self.latent_dim, self.norm),
        )


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Use a module without training it: its parameters and statistics stay unchanged.

    No gradients are computed for its parameters. Only the forward pass must run in the block,
    because autograd keeps its records.
    """
    # Some parameters may already be frozen, and must stay so.
    gradients = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    module.requires_grad_(False)

    try:
        with evaluating(module):
            yield
    finally:
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)


def _flat(module: nn.Module) -> Tensor:
    # One tensor, so the distance is one operation instead of one per layer.
    return torch.cat([parameter.reshape(-1) for parameter in module.parameters()])
