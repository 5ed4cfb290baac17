"""A round touches its cohort alone, however many clients are registered."""

import io
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsuite.analysis import read_partition
from flsuite.callbacks import FederationCallback
from flsuite.common.files import csv_of
from flsuite.data import IID, Synthetic
from flsuite.data.federated import Rows
from flsuite.federation import Synchronous
from flsuite.models import MLP, Classifier
from flsuite.runs import run as run_module
from flsuite.runs.partition import partition_table, write_partition
from tests.conftest import trainer

ROWS = torch.arange(20)


class Shared:
    """An index of any number of clients, all with the same rows. It notes who is looked up."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.seen: set[int] = set()
        self.whole = 0  # times that something about all clients was read

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> Tensor:
        self.seen.add(client)
        return ROWS

    def lengths(self) -> Tensor:
        self.whole += 1
        return torch.full((self.clients,), len(ROWS))

    @property
    def values(self) -> Tensor:
        raise AssertionError("the rows of all clients were read")

    offsets = values


class Watch(FederationCallback):
    """Notes the cohorts, and the most memory that Python and NumPy took in a round."""

    def __init__(self) -> None:
        self.cohort: set[int] = set()
        self.peaks: list[int] = []

    def on_round_start(self, run: Any, round: int, cohort: Any) -> None:
        self.cohort |= set(cohort)
        self.start = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    def on_round_recorded(self, run: Any, round: int, named: Any) -> None:
        self.peaks.append(tracemalloc.get_traced_memory()[1] - self.start)


def fit(clients: int) -> tuple[Watch, Shared, Shared]:
    module = Synthetic(samples=100, clients=1, batch_size=10, val_fraction=0.0)
    module.setup()
    train, test = Shared(clients), Shared(clients)
    data = module.federated
    data.train.rows, data.test.rows = train, test  # type: ignore[assignment]

    watch = Watch()
    few: dict[str, Any] = {"score_clients": 3, "seed": 0}  # the seed of the set-up
    made = trainer(rounds=2, schedule=Synchronous(5), callbacks=[watch], **few)
    tracemalloc.start()
    try:
        made.fit(Classifier(MLP(hidden=(8,))), module)
    finally:
        tracemalloc.stop()
    return watch, train, test


def test_a_round_touches_its_cohort_alone() -> None:
    watch, train, test = fit(300_000)
    assert train.seen == watch.cohort and len(watch.cohort) == 10
    assert test.seen == {0, 1, 2}
    assert train.whole == 1 and test.whole == 0, "once, when the run is set up"

    few, *_ = fit(1000)
    # A byte per client would be three times as much.
    assert max(watch.peaks[1:]) < max(few.peaks[1:]) + 100_000


def test_a_checkpoint_does_not_grow_with_the_registered_clients(tmp_path: Path) -> None:
    sizes = []
    for clients in (50, 2000):
        folder = tmp_path / str(clients)
        few: dict[str, Any] = {"score_clients": 3, "evaluate_every": 2}
        made = trainer(rounds=2, schedule=Synchronous(5), run_dir=folder, **few)
        data = Synthetic(samples=4000, clients=clients, val_fraction=0.0, batch_size=8)
        made.fit(Classifier(MLP(hidden=(8,))), data)
        sizes.append((folder / "checkpoints" / "last.ckpt").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 500


def test_the_last_round_scores_all_clients_up_to_a_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    texts = []
    for most in (10, 9):
        monkeypatch.setattr(run_module, "_MOST_SCORED", most)
        with caplog.at_level(logging.INFO, logger="flsuite"):
            made = trainer(rounds=1, score_clients=3, run_dir=tmp_path / str(most))
            data = Synthetic(samples=500, clients=10, val_fraction=0.0)
            made.fit(Classifier(MLP(hidden=(8,))), data)
        texts.append((tmp_path / str(most) / "metrics.csv").read_text())
    assert "all_clients/" in texts[0] and "all_clients/" not in texts[1]
    assert "flsuite test scores all 10" in caplog.text
    assert len(made.test()) == 11


@pytest.mark.parametrize("is_multilabel", [False, True])
def test_the_fast_table_is_the_one_of_pandas(is_multilabel: bool, tmp_path: Path) -> None:
    module = Synthetic(samples=400, classes=3, clients=7, val_fraction=0.2)
    module.setup()
    data = module.federated
    object.__setattr__(data.spec, "class_names", ('a "b", c', "50%", "=1+1"))
    if is_multilabel:
        data.train.y = torch.nn.functional.one_hot(data.train.y, 3)
        data.test.y = torch.nn.functional.one_hot(data.test.y, 3)
    text = io.StringIO()
    write_partition(text, data)

    table = partition_table(data)
    assert text.getvalue() == csv_of(table) and ",'=1+1," in text.getvalue()
    (tmp_path / "partition.csv").write_text(text.getvalue())
    assert table.equals(read_partition(tmp_path)) and "=1+1" in table["class"].to_numpy()
    assert table["samples"].sum() == 400


def test_rows_are_a_sequence_of_index_arrays() -> None:
    rows = Rows.of_clients(np.array([2, 0, -1, 2, 0, 9]), 4)
    assert [own.tolist() for own in rows] == [[1, 4], [], [0, 3], []]
    assert rows[-2].tolist() == [0, 3] and [len(own) for own in rows[1:3]] == [0, 2]
    assert rows.lengths().tolist() == [2, 0, 2, 0]
    assert rows.client_of(6).tolist() == [2, 0, -1, 2, 0, -1]
    assert Rows.of(rows) is rows
    assert [own.tolist() for own in Rows.of(list(rows))] == [own.tolist() for own in rows]
    with pytest.raises(IndexError):
        rows[4]


def test_a_partition_makes_no_array_per_client() -> None:
    labels = np.zeros(200_000, np.int64)
    parts = IID()(labels, 100_000, np.random.default_rng(0))
    assert isinstance(parts, Rows)
    assert len(np.unique(parts.values)) == 200_000 and set(parts.lengths().tolist()) == {2}
