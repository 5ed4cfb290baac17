"""A split that a file states, such as the split of another system."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator

from flsuite.common.arguments import Settings
from flsuite.common.errors import FlsuiteError
from flsuite.data.datasets.csv_files import (
    digest_of_columns,
    read_columns,
    refuse_cells,
    whole_numbers,
)
from flsuite.data.federated import PublishedSplits
from flsuite.data.partitions.base import Array, AssignedPartition

_SPLITS = "train", "val", "test"
_REMEDY = (
    "; partition.csv of a run has counts alone, and flsuite partition --config RUN/config.yaml "
    "writes which samples they are"
)


@dataclass
class FromFile(AssignedPartition, Settings):
    """The split of a CSV file that says which client has which sample.

    The file has a header and the columns ``sample``, ``client`` and, where needed, ``split``. The
    published training samples have the numbers from 0, and the published test samples follow.
    ``flsuite partition`` writes such a file for the split of a config or of a run.

    Without ``split``, all rows are training samples: each client holds out its validation samples
    and is tested on its class mix, as with any partition. With ``split``, which is ``train``,
    ``val`` or ``test``, a client has the samples of each split that the file states. A published
    test sample may train, and a training sample may test. If the file has rows of ``val``,
    ``val_fraction`` has no effect.

    A sample without a row stays in its published split, and no client has it.

    Take it to repeat a study on its own split, also that of another system.

    FL-bench's ``partition.pkl`` becomes such a file as follows. A pickle can run code, so do this
    only with a file that you trust::

        clients = pickle.load(open("partition.pkl", "rb"))["data_indices"]
        rows = [(s, c, name) for c, own in enumerate(clients) for name in own for s in own[name]]
        pd.DataFrame(rows, columns=["sample", "client", "split"]).to_csv("samples.csv", index=False)

    Args:
        path: The CSV file. A relative path is relative to the working directory.

    Raises:
        FlsuiteError: If the file is not such a table, names a sample twice or one that does not
            exist, or has another number of clients than the run.
    """

    needs_labels = False

    path: str | Path

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = "sample", "client"
        columns = read_columns(
            self.path, needed, (*needed, "split"), words=("split",), remedy=_REMEDY
        )
        self.content_digests = {"path": digest_of_columns(columns)}
        self._file = Path(self.path).expanduser()
        self._samples, self._clients = (whole_numbers(columns, n, self._file) for n in needed)
        self._splits = columns.get("split", np.full(len(self._samples), "train"))
        self._check_rows()

    def arranged(self, published: PublishedSplits) -> PublishedSplits:
        """Return the splits with the samples of the file's splits, owned by the file's clients."""
        sizes = len(published.train), len(published.test)
        owners = self._client_of(sum(sizes))
        split_of = np.repeat(["train", "test"], sizes).astype("U5")
        split_of[self._samples] = self._splits
        is_test, is_held = split_of == "test", split_of == "val"
        if is_test.all() or not is_test.any():
            raise FlsuiteError(f"{self._file} leaves no sample for training or for testing")

        train, test = (published.at(np.flatnonzero(kept)) for kept in (~is_test, is_test))
        ids, held = torch.from_numpy(owners), torch.from_numpy(is_held[~is_test])
        return replace(
            published,
            train=replace(train, ids=ids[~is_test], held=held if held.any() else None),
            # Without test samples in the file, clients are tested on their class mix.
            test=replace(test, ids=ids[is_test] if "test" in self._splits else None),
        )

    def client_of(self, labels: Array, clients: int, rng: Generator, ids: Array | None) -> Array:
        count = self._clients.max() + 1
        if clients != count:
            raise FlsuiteError(
                f"data.clients is {clients}, but {self._file} has {count}; set it to {count}"
            )
        return self._client_of(len(labels)) if ids is None else ids

    def _client_of(self, samples: int) -> Array:
        """Return the client of each sample, or -1 if it has no row, int64 ``(samples,)``."""
        expected = f"a number below {samples}, the samples of the data"
        refuse_cells(self._samples >= samples, self._samples, self._file, "sample", expected)
        owners = np.full(samples, -1)
        owners[self._samples] = self._clients
        return owners

    def _check_rows(self) -> None:
        """Refuse rows that contradict each other, and a client without training samples."""
        rows = len(self._samples)
        is_repeated = np.ones(rows, dtype=bool)
        is_repeated[np.unique(self._samples, return_index=True)[1]] = False
        for name, values, is_wrong, expected in (
            ("split", self._splits, ~np.isin(self._splits, _SPLITS), "train, val or test"),
            ("sample", self._samples, is_repeated, "a sample that no row above has"),
            ("client", self._clients, self._clients >= rows, f"a number below {rows}, the rows"),
        ):
            refuse_cells(is_wrong, values, self._file, name, expected)

        trained = np.bincount(
            self._clients[self._splits == "train"], minlength=self._clients.max() + 1
        )
        if not trained.all():
            raise FlsuiteError(
                f"{self._file}: client {trained.argmin()} has no training sample; give it one, or "
                "number the clients from 0 without gaps"
            )
