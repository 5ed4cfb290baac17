"""Batches of samples with their classes, which attacks on training data need."""

from typing import Any

from torch import Tensor

from flsuite.data.federated import FederatedData
from flsuite.errors import FlsuiteError

__all__ = ["labelled", "require_classes", "with_parts"]

_OTHERS = "choose an attack on updates, such as SignFlip"


def labelled(owner: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of a batch.

    Raises:
        FlsuiteError: If it is of another structure.
    """
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in batch):
        raise FlsuiteError(
            f"{owner} needs batches of inputs and classes, (x, y), and a batch of this data is a "
            f"{type(batch).__name__}; {_OTHERS}"
        )
    x, y = batch
    return x, y


def with_parts(batch: Any, x: Tensor, y: Tensor) -> Any:
    """Return a batch of the same type with other inputs and classes."""
    return type(batch)((x, y))


def require_classes(owner: str, data: FederatedData) -> None:
    """Refuse data without classes, or with batches of another structure than ``(x, y)``."""
    labelled(owner, data.plain_batch(data.train_index.values[:1]))
    if data.spec.task == "other":
        raise FlsuiteError(f"{owner} needs data with classes, and this has none; {_OTHERS}")
