"""A plain classifier over any backbone."""

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.common.errors import FlsuiteError
from flsuite.data.federated import DataSpec
from flsuite.models.backbones.base import Backbone
from flsuite.models.backbones.small import LeNet5
from flsuite.models.base import ClientModel, require_classes
from flsuite.models.declarations import mean_over_samples
from flsuite.models.pretrained import file_digest, load_weights, read_weights


def classification_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample, ``(n,)``.

    It is the cross-entropy for classes ``(n,)``, and the mean binary cross-entropy for labels
    ``(n, labels)``.
    """
    # Losses are float32 at any precision.
    logits = logits.float()
    if y.ndim == 1:
        return F.cross_entropy(logits, y, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none").mean(1)


def _mean_classification_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean of :func:`classification_loss` over the batch, in one operation."""
    logits = logits.float()
    # Not the mean of classification_loss, whose per-sample losses cost an extra kernel.
    return (
        F.cross_entropy(logits, y)
        if y.ndim == 1
        else F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))
    )


def class_probabilities(logits: Tensor, y: Tensor) -> Tensor:
    """Return probabilities ``(n, classes)``: a softmax for classes, a sigmoid per label."""
    return logits.float().softmax(1) if y.ndim == 1 else logits.float().sigmoid()


class Classifier(ClientModel):
    """A backbone trained on cross-entropy, or on binary cross-entropy for multi-label data.

    Args:
        backbone: The network. Default: :class:`~flsuite.models.backbones.LeNet5`.
        optimizer: Optimizer of a fit. Each fit starts with a new one.
        private: Entries of the state dict that stay with the client, by prefix or wildcard.
            ``["network.fc"]`` keeps the head of a ResNet-18 (FedPer), ``["*norm"]`` the
            normalization of a ResNet-20 (FedBN). A pattern that matches nothing is an error.
        pretrained: A file with initial weights: ``checkpoints/model.ckpt`` of a run, any Lightning
            checkpoint of this model, or a state dict of it or of its network. The last linear layer
            starts at random if the file is for another number of classes. Default: random weights.

    Raises:
        FlsuiteError: If the backbone is a network itself.

    Attributes:
        content_digests: Digests of the weight files, by the argument that names the file.
            ``None`` for a file that was not read, because other weights follow.
    """

    def __init__(
        self,
        backbone: Backbone | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.05),
        private: Sequence[str] = (),
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(backbone, nn.Module) and not isinstance(backbone, Backbone):
            raise FlsuiteError(
                "Classifier: backbone must be a Backbone, whose build(shape, outputs) returns the "
                f"network, got the network {type(backbone).__name__}; write such a class, or a "
                "LightningModule with your network"
            )
        self.backbone = backbone
        self.optimizer = optimizer
        self.private = tuple(private)
        self.pretrained = pretrained
        self.content_digests: dict[str, str | None] = {}

    def build(self, spec: DataSpec) -> None:
        require_classes("Classifier", spec)
        self.network = (self.backbone or LeNet5()).build(spec.shape, spec.num_classes)
        if self.pretrained is not None and self.weights_follow:
            self.content_digests = {"pretrained": None}
        elif self.pretrained is not None:
            self._start_from(self.pretrained)

    def _start_from(self, path: str) -> None:
        """Overwrite the network's weights with the weights of a file."""
        weights = read_weights(path)
        self.content_digests = {"pretrained": file_digest(path)}
        # A state dict of the network itself lacks this prefix.
        weights = {name.removeprefix("network."): value for name, value in weights.items()}
        load_weights(self.network, weights, Path(path).name)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    @property
    def head(self) -> nn.Module:
        """Return the last linear layer of the network."""
        return [layer for layer in self.network.modules() if isinstance(layer, nn.Linear)][-1]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits ``(n, outputs)``."""
        return self(x)

    @mean_over_samples
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return _mean_classification_loss(self(x), y)

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": classification_loss(logits, y), "scores": class_probabilities(logits, y)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())
