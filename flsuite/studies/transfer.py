"""A start from another task: pretrained on some classes of CIFAR-10, federated on the others.

Name the data and the callback in a config: ``flsuite.studies.transfer.CIFAR10Classes``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.common.arguments import NonNegativeInt, Settings, check_init
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Outcome
from flsuite.common.state import State
from flsuite.data.datasets.vision import CIFAR10
from flsuite.data.federated import DataSplit, PublishedSplits
from flsuite.runs.run import Run


class CIFAR10Classes(CIFAR10):
    """Some classes of CIFAR-10.

    Args:
        classes: The classes to keep, from 0 to 9.
        renumber: Whether labels count from 0, in the order of ``classes``. Otherwise the labels
            stay, and a model has ten outputs. The last layer of a model pretrained in this way does
            not fit renumbered labels, where it starts at random.
        kwargs: See :class:`~flsuite.data.FederatedDataModule`.
    """

    def __init__(
        self,
        classes: Sequence[NonNegativeInt] = (5, 6, 7, 8, 9),
        renumber: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.classes = tuple(classes)
        self.renumber = renumber
        check_init(self, CIFAR10Classes)

    def load(self) -> PublishedSplits:
        published = super().load()
        names = published.spec.names
        if not self.classes or len({*self.classes} & {*range(len(names))}) < len(self.classes):
            raise FlsuiteError(
                f"data.classes must be different numbers from 0 to {len(names) - 1}, at least one, "
                f"got {list(self.classes)}"
            )

        train, test = (
            of_classes(split, self.classes, self.renumber)
            for split in (published.train, published.test)
        )
        spec = published.spec
        if self.renumber:
            kept = tuple(names[c] for c in self.classes)
            spec = replace(spec, num_classes=len(kept), class_names=kept)
        return PublishedSplits(spec, train, test)


def of_classes(split: DataSplit, classes: Sequence[int], renumber: bool) -> DataSplit:
    """Return the samples of some classes, with labels from 0 if they are renumbered."""
    kept = split.take(torch.isin(split.y, torch.tensor(classes)).nonzero().flatten())
    if not renumber:
        return kept
    numbers = torch.full((int(split.y.max()) + 1,), -1)
    numbers[torch.tensor(classes)] = torch.arange(len(classes))
    return replace(kept, y=numbers[kept.y])


@dataclass(eq=False)
class LocalDistances(FederationCallback, Settings):
    """Logs how far the clients' trained models are from their start, and from each other.

    Each round, ``train/distance/start`` is the mean over clients, and ``train/distance/pair`` the
    mean over pairs of clients. Distances cover all shared numbers, and are relative to the length
    of the start.
    """

    affects: ClassVar[Affects] = "nothing"

    _models: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _start: Tensor = field(default_factory=lambda: torch.zeros(0), init=False, repr=False)

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        if outcome.failed:
            return
        self._models.append(_flat(outcome.update.state))
        self._start = _flat(outcome.update.base)

    def on_round_end(self, run: Run, round: int) -> None:
        for name, value in distances(self._models, self._start).items():
            run.log_metric(f"distance/{name}", value)
        self._models = []


def distances(models: Sequence[Tensor], start: Tensor) -> dict[str, float]:
    """Return the mean distances ``start`` and ``pair``, relative to the length of the start.

    Args:
        models: One vector per client, at least two.
        start: The vector that all of them started from.
    """
    all_models, length = torch.stack(list(models)), start.norm()
    ways = (all_models - start).norm(dim=1)
    return {
        "start": float(ways.mean() / length),
        "pair": float(torch.pdist(all_models).mean() / length),
    }


def _flat(state: State) -> Tensor:
    return torch.cat([v.flatten().float() for v in state.values() if v.is_floating_point()])
