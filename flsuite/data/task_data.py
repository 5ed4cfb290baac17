"""Federated data whose clients meet the classes in groups, one group per task."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flsuite.data.federated import FederatedData, RaggedIndex, Stage
from flsuite.data.spec import DataSplit

__all__ = ["Groups", "TaskData"]

Groups = tuple[tuple[int, ...], ...]
"""The classes of one client, task by task."""


@dataclass
class TaskData(FederatedData):
    """A dataset whose clients move from one group of classes to the next.

    The object itself holds the data of all tasks. :meth:`at` is its view in one round.

    Attributes:
        sequences: The groups of classes of each client.
        starts: The first round of each task.
    """

    sequences: tuple[Groups, ...] = ()
    starts: tuple[int, ...] = (1,)
    _views: dict[int, FederatedData] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls, data: FederatedData, sequences: Sequence[Groups], starts: tuple[int, ...]
    ) -> "TaskData":
        """Restrict each client's rows to the classes of its groups."""
        classes = data.spec.num_classes
        met = _marked([_joined(groups) for groups in sequences], classes)
        parts = _fields(data)
        parts["train_index"] = _among(data.train_index, data.train.classes, met)
        parts["val_index"] = _among(data.val_index, data.train.classes, met)
        parts["test_index"] = _among(data.test_index, data.test.classes, met)
        return cls(**parts, sequences=tuple(sequences), starts=starts)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the views out of a pickle, because a worker makes its own."""
        return {**self.__dict__, "_views": {}}

    @property
    def tasks(self) -> int:
        """Return the number of tasks."""
        return len(self.starts)

    def task(self, round: int) -> int:
        """Return the number of the task that a round belongs to."""
        return max(bisect_right(self.starts, round) - 1, 0)

    def at(self, round: int) -> FederatedData:
        """Return the data of a round.

        Training samples are of the classes of the round's task. Validation and test samples are of
        all classes met so far.
        """
        task = self.task(round)
        if task not in self._views:
            self._views.clear()  # rounds only go forwards: the view of a past task is not needed
            self._views[task] = self._view(task)
        return self._views[task]

    def _view(self, task: int) -> FederatedData:
        """Return the data of a task."""
        classes = self.spec.num_classes
        now = _marked([groups[task] for groups in self.sequences], classes)
        met = _marked([_joined(groups[: task + 1]) for groups in self.sequences], classes)
        past = {c for groups in self.sequences for c in _joined(groups[:task])}
        seen = met.any(0)

        # The training tensors may be on a GPU, but the index arrays never are.
        train_labels = self.train.classes.cpu()
        # Shrunk instead of only indexed: the global score is on the whole test split of the view.
        test, test_index = _shrunk(self.test, _among(self.test_index, self.test.classes, met), seen)
        return replace(
            FederatedData(**_fields(self)),
            train_index=_among(self.train_index, train_labels, now),
            val_index=_among(self.val_index, train_labels, met),
            test=test,
            test_index=test_index,
            val=_of_classes(self.val, seen),
            server=_of_classes(self.server, seen),
            stage=Stage(task, tuple(_places(seen).tolist()), tuple(sorted(past))),
        )


def _fields(data: FederatedData) -> dict[str, Any]:
    """Return the fields that every federated data has, by name."""
    return {name: getattr(data, name) for name in FederatedData.__dataclass_fields__}


def _joined(groups: Groups) -> list[int]:
    """Return the classes of several groups as one list."""
    return [c for group in groups for c in group]


def _marked(chosen: Sequence[Sequence[int]], classes: int) -> Tensor:
    """Return the chosen classes of each client as marks, bool ``(clients, classes)``."""
    marks = torch.zeros(len(chosen), classes, dtype=torch.bool)
    for client, own in enumerate(chosen):
        marks[client, list(own)] = True
    return marks


def _places(mask: Tensor) -> Tensor:
    """Return the places at which a mask is true, int64 ``(places,)``."""
    return mask.nonzero().squeeze(1)


def _among(rows: RaggedIndex, y: Tensor, allowed: Tensor) -> RaggedIndex:
    """Keep each client's rows of the classes allowed to it, bool ``(clients, classes)``."""
    return rows.where(allowed[rows.owners(), y[rows.values]])


def _of_classes(split: DataSplit | None, seen: Tensor) -> DataSplit | None:
    """Keep the samples of the classes seen, where there is such a split."""
    return None if split is None else split.take(_places(seen[split.classes]))


def _shrunk(split: DataSplit, rows: RaggedIndex, seen: Tensor) -> tuple[DataSplit, RaggedIndex]:
    """Keep the samples of the classes seen, and renumber the clients' rows."""
    kept = seen[split.classes]
    # The new number of a kept row is the number of kept rows before it.
    new_row = kept.cumsum(0) - 1
    return split.take(_places(kept)), RaggedIndex(new_row[rows.values], rows.offsets)
