"""The base class of the client models: a LightningModule built once the data's shape is known."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.data.federated import DataSpec
from flsuite.models.autoencoders import slice_strides

_SPEC_KEY = "data_spec"


def require_classes(model: str, spec: DataSpec, one_per_sample: bool = False) -> None:
    """Refuse data that a classifier cannot be trained on.

    Args:
        model: The model's name, for the message.
        spec: The data.
        one_per_sample: Whether multi-label data is refused, too.

    Raises:
        FlsuiteError: If the data has no classes, or several per sample.
    """
    if spec.task == "other":
        raise FlsuiteError(
            f"{model} needs one class per sample, or 0 and 1 per label, and found neither in this "
            "data; give integer targets or data.labels, or train a LightningModule of your own"
        )
    if one_per_sample and spec.task == "multilabel":
        raise FlsuiteError(
            f"{model} models one class per sample, and a sample of multi-label data has several; "
            "choose other data, or another model"
        )


class ClientModel(LightningModule):
    """A model that clients train, and that a plain Lightning Trainer can also fit.

    A subclass takes its parameters in ``__init__``, stores each under its own name, creates its
    networks in :meth:`build`, and implements ``training_step``, ``configure_optimizers`` and
    :meth:`evaluation_step`. Optional members are in :mod:`flsuite.models.abilities`.

    Attributes:
        private: Entries of the state dict that stay with the client, by prefix or wildcard. The
            others are shared.
        training_only: Private entries that training reads but predictions do not. If all private
            entries are of this kind, the shared model is scored once for all clients.
        parameter_groups: Groups of parameters that an aggregator may treat separately: name to
            prefixes.
        extra_epochs: Warm-up epochs of a client's fit, before the epochs of the trainer.
        spec: The data that the model is built for. ``None`` before it is built.
        weights_follow: Whether weights of a checkpoint are loaded after :meth:`build`, which then
            does not need a file of initial weights.
    """

    private: Sequence[str] = ()
    training_only: Sequence[str] = ()
    extra_epochs: int = 0
    parameter_groups: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.spec: DataSpec | None = None
        self.weights_follow = False

    @abstractmethod
    def build(self, spec: DataSpec) -> None:
        """Create the networks for data of this shape.

        Raises:
            FlsuiteError: If the model does not fit the data.
        """

    @abstractmethod
    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Score a batch, with one row per sample.

        Returns:
            ``loss`` ``(n,)`` and ``scores`` ``(n, classes)``, probabilities. Any further ``(n,)``
            entry is averaged and logged.
        """

    def ensure_built(self, spec: DataSpec) -> None:
        """Build for ``spec``, or check that the model was built for data of the same shape."""
        if self.spec is None:
            self.build(spec)
            self.spec = spec
            slice_strides(self)
        elif (self.spec.shape, self.spec.num_classes, self.spec.task) != (
            spec.shape,
            spec.num_classes,
            spec.task,
        ):
            raise FlsuiteError(
                f"{type(self).__name__} was built for {self.spec.task} data of shape "
                f"{self.spec.shape} with {self.spec.num_classes} classes; this data is {spec.task} "
                f"of shape {spec.shape} with {spec.num_classes}"
            )

    def configure_model(self) -> None:
        """Build the model for the Trainer's data module, unless it is already built."""
        # Without a Trainer, the checkpoint that is being loaded holds the spec.
        if self.spec is None and self._trainer is not None:
            datamodule = getattr(self.trainer, "datamodule", None)
            spec = getattr(datamodule, "spec", None)
            if spec is None:
                raise FlsuiteError(
                    f"{type(self).__name__} is not built: call ensure_built(spec), "
                    "or fit with a data module"
                )
            self.ensure_built(spec)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        # The federation scores with evaluation_step. This step is for a plain Lightning Trainer.
        self._log_evaluation("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_evaluation("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.evaluation_step(batch)["scores"]

    def _log_evaluation(self, prefix: str, batch: tuple[Tensor, Tensor]) -> None:
        outputs = self.evaluation_step(batch)
        # The batch size weights the epoch's mean, because the last batch is smaller.
        self.log_dict(
            {f"{prefix}/{k}": v.mean() for k, v in outputs.items() if v.ndim == 1},
            batch_size=len(batch[1]),
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.spec is not None:
            checkpoint[_SPEC_KEY] = self.spec.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build before the weights are loaded, so ``load_from_checkpoint`` needs no data."""
        if _SPEC_KEY in checkpoint:
            self.weights_follow = True
            # The constructor's arguments define everything except the data's shape.
            self.ensure_built(DataSpec(**checkpoint[_SPEC_KEY]))
