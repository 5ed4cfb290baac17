"""Learning a sequence of tasks: every client meets the classes in groups, one group after another."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from flsuite.data.federated import FederatedData, Ragged, Stage
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError, require_at_least, require_one_of
from flsuite.random import numpy_generator

__all__ = ["Arrangement", "TaskData", "TaskSequence"]

Arrangement = Literal["disjoint", "shuffled", "heterogeneous"]
Groups = tuple[tuple[int, ...], ...]
"""A client's classes, task by task."""


class TaskSequence(FederatedDataModule):
    """Any data set, learned class group by class group: class-incremental federated learning.

    The wrapped data module deals its samples to clients as ever; in each task a client trains on those of its samples whose
    class is in the task's group. Scores are on the classes met so far: the federation's on those that any client has met, a
    client's on its own. The number of the task is never told to the model as an input: it has to tell all classes apart.

    With one task of all classes this is the wrapped data module.

    Args:
        data: What is learned. Its partition should leave every client samples of every class that it is to meet; the
            default, IID, does.
        tasks: Groups that each client meets.
        classes_per_task: Classes in a group.
        rounds_per_task: Rounds in each task, or one number a task; the last task lasts until the run ends.
        arrangement: ``disjoint`` cuts the classes into groups once, and all clients meet them in the same order;
            ``shuffled`` cuts them likewise, and every client meets that shared pool of groups in an order of its own;
            ``heterogeneous`` draws each client's groups from all classes, so that groups of two clients may overlap.
            No client meets a class twice in any of them.
        seed: Of the groups and their order. Default: the run's seed.

    Raises:
        FlsuiteError: If there are fewer classes than ``tasks * classes_per_task``, or a client has no sample of a group.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        tasks: int = 5,
        classes_per_task: int = 2,
        rounds_per_task: int | list[int] = 10,
        arrangement: Arrangement = "heterogeneous",
        seed: int | None = None,
    ) -> None:
        own = "TaskSequence"
        require_at_least(own, 1, tasks=tasks, classes_per_task=classes_per_task)
        require_one_of(own, get_args(Arrangement), arrangement=arrangement)
        lengths = (
            [rounds_per_task] * tasks if isinstance(rounds_per_task, int) else list(rounds_per_task)
        )
        if len(lengths) != tasks:
            raise FlsuiteError(
                f"{own}: rounds_per_task has {len(lengths)} numbers for {tasks} tasks; give one a task, or one"
            )
        for length in lengths:
            require_at_least(own, 1, rounds_per_task=length)
        super().__init__(clients=data.clients, batch_size=data.batch_size, seed=seed)
        self.data = data
        self.tasks = tasks
        self.classes_per_task = classes_per_task
        self.rounds_per_task = rounds_per_task
        self.arrangement: Arrangement = arrangement
        self._starts = tuple(accumulate(lengths[:-1], initial=1))

    def load(self) -> PublishedSplits:
        return self.data.load()

    def use_seed(self, seed: int) -> None:
        super().use_seed(seed)
        self.data.use_seed(seed)
        if (
            self.data._federated is None
        ):  # dealt anew, even where the tasks have a seed of their own
            self._federated = None

    def setup(self, stage: str | None = None) -> None:
        """Deal, and say who meets what when; once."""
        if self._federated is None:
            self.data.setup(stage)
            self._federated = self._in_tasks(self.data.federated)

    def _in_tasks(self, data: FederatedData) -> "TaskData":
        if data.train.y.ndim > 1:
            raise FlsuiteError(
                "TaskSequence needs one class a sample, and this data has several labels; choose other data"
            )
        classes = data.spec.num_classes
        if classes < (needed := self.tasks * self.classes_per_task):
            raise FlsuiteError(
                f"TaskSequence: {self.tasks} tasks of {self.classes_per_task} classes need {needed} classes, and the data has "
                f"{classes}; lower tasks or classes_per_task"
            )
        sequences = self._sequences(classes, data.clients)
        for client, groups in enumerate(sequences):
            has = data.class_counts(client)
            for task, group in enumerate(groups):
                if not has[list(group)].any():
                    raise FlsuiteError(
                        f"TaskSequence: client {client} has no sample of task {task}, classes {list(group)}; give it some "
                        "(data.data.partition IID, or a larger alpha), or lower data.data.clients"
                    )
        return TaskData.of(data, sequences, self._starts)

    def _sequences(self, classes: int, clients: int) -> tuple[Groups, ...]:
        used = self.tasks * self.classes_per_task

        def cut(order: np.ndarray) -> Groups:
            return tuple(
                tuple(sorted(group)) for group in order[:used].reshape(self.tasks, -1).tolist()
            )

        pool = cut(numpy_generator(self.partition_seed, "tasks/pool").permutation(classes))
        sequences = []
        for client in range(clients):
            rng = numpy_generator(self.partition_seed, "tasks/client", client=client)
            if self.arrangement == "shuffled":
                sequences.append(tuple(pool[task] for task in rng.permutation(self.tasks)))
            else:
                sequences.append(
                    pool if self.arrangement == "disjoint" else cut(rng.permutation(classes))
                )
        return tuple(sequences)


@dataclass
class TaskData(FederatedData):
    """A dealt dataset whose clients change from one group of classes to the next.

    As a whole it is what clients meet from the first task to the last; :meth:`at` is one round's view of it.

    Attributes:
        sequences: Each client's groups of classes.
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
        everything = _marked(
            [[c for group in groups for c in group] for groups in sequences], data.spec.num_classes
        )
        parts: dict[str, Any] = {
            name: getattr(data, name) for name in FederatedData.__dataclass_fields__
        }
        parts["train_index"] = _among(data.train_index, data.train.y, everything)
        parts["val_index"] = _among(data.val_index, data.train.y, everything)
        parts["test_index"] = _among(data.test_index, data.test.y, everything)
        return cls(**parts, sequences=tuple(sequences), starts=starts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}

    @property
    def tasks(self) -> int:
        return len(self.starts)

    def task(self, round: int) -> int:
        """The number of the task that a round belongs to."""
        return max(bisect_right(self.starts, round) - 1, 0)

    def at(self, round: int) -> FederatedData:
        """Training samples of the classes of the round's task; validation and test samples of all classes met so far."""
        task = self.task(round)
        if task not in self._views:
            self._views.clear()  # rounds run forwards: the view of a task gone by would only take up memory
            self._views[task] = self._view(task)
        return self._views[task]

    def _view(self, task: int) -> FederatedData:
        classes = self.spec.num_classes
        now = _marked([groups[task] for groups in self.sequences], classes)
        met = _marked(
            [[c for group in groups[: task + 1] for c in group] for groups in self.sequences],
            classes,
        )
        before = [c for groups in self.sequences for group in groups[:task] for c in group]
        seen = met.any(0)
        train_labels = self.train.y.cpu()
        test, test_index = _shrunk(self.test, _among(self.test_index, self.test.y, met), seen)
        view = FederatedData(
            **{name: getattr(self, name) for name in FederatedData.__dataclass_fields__}
        )
        return replace(
            view,
            train_index=_among(self.train_index, train_labels, now),
            val_index=_among(self.val_index, train_labels, met),
            test=test,
            test_index=test_index,
            val=None if self.val is None else self.val.take(seen[self.val.y].nonzero().squeeze(1)),
            stage=Stage(
                task, tuple(seen.nonzero().squeeze(1).tolist()), tuple(sorted(set(before)))
            ),
        )


def _marked(chosen: Sequence[Sequence[int]], classes: int) -> Tensor:
    """bool ``(clients, classes)``."""
    marks = torch.zeros(len(chosen), classes, dtype=torch.bool)
    for client, own in enumerate(chosen):
        marks[client, list(own)] = True
    return marks


def _among(rows: Ragged, y: Tensor, allowed: Tensor) -> Ragged:
    """Each client's rows whose class is allowed to it, bool ``(clients, classes)``."""
    return rows.where(allowed[rows.owners(), y[rows.values]])


def _shrunk(arrays: DataSplit, rows: Ragged, seen: Tensor) -> tuple[DataSplit, Ragged]:
    """The samples of the classes seen, and where the clients' rows have gone."""
    kept = seen[arrays.y]
    place = kept.cumsum(0) - 1
    return arrays.take(kept.nonzero().squeeze(1)), Ragged(place[rows.values], rows.offsets)
