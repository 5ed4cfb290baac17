"""A plain classifier over any backbone, which may start from pretrained weights."""

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.common.errors import FlsuiteError, log, refused_as, some
from flsuite.common.files import require_whole
from flsuite.data.federated import DataSpec
from flsuite.models.abilities import mean_over_samples
from flsuite.models.backbones.base import Backbone, LeNet5
from flsuite.models.base import ClientModel, require_classes

_WEIGHTS = (
    "take checkpoints/model.ckpt of a run, another Lightning checkpoint with a state_dict, or a "
    "state dict alone, as torch.save writes it"
)


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

    Take it for any classification.

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
        # The digest of the content becomes part of the run's settings.
        content = Path(path).expanduser().read_bytes()
        self.content_digests = {"pretrained": hashlib.sha256(content).hexdigest()[:12]}
        # A state dict of the network itself lacks this prefix.
        weights = {name.removeprefix("network."): value for name, value in weights.items()}
        _load_weights(self.network, weights, Path(path).name)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    @property
    def head(self) -> nn.Module:
        """Return the last linear layer of the network."""
        return self.network.get_submodule(_last_linear(self.network))

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


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the weights of a file, by name.

    Args:
        path: A Lightning checkpoint, such as ``checkpoints/model.ckpt`` of a run, or a plain state
            dict saved by ``torch.save``. Nothing in it is executed.

    Raises:
        FlsuiteError: If the file does not exist, or is neither of the two.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FlsuiteError(f"there is no file {file} with pretrained weights; correct the path")
    with refused_as(f"{file} cannot be read as pretrained weights", _WEIGHTS, 80):
        if zipfile.is_zipfile(file):  # files of early torch versions are not zip files
            require_whole(file)
        # weights_only, because an untrusted pickle could run code.
        content = torch.load(file, weights_only=True, map_location="cpu")

    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(weights, Mapping) or not weights:
        raise FlsuiteError(f"{file} has no weights; {_WEIGHTS}")
    if others := [str(name) for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise FlsuiteError(
            f"{file} is not a state dict: {some(others)} are not tensors; {_WEIGHTS}"
        )
    return dict(weights)


def _load_weights(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into a network.

    Names and shapes must match the network. The last linear layer keeps its own weights if it has
    another number of outputs, as for another number of classes.

    Args:
        network: The network, whose tensors are overwritten in place.
        weights: The weights by name.
        source: Name of the file, for messages.

    Raises:
        FlsuiteError: If an entry is missing, unknown, or of another shape.
    """
    own = network.state_dict()  # aliases the network's tensors
    differing = {k for k, value in own.items() if k in weights and value.shape != weights[k].shape}
    kept = _of_last_layer(network)
    if not all(k in differing and own[k].shape[1:] == weights[k].shape[1:] for k in kept):
        kept = set()

    reasons = {
        "it has no": [name for name in own if name not in weights],
        "the model has no": [name for name in weights if name not in own],
        "of another shape are": [
            f"{name} {tuple(weights[name].shape)} for {tuple(own[name].shape)}"
            for name in own
            if name in differing - kept
        ],
    }
    if given := [f"{reason} {some(names)}" for reason, names in reasons.items() if names]:
        raise FlsuiteError(
            f"the pretrained weights of {source} are of another model: {'; '.join(given)}; give "
            "weights of the same backbone"
        )

    for name in own.keys() - kept:
        own[name].copy_(weights[name])
    if kept:
        log.warning(
            "%s is for another number of classes: %s start at random", source, some(sorted(kept))
        )


def _last_linear(network: nn.Module) -> str:
    """Return the name of the last linear layer.

    Raises:
        IndexError: If there is none.
    """
    return [name for name, part in network.named_modules() if isinstance(part, nn.Linear)][-1]


def _of_last_layer(network: nn.Module) -> set[str]:
    """Return the entries of the last linear layer. Empty if there is none."""
    with suppress(IndexError):
        name = _last_linear(network)
        return {*network.get_submodule(name).state_dict(prefix=f"{name}." if name else "")}
    return set()
