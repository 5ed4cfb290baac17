"""The resident model of a worker, as every fit must find it and leave it."""

import copy
from collections.abc import Collection
from typing import Any

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from flsuite.errors import FlsuiteError


class Resident:
    """What a fit must neither leave to the next client nor change, beside the state dict.

    Args:
        model: The model, before it is used.
        frozen: Names of the parameters that no client trains.
    """

    def __init__(self, model: LightningModule, frozen: Collection[str] = ()) -> None:
        self.model = model
        self._trainable = [(p, p.requires_grad) for p in model.parameters()]
        self._attributes = _python_attributes(model)
        self._metrics = [part for part in model.modules() if isinstance(part, Metric)]
        self._parameters = [id(parameter) for parameter in model.parameters()]
        self._frozen = [(name, p) for name, p in model.named_parameters() if name in frozen]
        self._versions: list[int] = []

    def restore(self) -> None:
        """Give the model the numbers, lists and dicts that it had at the start.

        A model may collect numbers in a list or in a metric over the steps of a fit. They must not
        reach the next client, nor a fit that starts again in Lightning's loop.
        """
        for name, value in self._attributes.items():
            setattr(self.model, name, copy.deepcopy(value))
        for metric in self._metrics:
            metric.reset()

    def release(self) -> None:
        """Forget gradients, unfreeze what a fit has frozen, and the other way round."""
        # Not the parameters as they are now: a walk through the module costs as much as a layer.
        for parameter, is_trainable in self._trainable:
            parameter.grad = None
            parameter.requires_grad_(is_trainable)

    def mark(self) -> None:
        """Note the frozen parameters as the fit finds them."""
        self._versions = [parameter._version for _, parameter in self._frozen]

    def check(self) -> None:
        """Refuse a fit whose training would be lost.

        Raises:
            FlsuiteError: If it has made new layers, or has trained what does not travel.
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
                    f"model: {name} of {kind} is frozen at the start and changes in a fit, and "
                    "frozen parameters do not travel; leave it trainable in __init__, or name it "
                    "in private"
                )


def _python_attributes(model: LightningModule) -> dict[str, Any]:
    """Return copies of the model's attributes that are plain Python data."""
    kinds = (bool, int, float, str, list, dict, set)
    return {
        name: copy.deepcopy(value)
        for name, value in vars(model).items()
        if type(value) in kinds and not name.startswith("_") and name != "training"
    }
