"""Attacks that alter the data that an attacker trains on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.attacks.base import Attack, Trial
from flsuite.aggregators.attacks.updates import boosted
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt, Share
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State
from flsuite.data.federated import Batch, DataSplit, FederatedData
from flsuite.data.map_style import is_pair


@dataclass(eq=False)
class LabelFlip(Attack):
    """Trains on wrong classes (Tolpegin et al. 2020; ``C - 1 - c``: Fang et al. 2020).

    Take it for clients with wrong data, by intent or not.

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
        return type(batch)((x, self._flipped(y)))

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
        pairs = {c: classes - 1 - c for c in range(classes)} if self.pairs is None else self.pairs
        self._target = torch.tensor([pairs.get(c, c) for c in range(classes)])


_OTHERS = "choose an attack on updates, such as SignFlip"


def labelled(owner: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of a batch.

    Raises:
        FlsuiteError: If the batch has another structure.
    """
    if not is_pair(batch) or not all(isinstance(part, Tensor) for part in batch):
        raise FlsuiteError(
            f"{owner} needs batches of inputs and classes, (x, y), but a batch of this data is a "
            f"{type(batch).__name__}; {_OTHERS}"
        )
    x, y = batch
    return x, y


def _first_batch(data: FederatedData) -> Batch:
    """Return a batch of one training sample, without augmentation."""
    return next(data.batches_of(data.train, [data.train.rows.values[:1]]))


def require_classes(owner: str, data: FederatedData) -> None:
    """Refuse data without classes, or whose batches are not ``(x, y)``."""
    labelled(owner, _first_batch(data))
    if data.spec.task == "other":
        raise FlsuiteError(f"{owner} needs data with classes, but this data has none; {_OTHERS}")


@dataclass(eq=False)
class PixelBackdoor(Attack):
    """Trains on images with a pattern as one class (Gu et al. 2017, BadNets).

    Take it if the accuracy stays high while the attack succeeds.

    The pattern is a square in the lower right corner. With ``boost``, the attackers replace the
    global model by theirs (Bagdasaryan et al. 2020).

    ``backdoor_success`` is the fraction of images of other classes that the model assigns to the
    target class once the pattern is added. It is measured on copies at every evaluation. In a
    multi-label task, the target is a label that is added to the labels of images with the pattern.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        target: The target class.
        size: Side of the square, in pixels.
        value: Brightness of the square, from 0 to 1. For byte images, it is a fraction of 255. If
            the dataset transforms its images itself, it is the value that the model receives.
        share: Fraction of each training batch that gets the pattern. 0 is an honest update.
        boost: Factor of the attackers' changes, see :class:`~flsuite.aggregators.ScaledUpdate`.
    """

    target: NonNegativeInt = 0
    size: PositiveInt = 3
    value: Share = 1.0
    share: Share = 0.5
    boost: NonNegativeFloat = 1.0

    def poison(self, batch: Any, generator: torch.Generator) -> Any:
        x, y = self._pair(batch)
        number = int(self.share * len(y) + 0.5)
        rows = torch.randperm(len(y), generator=generator)[:number].to(y.device)
        return type(batch)((self._stamped(x, rows), self._marked(y, rows)))

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        return boosted(trained, received, self.boost)

    def trial(self, samples: DataSplit) -> Trial:
        y = samples.classes
        others = y != self.target if y.ndim == 1 else y[:, self.target] == 0
        rows = others.nonzero().squeeze(1)
        return Trial("backdoor_success", rows, self._stamped_batch, self._hits)

    def _stamped_batch(self, batch: Any) -> Any:
        x, y = self._pair(batch)
        return type(batch)((self._stamped(x, torch.arange(len(x), device=x.device)), y))

    def _stamped(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return images ``(n, channels, height, width)`` with the pattern on these rows."""
        changed = x.clone()
        patch = self._patch.to(x).expand(len(rows), x.shape[1], self.size, self.size)
        changed[rows, :, -self.size :, -self.size :] = patch
        return changed

    def _marked(self, y: Tensor, rows: Tensor) -> Tensor:
        """Return classes ``(n,)`` or labels ``(n, labels)`` with the target on these rows."""
        changed = y.clone()
        if y.ndim == 1:
            changed[rows] = self.target
        else:
            changed[rows, self.target] = 1
        return changed

    def _hits(self, scores: Tensor) -> Tensor:
        if self._is_multilabel:
            return scores[:, self.target] > 0.5
        return scores.argmax(1) == self.target

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = labelled(type(self).__name__, batch)
        if x.ndim != 4:
            raise FlsuiteError(
                f"{type(self).__name__} needs images (n, channels, height, width), but a batch has "
                f"inputs of shape {tuple(x.shape)}; choose another attack"
            )
        return x, y

    def configure(self, data: FederatedData, seed: int) -> None:
        super().configure(data, seed)
        owner, spec = type(self).__name__, data.spec
        require_classes(owner, data)
        if len(spec.shape) != 3:
            raise FlsuiteError(f"{owner} needs images, but this data has none; choose LabelFlip")
        if self.target >= spec.num_classes:
            raise FlsuiteError(
                f"{owner}: target is class {self.target}, but the classes are 0 to "
                f"{spec.num_classes - 1}"
            )
        if self.size > min(spec.shape[1:]):
            height, width = spec.shape[1:]
            raise FlsuiteError(
                f"{owner}: size is {self.size} pixels, but the images have {height} x {width}"
            )
        self._is_multilabel = spec.task == "multilabel"
        self._patch = _as_inputs(self.value, data)


def _as_inputs(value: float, data: FederatedData) -> Tensor:
    """Return a brightness in the scale of the model's inputs, ``(1, channels or 1, 1, 1)``."""
    stored = data.train.x
    if data.scaling.is_identity or stored.dtype != torch.uint8:
        x, _ = _first_batch(data)
        return torch.full((1, 1, 1, 1), value if x.is_floating_point() else round(255 * value))
    pixel = torch.full((1, 1, 1, stored.shape[-1]), round(255 * value), dtype=torch.uint8)
    return data.scaling(pixel)
