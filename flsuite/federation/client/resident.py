"""The resident model of a worker: restore it between fits, and check each fit's changes."""

from collections.abc import Collection
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from flsuite.common.errors import FlsuiteError
from flsuite.models.modes import PlainAttributes


@dataclass
class _Buffer:
    """A buffer that is not in the state dict, and its initial value."""

    part: nn.Module
    name: str
    start: Tensor
    seen: tuple[Tensor, int] | None = None  # the present one, with its count of changes

    def restore(self) -> None:
        """Restore it where a fit has changed or replaced it."""
        now = self.part._buffers[self.name]
        if self.seen is not None and now is self.seen[0] and now._version == self.seen[1]:
            return
        device = self.start.device if now is None else now.device
        own = self.part._buffers[self.name] = self.start.to(device, copy=True)
        self.seen = own, own._version


class Resident:
    """The model state outside the state dict, which must not leak from one client to the next.

    Args:
        model: The model, before its first use.
        frozen: Names of the parameters that no client trains.
    """

    def __init__(self, model: LightningModule, frozen: Collection[str] = ()) -> None:
        self.model = model
        self._trainable = [(p, p.requires_grad) for p in model.parameters()]
        self._attributes = PlainAttributes(model)
        self._buffers = [
            _Buffer(part, name, value.clone())
            for part in model.modules()
            for name, value in part.named_buffers(recurse=False)
            if name in part._non_persistent_buffers_set
        ]
        self._metrics = [part for part in model.modules() if isinstance(part, Metric)]
        self._parameters = [id(parameter) for parameter in model.parameters()]
        self._frozen = [(name, p) for name, p in model.named_parameters() if name in frozen]
        self._versions: list[int] = []

    def restore(self) -> None:
        """Restore the model's plain attributes and unsaved buffers to their initial values.

        A model may collect numbers in a list or in a metric over the steps of a fit. They must not
        leak into the next client, nor into a fit that restarts in Lightning's loop.
        """
        self._attributes.restore()
        for buffer in self._buffers:
            buffer.restore()
        for metric in self._metrics:
            metric.reset()

    def release(self) -> None:
        """Clear gradients, and restore which parameters are frozen."""
        # Iterate over the stored list, because walking through the module costs as much as a layer.
        for parameter, is_trainable in self._trainable:
            parameter.grad = None
            parameter.requires_grad_(is_trainable)

    def mark(self) -> None:
        """Store the frozen parameters at the start of a fit."""
        self._versions = [parameter._version for _, parameter in self._frozen]

    def check(self) -> None:
        """Refuse a fit whose training would be lost.

        Raises:
            FlsuiteError: If it created new layers, or trained entries that are not sent.
        """
        kind = type(self.model).__name__
        if [id(parameter) for parameter in self.model.parameters()] != self._parameters:
            raise FlsuiteError(
                f"model: a fit of {kind} makes new layers, whose training would be lost; make them "
                "in __init__, or once in configure_model"
            )
        for (name, parameter), version in zip(self._frozen, self._versions, strict=True):
            if parameter.requires_grad or parameter._version != version:
                raise FlsuiteError(
                    f"model: {name} of {kind} is frozen at the start and changes in a fit, but "
                    "frozen parameters are not sent; leave it trainable in __init__, or name it "
                    "in private"
                )
