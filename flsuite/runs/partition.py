"""The split of a run's data between its clients, as tables."""

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

import torch
from torch import Tensor

from flsuite.common.files import escaped, unescaped
from flsuite.data.federated import DataSplit, FederatedData

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("client", "split", "class", "samples")
_SPLITS = ("train", "val", "test")
_CLIENTS_AT_A_TIME = 10_000  # bounds memory


def write_partition(file: TextIO, data: FederatedData) -> None:
    """Write ``partition.csv``: client, split, class name and number of samples.

    For multi-label data, the number counts the positive samples per label.
    """
    cells = [f",{split},{_quoted(name)}," for split in _SPLITS for name in data.spec.names]
    # One template per client instead of one call per row: a million clients have millions of rows.
    of_client = "".join("%d" + cell.replace("%", "%%") + "%d\n" for cell in cells)

    file.write(",".join(_COLUMNS) + "\n")
    for first, counts in _counts(data):
        clients = torch.arange(first, first + len(counts))[:, None].expand_as(counts)
        numbers = torch.stack([clients, counts], dim=2).flatten().tolist()
        file.write(of_client * len(counts) % tuple(numbers))


def partition_table(data: FederatedData) -> "pd.DataFrame":
    """Return the content of a run's ``partition.csv``."""
    import pandas as pd

    text = io.StringIO()
    write_partition(text, data)
    text.seek(0)
    table = pd.read_csv(text, dtype={"class": str}, keep_default_na=False)
    return table.assign(**{"class": table["class"].map(unescaped)})


def samples_table(data: FederatedData) -> "pd.DataFrame":
    """Return which client has which sample: columns ``sample``, ``client`` and ``split``.

    ``FromFile`` reads it. A published validation split belongs to no client, and has no rows.
    """
    import pandas as pd

    splits = {name: getattr(data, name) for name in _SPLITS}
    owned = {name: split for name, split in splits.items() if split is not None and split.rows}
    return pd.concat(
        pd.DataFrame(
            {
                "sample": split.numbers[split.rows.values].numpy(),
                "client": split.rows.owners().numpy(),
                "split": name,
            }
        )
        for name, split in owned.items()
    )


def task_table(data: FederatedData) -> "pd.DataFrame":
    """Return the content of a run's ``tasks.csv``.

    Its columns are client, task, first round of the task, class name and number of training
    samples.
    """
    import pandas as pd

    names, rows = data.spec.names, []
    for client, groups in enumerate(data.sequences):
        counts = data.class_counts(client).tolist()
        for task, (group, start) in enumerate(zip(groups, data.starts, strict=True)):
            rows += [(client, task, start, names[c], counts[c]) for c in group]
    return pd.DataFrame(rows, columns=["client", "task", "first_round", "class", "samples"])


def _counts(data: FederatedData) -> Iterator[tuple[int, Tensor]]:
    """Yield the first client of each group, and the counts of the group.

    Counts are int64 ``(clients, splits * classes)``, ordered by split and then by class.
    """
    classes = data.spec.num_classes
    for first in range(0, data.clients, _CLIENTS_AT_A_TIME):
        last = min(first + _CLIENTS_AT_A_TIME, data.clients)
        splits = (data.train, data.val, data.test)
        of_splits = [_count(split, first, last, classes) for split in splits]
        yield first, torch.cat(of_splits, dim=1)


def _count(split: DataSplit | None, first: int, last: int, classes: int) -> Tensor:
    """Return the samples of each class per client, int64 ``(clients, classes)``."""
    counts = torch.zeros(last - first, classes, dtype=torch.int64)
    if split is None or not len(split.rows):
        return counts
    rows = split.rows.part(first, last)
    labels, owners = split.classes[rows.values], rows.owners()
    if labels.ndim == 1:
        return torch.bincount(owners * classes + labels, minlength=counts.numel()).view_as(counts)
    return counts.index_add_(0, owners, labels.long())


def _quoted(name: str) -> str:
    """Return a cell of a CSV file, escaped and quoted if necessary."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([escaped(name)])
    return line.getvalue()
