"""Sequences of tasks: every client meets the classes in groups, one group after another."""

from itertools import accumulate
from typing import Any, Literal

import numpy as np

from flsuite.arguments import PositiveInt, check_init
from flsuite.data.arguments import plain
from flsuite.data.federated import FederatedData
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import PublishedSplits
from flsuite.data.task_data import Groups, TaskData
from flsuite.errors import FlsuiteError
from flsuite.random import numpy_generator

__all__ = ["Arrangement", "Groups", "TaskData", "TaskSequence"]

Arrangement = Literal["disjoint", "shuffled", "heterogeneous"]


class TaskSequence(FederatedDataModule):
    """Any dataset as class-incremental federated learning: one group of classes per task.

    The wrapped data module splits its samples over clients as always. In each task, a client trains
    on those of its samples whose class is in the task's group. Scores are on the classes met so
    far. Those of the federation are on the classes that any client has met, and those of a client
    are on its own. The model does not receive the number of the task as an input, so that it has to
    tell all classes apart.

    With one task of all classes, this is the wrapped data module.

    Args:
        data: The wrapped data module. Its partition should give every client samples of every class
            that the client is to meet. The default, IID, does.
        tasks: Number of groups that each client meets.
        classes_per_task: Number of classes per group.
        rounds_per_task: Rounds per task, one number for all or one per task. The last task lasts
            until the run ends.
        arrangement: With ``disjoint``, the classes are cut into groups once, and all clients meet
            them in the same order. With ``shuffled``, they are cut once, and every client meets
            them in an order of its own. With ``heterogeneous``, each client's groups are drawn from
            all classes, so that groups of two clients may overlap. No client meets a class twice.
        seed: The seed of the groups and their order. Default: the run's seed.

    Raises:
        FlsuiteError: If there are fewer classes than ``tasks * classes_per_task``, or a client has
            no sample of a group.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        tasks: PositiveInt = 5,
        classes_per_task: PositiveInt = 2,
        rounds_per_task: PositiveInt | list[int] = 10,
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

    @property
    def clients(self) -> int:
        """Return the number of clients of the wrapped data module."""
        return self.data.clients

    @clients.setter
    def clients(self, clients: int) -> None:
        self.data.clients = clients

    @property
    def batch_size(self) -> int:
        """Return the batch size of the wrapped data module."""
        return self.data.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self.data.batch_size = batch_size

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_init(self, TaskSequence)
        lengths = self._lengths()
        if len(lengths) != self.tasks:
            raise FlsuiteError(
                f"TaskSequence: rounds_per_task has {len(lengths)} numbers for {self.tasks} tasks; "
                "give one number per task, or one number for all"
            )
        if min(lengths) < 1:
            raise FlsuiteError(
                f"TaskSequence: rounds_per_task must be at least 1, got {min(lengths)}"
            )

    def load(self) -> PublishedSplits:
        return self.data.load()

    def use_seed(self, seed: int) -> None:
        super().use_seed(seed)
        self.data.use_seed(seed)

    def _settings(self) -> dict[str, Any]:
        # The seed of the wrapped module is not an argument here, and may differ from that of the
        # tasks.
        return {**super()._settings(), "data": self.data._settings()}

    def _make(self) -> FederatedData:
        self.data.setup()
        data = self.data.federated
        if data.train.classes.ndim > 1:
            raise FlsuiteError(
                "TaskSequence needs one class per sample, and this data has several labels; "
                "choose other data"
            )
        classes, needed = data.spec.num_classes, self.tasks * self.classes_per_task
        if classes < needed:
            raise FlsuiteError(
                f"TaskSequence: {self.tasks} tasks of {self.classes_per_task} classes need "
                f"{needed} classes, and the data has {classes}; lower tasks or classes_per_task"
            )

        sequences = self._sequences(classes, data.clients)
        _check_samples(data, sequences)
        starts = tuple(accumulate(self._lengths()[:-1], initial=1))
        return TaskData.of(data, sequences, starts)

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

        # Drawn even if it is not used: nothing else draws from its generator.
        pool = cut(numpy_generator(seed, "tasks/pool").permutation(classes))
        sequences = []
        for client in range(clients):
            # One generator per client: its groups do not depend on how many others there are.
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
        # A client that has nothing to train on in a task would fail in the middle of the run.
        counts = data.class_counts(client)
        for task, group in enumerate(groups):
            if not counts[list(group)].any():
                raise FlsuiteError(
                    f"TaskSequence: client {client} has no sample of task {task}, "
                    f"classes {list(group)}; set data.data.partition to IID or to one with a "
                    "larger alpha, or lower data.data.clients"
                )
