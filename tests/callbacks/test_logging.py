"""The output of a run to loggers, the metrics table, callbacks and the terminal."""

import csv
import logging
import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from rich.console import Console

from flsuite.aggregators import FedBuff
from flsuite.callbacks import FederationCallback, RoundLogger, RoundProgress, progress
from flsuite.data import IID
from flsuite.federation import Asynchronous, Stragglers
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, trainer

ROUNDS = 2
WORK = ("virtual_s", "client_updates", "bytes")  # and total/bytes_up, total/bytes_down, wall_s


class Memory(Logger):
    """A logger that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int | None, dict[str, float]] = {}
        self.params: dict[str, Any] = {}

    name = "memory"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step not in self.rows
        self.rows[step] = dict(metrics)

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.params = params


def unsynchronised(**kwargs: Any) -> FederatedTrainer:
    """Return a trainer of a federation that does not wait, on a virtual clock."""
    schedule = Asynchronous(4, buffer_size=2, speeds=Stragglers())
    return trainer(aggregator=FedBuff(), schedule=schedule, **kwargs)


def work_so_far(made: FederatedTrainer) -> list[tuple[float, int, int]]:
    """Return virtual seconds, client updates and bytes at the end of each round."""
    assert made.run is not None
    rows = {row.round: row for row in made.run.folder.table.rows}
    return [(row.virtual_s, row.client_updates, row.bytes) for row in rows.values()]


# Other loggers and the table


def test_csv_logger_has_the_work_of_each_round(tmp_path: Path) -> None:
    made = unsynchronised(rounds=4, logger=CSVLogger(tmp_path, name="", version="log"))
    made.fit(classifier(), digits())
    with (tmp_path / "log" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [tuple(float(row[name]) for name in WORK) for row in rows] == work_so_far(made)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    for row in rows:
        sent = float(row["total/bytes_up"]) + float(row["total/bytes_down"])
        assert sent == float(row["bytes"])
    seconds = [float(row["wall_s"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_the_mean_of_the_clients_losses_weighs_samples() -> None:
    made = trainer(rounds=1)
    made.fit(classifier(), digits())
    numbers = {row[5:8]: row[8] for row in made.run.folder.table.rows}
    sizes = [numbers[str(c), "train", "samples"] for c in range(5)]
    losses = [numbers[str(c), "train", "loss"] for c in range(5)]
    expected = sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    assert numbers["global", "train", "loss"] == pytest.approx(expected)
    assert numbers["global", "train", "bytes_up"] == sum(
        numbers[str(c), "train", "bytes_up"] for c in range(5)
    )


@pytest.mark.parametrize(
    ("callbacks", "clients"),
    [([], 0), ([RoundLogger(per_client=4)], 0), ([RoundLogger(per_client=5)], 5)],
    ids=["default", "too many", "few"],
)
def test_clients_are_logged_one_by_one_on_request(
    callbacks: list[RoundLogger], clients: int
) -> None:
    memory = Memory()
    made = trainer(rounds=1, logger=memory, callbacks=callbacks)
    made.fit(classifier(), digits())
    logged = {name.split("/")[1] for name in memory.rows[1] if name.startswith("client/")}
    assert logged == set(map(str, range(clients)))
    assert "test/accuracy_client_worst" in memory.rows[1]


# The terminal


def test_only_the_federation_speaks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("", "lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            if (
                type(handler) is logging.StreamHandler
            ):  # it holds the stderr of the time of its import
                monkeypatch.setattr(handler, "stream", sys.stderr)
    made = trainer(rounds=ROUNDS, enable_progress_bar=True)
    made.fit(classifier(), digits())
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["round", f"{n}/{ROUNDS}", "5", "clients"] for n in (1, ROUNDS)
    ]
    assert all("train/loss" in line and "test/accuracy" in line for line in lines)
    assert out.startswith("test scores") and f"last round ({ROUNDS})" in out
    for trace in ("Trainer.fit", "GPU", "TPU", "Epoch", "it/s", "Tip"):
        assert trace not in out + err


@pytest.mark.parametrize(
    "limit", [{"rounds": 5}, {"max_client_updates": 10}], ids=["rounds", "work"]
)
def test_an_asynchronous_run_shows_its_clock(
    limit: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    made = unsynchronised(**limit, callbacks=[RoundProgress(interval=0.0)])
    made.fit(classifier(), digits())
    lines = capfd.readouterr().err.splitlines()

    rows = [row for row in made.run.folder.table.rows if row.scope == "global"]
    named = {(row.round, f"{row.split}/{row.metric}"): row.value for row in rows}
    assert len(lines) == 5
    for round, (line, work) in enumerate(zip(lines, work_so_far(made), strict=True), start=1):
        done = f"{round}/5" if "rounds" in limit else f"{round}"
        mean, most = named[round, "train/staleness"], named[round, "train/staleness_max"]
        parts = [
            f"round {done}",
            "2 clients",
            f"{work[0]:.1f} virtual s",
            f"{work[1]} client updates",
            f"staleness {mean:.1f} (max {most:.0f})",
            f"train/loss {named[round, 'train/loss']:.4f}",
        ]
        assert line.startswith("  ".join(parts))
        assert re.search(r"test/f1_macro 0\.\d{4}  \d:\d\d:\d\d left$", line)
    assert lines[-1].endswith("0:00:00 left") and named[5, "train/staleness_max"] > 0


class Fails(Callback):
    """Raises for all clients but the first."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        if loader.client:
            raise RuntimeError("unplugged")


