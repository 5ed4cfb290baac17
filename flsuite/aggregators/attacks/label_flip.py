"""Label flipping: attackers train on wrong classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.attacks.base import Attack
from flsuite.common.errors import FlsuiteError
from flsuite.data.federated import FederatedData
from flsuite.data.spec import Batch


@dataclass(eq=False)
class LabelFlip(Attack):
    """Trains on wrong classes (Tolpegin et al. 2020; ``C - 1 - c``: Fang et al. 2020).

    In a multi-label task, each label ``c`` of a sample is replaced by its target. The class counts
    that a client reports are the true ones.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        pairs: Mapping from a class to its replacement. Other classes stay. Default: class ``c`` of
            ``C`` becomes ``C - 1 - c``.
    """

    pairs: dict[int, int] | None = None

    def poison(self, batch: Any, generator: torch.Generator) -> Any:
        x, y = labelled(type(self).__name__, batch)
        return batch_like(batch, x, self._flipped(y))

    def _flipped(self, y: Tensor) -> Tensor:
        target = self._target.to(y.device)
        if y.ndim == 1:
            return target[y].to(y.dtype)
        # Two labels with the same target set it once.
        return torch.zeros_like(y).index_add_(1, target, y).clamp_(max=1)

    def configure(self, data: FederatedData, seed: int) -> None:
        super().configure(data, seed)
        owner, classes = type(self).__name__, data.spec.num_classes
        require_classes(owner, data)
        if self.pairs is None and classes < 2:
            raise FlsuiteError(f"{owner}: data with one class has no other class to flip to")
        for number in (n for pair in (self.pairs or {}).items() for n in pair):
            if not 0 <= number < classes:
                raise FlsuiteError(
                    f"{owner}: pairs names class {number}, but the classes are 0 to {classes - 1}"
                )
        self._target = torch.arange(classes)
        if self.pairs is None:
            self._target = self._target.flip(0)
        for source, target in (self.pairs or {}).items():
            self._target[source] = target


_OTHERS = "choose an attack on updates, such as SignFlip"


def labelled(owner: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of a batch.

    Raises:
        FlsuiteError: If the batch has another structure.
    """
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in batch):
        raise FlsuiteError(
            f"{owner} needs batches of inputs and classes, (x, y), but a batch of this data is a "
            f"{type(batch).__name__}; {_OTHERS}"
        )
    x, y = batch
    return x, y


def batch_like(batch: Any, x: Tensor, y: Tensor) -> Any:
    """Return a batch of the same type with new inputs and classes."""
    return type(batch)((x, y))


def first_batch(data: FederatedData) -> Batch:
    """Return a batch of one training sample, without augmentation."""
    return next(data.batches_of(data.train, [data.train.rows.values[:1]]))


def require_classes(owner: str, data: FederatedData) -> None:
    """Refuse data without classes, or whose batches are not ``(x, y)``."""
    labelled(owner, first_batch(data))
    if data.spec.task == "other":
        raise FlsuiteError(f"{owner} needs data with classes, but this data has none; {_OTHERS}")
