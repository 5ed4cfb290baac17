"""Sequences of tasks: every client meets the classes in groups, one group after another."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from flsuite.common.arguments import PositiveInt, Range, check_init
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.data.arguments import plain
from flsuite.data.federated import DataSplit, FederatedData, Groups, PublishedSplits, Rows, Stage
from flsuite.data.module import FederatedDataModule


@dataclass
class _TaskData(FederatedData):
    """A dataset whose clients move from one group of classes to the next.

    The object itself holds the data of all tasks. :meth:`at` is its view in one round.
    """

    _views: dict[int, FederatedData] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls, data: FederatedData, sequences: Sequence[Groups], starts: tuple[int, ...]
    ) -> "_TaskData":
        """Restrict each client's rows to the classes of its groups."""
        classes = data.spec.num_classes
        met = _marked([_joined(groups) for groups in sequences], classes)
        train, test, val = _among(data.train, met), _among(data.test, met), _held_out(data.val, met)
        fields = _fields(data) | {"train": train, "test": test, "val": val}
        return cls(**fields | {"sequences": tuple(sequences), "starts": starts})

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the views from a pickle, because a worker creates its own."""
        return {**self.__dict__, "_views": {}}

    def at(self, round: int) -> FederatedData:
        """Return the data of a round.

        Training samples have the classes of the round's task. Validation and test samples have all
        classes met so far.
        """
        task = self.task(round)
        if task not in self._views:
            self._views.clear()  # rounds only increase, so views of past tasks are not needed
            self._views[task] = self._view(task)
        return self._views[task]

    def _view(self, task: int) -> FederatedData:
        """Return the data of a task."""
        classes = self.spec.num_classes
        now = _marked([groups[task] for groups in self.sequences], classes)
        met = _marked([_joined(groups[: task + 1]) for groups in self.sequences], classes)
        past = {c for groups in self.sequences for c in _joined(groups[:task])}
        seen = met.any(0)

        val = _held_out(self.val, met)
        return replace(
            FederatedData(**_fields(self)),
            train=_among(self.train, now),
            # Shrunk, not only indexed, because the global score uses the view's whole split.
            test=_shrunk(_among(self.test, met), seen),
            val=val if val is None or len(val.rows) else _shrunk(val, seen),
            server=None if self.server is None else _shrunk(self.server, seen),
            sequences=(),
            stage=Stage(task, tuple(seen.nonzero().flatten().tolist()), tuple(sorted(past))),
        )


def _fields(data: FederatedData) -> dict[str, Any]:
    """Return the fields that every federated data has, by name."""
    return {name: getattr(data, name) for name in FederatedData.__dataclass_fields__}


def _joined(groups: Groups) -> list[int]:
    """Return the classes of several groups as one list."""
    return [c for group in groups for c in group]


def _marked(chosen: Sequence[Sequence[int]], classes: int) -> Tensor:
    """Return the chosen classes of each client as a mask, bool ``(clients, classes)``."""
    marks = torch.zeros(len(chosen), classes, dtype=torch.bool)
    for client, own in enumerate(chosen):
        marks[client, list(own)] = True
    return marks


def _among(split: DataSplit, allowed: Tensor) -> DataSplit:
    """Keep each client's rows of its allowed classes, bool ``(clients, classes)``."""
    # The samples may be on a GPU, but the index arrays never are.
    y, rows = split.classes.cpu(), split.rows
    return replace(split, rows=rows.where(allowed[rows.owners(), y[rows.values]]))


def _held_out(val: DataSplit | None, allowed: Tensor) -> DataSplit | None:
    """Keep each client's held-out rows of its allowed classes.

    The published validation split, without client rows, stays whole.
    """
    if val is None or not len(val.rows):
        return val
    own = _among(val, allowed).owned()
    return own if len(own) else None


def _shrunk(split: DataSplit, seen: Tensor) -> DataSplit:
    """Keep the samples of seen classes, and renumber the clients' rows."""
    kept = seen[split.classes]
    # The new number of a kept row is the count of kept rows before it.
    new_row = kept.cumsum(0) - 1
    rows = Rows(new_row[split.rows.values], split.rows.offsets)
    return replace(split.take(kept), rows=rows)


Arrangement = Literal["disjoint", "shuffled", "heterogeneous"]


_Rounds = Annotated[
    list[int], Range("at least 1 in every task", lambda rounds: min(rounds, default=1) >= 1)
]


def _of_data(name: str) -> Any:
    """Return a property that is an attribute of the wrapped data module."""
    return property(
        lambda self: getattr(self.data, name), lambda self, value: setattr(self.data, name, value)
    )


