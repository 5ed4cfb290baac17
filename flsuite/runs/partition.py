"""The split of a dataset among clients, as rows of tables."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from flsuite.data.federated import FederatedData
from flsuite.data.task_data import TaskData

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "PARTITION_COLUMNS",
    "TASK_COLUMNS",
    "partition_rows",
    "partition_table",
    "task_rows",
    "task_table",
]

PARTITION_COLUMNS = ("client", "split", "class", "samples")
TASK_COLUMNS = ("client", "task", "first_round", "class", "samples")


def partition_rows(data: FederatedData) -> Iterator[tuple[int, str, str, int]]:
    """Yield client, split, class name and number of samples.

    For multi-label data, the number is that of positive samples per label.
    """
    names = data.spec.class_names or tuple(str(c) for c in range(data.spec.num_classes))
    parts = (
        ("train", data.train.y, data.train_index),
        ("val", data.train.y, data.val_index),
        ("test", data.test.y, data.test_index),
    )

    for client in range(data.clients):
        for split, y, rows in parts:
            own = y[rows[client]]
            if y.ndim == 1:
                counts = torch.bincount(own, minlength=len(names))
            else:
                counts = own.sum(0, dtype=torch.int64)
            for name, count in zip(names, counts, strict=True):
                yield client, split, name, int(count)


def task_rows(data: TaskData) -> Iterator[tuple[int, int, int, str, int]]:
    """Yield client, task, first round of the task, class name and number of training samples."""
    names = data.spec.class_names or tuple(str(c) for c in range(data.spec.num_classes))
    for client, groups in enumerate(data.sequences):
        counts = data.class_counts(client).tolist()
        for task, (group, start) in enumerate(zip(groups, data.starts, strict=True)):
            for c in group:
                yield client, task, start, names[c], counts[c]


def partition_table(data: FederatedData) -> "pd.DataFrame":
    """Return the content of a run's ``partition.csv``."""
    import pandas as pd

    return pd.DataFrame(partition_rows(data), columns=list(PARTITION_COLUMNS))


def task_table(data: TaskData) -> "pd.DataFrame":
    """Return the content of a run's ``tasks.csv``."""
    import pandas as pd

    return pd.DataFrame(task_rows(data), columns=list(TASK_COLUMNS))