@pytest.mark.parametrize("made", [trainer, unsynchronised])
def test_a_terminal_shows_bars_of_rounds_and_clients(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    made(rounds=2, callbacks=[RoundProgress()]).fit(classifier(), digits(clients=5))
    shown = screen.getvalue()
    assert "rounds" in shown and "clients" in shown and "2/2" in shown and "0:00:00 left" in shown
    assert re.search(r"test/accuracy 0\.\d{4}", shown)
    assert ("in flight" in shown) == ("virtual s" in shown) == (made is unsynchronised)


def test_clients_that_failed_are_not_counted_as_clients(capfd: pytest.CaptureFixture[str]) -> None:
    made = trainer(rounds=2, callbacks=[Fails(), RoundProgress(interval=0.0)])
    made.fit(classifier(), digits(clients=5))
    err = capfd.readouterr().err
    assert [line.split("  ")[:2] for line in err.splitlines() if re.match(r"round \d/2", line)] == [
        ["round 1/2", "1 client, 4 failed"],
        ["round 2/2", "1 client, 4 failed"],
    ]


def test_without_a_bar_nobody_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    trainer(rounds=1).fit(classifier(), digits())
    assert capfd.readouterr() == ("", "")


def test_the_default_logger_writes_into_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = trainer(rounds=1, logger=True, enable_checkpointing=True)
    for _ in range(2):
        made.fit(classifier(), digits())
        assert [path.name for path in tmp_path.iterdir()] == ["runs"]
        assert (made.run.folder.path / "lightning_logs" / "version_0").is_dir()


# Callbacks


class Hooks(FederationCallback):
    """Records calls of the federation's hooks and of each client's Trainer hooks."""

    fits: ClassVar[list[tuple[int, int, int]]] = []

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.batches = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.batches += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        Hooks.fits.append((loader.round, loader.client, self.batches - trainer.global_step))

    def on_federation_start(self, run: Any) -> None:
        self.heard.append(("start",))

    def on_round_start(self, run: Any, round: int, cohort: Any) -> None:
        self.heard.append(("round", round, tuple(cohort)))

    def on_client_end(self, run: Any, outcome: Any) -> None:
        self.heard.append(("client", outcome.update.client))

    def on_round_end(self, run: Any, round: int) -> None:
        self.heard.append(("round end", round, run.finished))
        run.log_metric("gap", round / 2)
        run.log_metric("gap", 7.0, scope=1, split="test")

    def on_evaluation_end(self, run: Any, round: int, split: str, scores: Any) -> None:
        self.heard.append(("scored", round, split, "accuracy" in scores["global"]))

    def on_round_recorded(self, run: Any, round: int, metrics: Any) -> None:
        self.heard.append(("recorded", round, metrics["train/gap"]))

    def on_federation_end(self, run: Any) -> None:
        self.heard.append(("end",))


def test_hooks_are_called_once_each_and_lightnings_on_a_fresh_copy() -> None:
    Hooks.fits.clear()
    hooks, memory = Hooks(), Memory()
    made = trainer(rounds=2, callbacks=[hooks, RoundLogger(per_client=3)], logger=memory)
    made.fit(classifier(), digits(clients=3, partition=IID()))
    rounds = [
        [
            ("round", n, (0, 1, 2)),
            *(("client", client) for client in range(3)),
            ("scored", n, "val", True),
            ("scored", n, "test", True),
            ("round end", n, n == 2),
            ("recorded", n, n / 2),
        ]
        for n in (1, 2)
    ]
    assert hooks.heard == [("start",), *rounds[0], *rounds[1], ("end",)]
    assert Hooks.fits == [(n, client, 0) for n in (1, 2) for client in range(3)], (
        "a batch count of its own in every fit"
    )
    assert hooks.batches == 0, "the configured object is not the one that a client's Trainer calls"
    rows = [row for row in made.run.folder.table.rows if row[7] == "gap"]
    assert [(row[0], *row[5:]) for row in rows] == [
        (1, "global", "train", "gap", 0.5),
        (1, "1", "test", "gap", 7.0),
        (2, "global", "train", "gap", 1.0),
        (2, "1", "test", "gap", 7.0),
    ]
    assert [memory.rows[n]["train/gap"] for n in (1, 2)] == [0.5, 1.0]
    assert memory.rows[2]["client/1/test/gap"] == 7.0
    assert memory.params["seed"] == 3 and memory.params["data"]["init_args"]["clients"] == 3


def test_the_end_is_told_when_a_run_breaks() -> None:
    class Breaks(Hooks):
        def on_round_end(self, run: Any, round: int) -> None:
            raise KeyboardInterrupt

    hooks = Breaks()
    with pytest.raises(KeyboardInterrupt):
        trainer(rounds=2, callbacks=[hooks]).fit(classifier(), digits(clients=2, partition=IID()))
    assert hooks.heard[-1] == ("end",) and hooks.heard.count(("end",)) == 1