class TaskSequence(FederatedDataModule):
    """Any dataset as class-incremental federated learning: one group of classes per task.

    The wrapped data module splits its samples over clients as usual. In each task, a client trains
    on its samples of the task's group of classes. Scores cover the classes met so far: for the
    federation, the classes that any client has met, and for a client, its own. The model does not
    receive the task's number as an input, so it has to distinguish all classes.

    With one task of all classes, this is equivalent to the wrapped data module.

    Args:
        data: The wrapped data module. Its partition should give every client samples of every class
            that the client will meet. The default, IID, does.
        tasks: Number of groups that each client meets.
        classes_per_task: Number of classes per group.
        rounds_per_task: Rounds per task, one number for all or one per task. The last task lasts
            until the run ends.
        arrangement: With ``disjoint``, the classes are cut into groups once, and all clients meet
            them in the same order. With ``shuffled``, they are cut once, and every client meets
            them in its own order. With ``heterogeneous``, each client's groups are drawn from all
            classes, so the groups of two clients may overlap. No client meets a class twice.
        seed: The seed of the groups and their order. Default: the run's seed.

    Raises:
        FlsuiteError: If there are fewer classes than ``tasks * classes_per_task``, or a client has
            no sample of a group.
    """

    clients, batch_size = _of_data("clients"), _of_data("batch_size")

    def __init__(
        self,
        data: FederatedDataModule,
        tasks: PositiveInt = 5,
        classes_per_task: PositiveInt = 2,
        rounds_per_task: PositiveInt | _Rounds = 10,
        arrangement: Arrangement = "heterogeneous",
        seed: int | None = None,
    ) -> None:
        # Before the base class's __init__, which sets clients and batch_size of the wrapped module.
        self.data = data
        super().__init__(clients=data.clients, batch_size=data.batch_size, seed=seed)
        self.tasks = tasks
        self.classes_per_task = classes_per_task
        self.rounds_per_task = rounds_per_task
        self.arrangement: Arrangement = arrangement

        self._check_arguments()

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_init(self, TaskSequence)
        lengths = self._lengths()
        if len(lengths) != self.tasks:
            raise FlsuiteError(
                f"TaskSequence: rounds_per_task has {len(lengths)} numbers for {self.tasks} tasks; "
                "give one number per task, or one number for all"
            )

    def load(self) -> PublishedSplits:
        return self.data.load()

    def use_seed(self, seed: int) -> None:
        super().use_seed(seed)
        self.data.use_seed(seed)

    def _settings(self) -> dict[str, Any]:
        # The seed of the wrapped module is not an argument here, and may differ from this one.
        return {**super()._settings(), "data": self.data._settings()}

    def _make(self) -> FederatedData:
        self.data.setup()
        data = self.data.federated
        if data.train.classes.ndim > 1:
            raise FlsuiteError(
                "TaskSequence needs one class per sample, but this data has several labels; "
                "choose other data"
            )
        classes, needed = data.spec.num_classes, self.tasks * self.classes_per_task
        if classes < needed:
            raise FlsuiteError(
                f"TaskSequence: {self.tasks} tasks of {self.classes_per_task} classes need "
                f"{needed} classes, but the data has {classes}; lower tasks or classes_per_task"
            )

        # One per client outside the federation, too.
        sequences = self._sequences(classes, len(data.train.rows))
        _check_samples(data, sequences)
        starts = tuple(accumulate(self._lengths()[:-1], initial=1))
        return _TaskData.of(data, sequences, starts)

    def _lengths(self) -> list[int]:
        """Return the rounds of each task."""
        if isinstance(self.rounds_per_task, int):
            return [self.rounds_per_task] * self.tasks
        return plain(list(self.rounds_per_task))

    def _sequences(self, classes: int, clients: int) -> tuple[Groups, ...]:
        """Draw the groups of each client."""
        seed, used = self.partition_seed, self.tasks * self.classes_per_task

        def cut(order: np.ndarray) -> Groups:
            groups = order[:used].reshape(self.tasks, -1).tolist()
            return tuple(tuple(sorted(group)) for group in groups)

        # Drawn even if not used, because nothing else uses its generator.
        pool = cut(numpy_generator(seed, "tasks/pool").permutation(classes))
        sequences = []
        for client in range(clients):
            # One generator per client, so its groups do not depend on the number of clients.
            rng = numpy_generator(seed, "tasks/client", client=client)
            if self.arrangement == "disjoint":
                sequences.append(pool)
            elif self.arrangement == "shuffled":
                sequences.append(tuple(pool[task] for task in rng.permutation(self.tasks)))
            else:
                sequences.append(cut(rng.permutation(classes)))
        return tuple(sequences)


def _check_samples(data: FederatedData, sequences: tuple[Groups, ...]) -> None:
    """Refuse a client without training samples in one of its tasks."""
    for client, groups in enumerate(sequences):
        # A client without samples of a task would fail in the middle of the run.
        counts = data.class_counts(client)
        for task, group in enumerate(groups):
            if not counts[list(group)].any():
                raise FlsuiteError(
                    f"TaskSequence: client {client} has no sample of task {task}, "
                    f"classes {list(group)}; set data.data.partition to IID or to one with a "
                    "larger alpha, or lower data.data.clients"
                )
