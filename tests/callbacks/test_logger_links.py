"""Logs of runs that were killed: after a resume, every round is there exactly once."""

import csv
import logging
import shutil
import sqlite3
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from matplotlib.figure import Figure

from flsuite.callbacks import FederationCallback, RoundLogger
from flsuite.callbacks.logger_links import TensorBoardLink, _mlflow_name, _read_rows
from flsuite.callbacks.wandb_link import logged_rows
from flsuite.runs.fork import Fork
from flsuite.runs.run import Run
from flsuite.trainer import FederatedTrainer
from tests.callbacks.wandb_files import finished
from tests.callbacks.wandb_server import WandbServer
from tests.conftest import classifier, digits, trainer

LOGGED, ROUNDS = 2, 3


class Draws(FederationCallback):
    """Draws a picture in every round."""

    affects = "nothing"

    def on_round_end(self, run: Run, round: int) -> None:
        run.log_picture("mine", Figure())


class Dies(FederationCallback):
    """Ends the run when a round was logged and not yet saved."""

    affects = "nothing"

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        if round == LOGGED:
            raise KeyboardInterrupt


class Log(ABC):
    """The log of a run that is killed."""

    def __init__(self, folder: Path, server: WandbServer | None = None) -> None:
        self.folder, self.server = folder, server

    @abstractmethod
    def make(self) -> Logger:
        """Return a logger, as a new process has it."""

    def lose(self, after: int) -> None:
        """Lose what was sent after this round, as a kill does with a buffer."""
        raise NotImplementedError("a kill loses nothing")

    @abstractmethod
    def scores(self) -> list[tuple[int, float]]:
        """Return each round in the log, in its order there, with the accuracy on test data."""

    def wait(self) -> None:  # noqa: B027  (most are written at once)
        """Wait until the log is on the disk."""


class CSV(Log):
    def make(self) -> Logger:
        return CSVLogger(self.folder, version="log")

    def lose(self, after: int) -> None:
        lines = self._path.read_text().splitlines(keepends=True)
        self._path.write_text("".join(lines[: after + 1]) + lines[after + 1][:20])

    def scores(self) -> list[tuple[int, float]]:
        with self._path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [(int(row["step"]), float(row["test/accuracy"])) for row in rows]

    @property
    def _path(self) -> Path:
        return self.folder / "lightning_logs" / "log" / "metrics.csv"


class TensorBoard(Log):
    def make(self) -> Logger:
        return TensorBoardLogger(self.folder, version="log", prefix="fl")

    def scores(self) -> list[tuple[int, float]]:
        events = self.events()
        return [(event.step, event.value) for event in events.Scalars("fl-test/accuracy")]

    def events(self) -> Any:
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        return reader.EventAccumulator(str(self._path), {"images": 0}).Reload()  # all of them

    @property
    def _path(self) -> Path:
        return self.folder / "lightning_logs" / "log"


class MLflow(Log):
    def make(self) -> Logger:
        pytest.importorskip("mlflow")
        return MLFlowLogger(tracking_uri=self._uri, artifact_location=str(self.folder / "files"))

    def lose(self, after: int) -> None:
        connection = sqlite3.connect(self.folder / "mlflow.db")
        with connection:
            connection.execute("DELETE FROM metrics WHERE step > ?", (after,))
        connection.close()

    def scores(self) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.run().info.run_id, "test/accuracy")
        return [(metric.step, metric.value) for metric in history]

    def run(self) -> Any:
        experiment = self.client.get_experiment_by_name("flsuite")
        assert experiment is not None, "not lightning_logs"
        (run,) = self.client.search_runs([experiment.experiment_id])
        return run

    @property
    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(self._uri)

    @property
    def _uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"


class WandbOffline(Log):
    def make(self) -> Logger:
        return WandbLogger(offline=True, save_dir=self.folder)

    def lose(self, after: int) -> None:
        (path,) = self._paths
        whole = path.read_bytes()

        def rows(size: int) -> int:
            path.write_bytes(whole[:size])
            return len(list(logged_rows(path)))

        # The partition is a row too, and half of the next row is there.
        rows(bisect_right(range(len(whole)), after + 1, key=rows) - 9)

    def wait(self) -> None:
        finished(self._paths[-1])

    def scores(self) -> list[tuple[int, float]]:
        rows = [row for path in self._paths for row in logged_rows(path)]
        steps = [step for step, _ in rows]
        assert steps == sorted(set(steps)), "wandb sync leaves out a step that goes back"
        return [(row["round"], row["test/accuracy"]) for _, row in rows if "test/accuracy" in row]

    @property
    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("wandb/offline-run-*/*.wandb"))


class WandbOnline(Log):
    def make(self) -> Logger:
        return WandbLogger(save_dir=self.folder)

    def lose(self, after: int) -> None:
        (run,) = self.server.runs
        del self.server.history[run][after + 1 :]
        self.server.summaries[run] = dict(self.server.history[run][-1])

    def scores(self) -> list[tuple[int, float]]:
        (run,) = self.server.runs
        assert self.server.runs[run]["project"] == "flsuite", "not lightning_logs"
        return [
            (row["round"], row["test/accuracy"])
            for row in self.server.history[run]
            if "test/accuracy" in row
        ]


CASES = [
    pytest.param(CSV, LOGGED, id="CSV-ahead"),
    pytest.param(CSV, 1, id="CSV-lost"),
    pytest.param(TensorBoard, LOGGED, id="TensorBoard-ahead"),
    pytest.param(MLflow, 1, id="MLflow-lost", marks=pytest.mark.long),
    pytest.param(WandbOffline, 1, id="WandbOffline-lost"),
    pytest.param(WandbOnline, 1, id="WandbOnline-lost", marks=pytest.mark.long),
]


def fit(
    folder: Path, logger: Logger | bool, *more: Any, rounds: int = ROUNDS, fork: Fork | None = None
) -> FederatedTrainer:
    callbacks = [RoundLogger(), *more]
    made = trainer(rounds=rounds, logger=logger, run_dir=folder, callbacks=callbacks, fork=fork)
    made.fit(classifier(), digits(3, train_samples=120), ckpt_path="last")
    return made


def expected(made: FederatedTrainer) -> list[tuple[int, float]]:
    """Return the accuracy on test data of each round, as the run's table has it."""
    name = ("global", "test", "accuracy")
    return [
        (row.round, pytest.approx(row.value, rel=1e-6))
        for row in made.run.folder.table.rows
        if row[5:8] == name
    ]


@pytest.mark.parametrize(("kind", "kept"), CASES)
def test_every_round_is_there_once(
    kind: type[Log], kept: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The log of a killed run lacks rounds that are saved, or has one that is not."""
    server = request.getfixturevalue("wandb_server") if kind is WandbOnline else None
    log = kind(tmp_path / "log", server)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", log.make(), Draws(), Dies())
    log.wait()
    assert [round for round, _ in log.scores()] == [1, 2]
    if kept < LOGGED:
        log.lose(kept)
        assert [round for round, _ in log.scores()][:kept] == [*range(1, kept + 1)]

    made = fit(tmp_path / "run", log.make(), Draws())
    log.wait()
    assert log.scores() == expected(made) and len(log.scores()) == ROUNDS
    if isinstance(log, WandbOffline):  # pictures are with the numbers of their round
        rows = [row for _, row in logged_rows(log._paths[-1]) if "mine/_type" in row]
        assert rows and all("test/accuracy" in row for row in rows)


class Logs(FederationCallback):
    """Sends a row of its own to the logger in each round."""

    affects = "nothing"

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        run.loggers[0].log_metrics({"mine": 10.0 * round}, step=round)


def test_rows_that_a_callback_has_logged_stay(tmp_path: Path) -> None:
    log = CSV(tmp_path / "log")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", log.make(), Logs(), Dies())
    fit(tmp_path / "run", log.make(), Logs())
    with log._path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mine"]) for row in rows if row["mine"]] == [10, 20, 30]
    assert [row["step"] for row in rows if row["wall_s"]] == ["1", "2", "3"]


def test_a_logger_that_is_new_gets_the_earlier_rounds(tmp_path: Path) -> None:
    """So does one whose folder is gone."""
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", False, Dies())
    log = TensorBoard(tmp_path / "log")
    made = fit(tmp_path / "run", log.make(), Draws())
    assert log.scores() == expected(made) and len(log.scores()) == ROUNDS
    events = log.events()
    assert set(events.Tags()["images"]) == {"partition", "clients/heatmap", "confusion", "mine"}
    assert [image.step for image in events.Images("partition")] == [0]
    assert [image.step for image in events.Images("mine")] == [2, 3], "others are not drawn"
    assert "hp_metric" not in events.Tags()["scalars"]


@pytest.mark.long
def test_mlflow_has_the_settings_and_the_pictures_and_starts_anew_where_its_run_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = MLflow(tmp_path), MLflow(tmp_path / "other")
    fit(tmp_path / "run", log.make())
    pictures = (tmp_path / "files").glob("*/artifacts/pictures/**/*.png")
    assert {path.stem for path in pictures} == {"partition", "heatmap", "confusion"}
    run = log.run()
    assert run.info.status == "FINISHED" and run.info.run_name == "FedAvg-3"
    assert run.data.params["aggregator/class_path"] == "flsuite.aggregators.FedAvg"
    assert "test/accuracy.0" in run.data.metrics

    # Older versions of MLflow replace the handlers of the root logger.
    monkeypatch.setattr(logging.getLogger("flsuite"), "handlers", [caplog.handler])
    other.folder.mkdir()
    fit(tmp_path / "run", other.make(), rounds=ROUNDS + 1)
    assert "MLflow: the run is missing" in caplog.text


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("test/accuracy/0", "test/accuracy.0"),
        ("test/all_clients/accuracy", "test/all_clients.accuracy"),
        ("client/3/test/task_accuracy/1", "client/3/test/task_accuracy.1"),
        ("test/accuracy/köln, (x)", "test/accuracy.k_ln_ _x_"),
        ("bytes", "bytes"),
    ],
)
def test_names_that_every_store_of_mlflow_takes(name: str, stored: str) -> None:
    assert _mlflow_name(name) == stored


def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"loss,step\r\n0.5,1\r\n\xff,2\r\n0.2,nan\r\n0.1,3")
    rows = _read_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2], "half a row is none"
    assert rows[0] == {"loss": "0.5", "step": 1}


@pytest.mark.parametrize("kind", [CSV, TensorBoard])
def test_rounds_without_the_logger_are_sent_later(kind: type[Log], tmp_path: Path) -> None:
    """The resume in between has no logger. The checkpoint knows the last round that was sent."""
    log = kind(tmp_path / "log")
    fit(tmp_path / "run", log.make(), rounds=1)
    fit(tmp_path / "run", False, rounds=2)
    made = fit(tmp_path / "run", log.make())
    assert log.scores() == expected(made) and len(log.scores()) == ROUNDS


def test_a_prefix_is_not_added_again_by_a_resume(tmp_path: Path) -> None:
    log = CSV(tmp_path / "log")
    for rounds in (1, 2):
        fit(tmp_path / "run", CSVLogger(log.folder, version="log", prefix="fl"), rounds=rounds)
    with log._path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["fl-test/accuracy"]] == ["1", "2"]
    assert not [name for name in rows[0] if name.startswith("fl-fl-")]


def test_a_fork_has_a_log_of_its_own(tmp_path: Path) -> None:
    """It also has the rounds of its parent, whose log stays as it is."""
    ours, parents = WandbOffline(tmp_path / "ours"), WandbOffline(tmp_path / "parents")
    fit(tmp_path / "parent", parents.make(), rounds=2)
    fork = Fork(str(tmp_path / "parent"), 2)
    made = fit(tmp_path / "fork", ours.make(), fork=fork)
    parents.wait()
    ours.wait()
    assert ours.scores() == expected(made) and len(ours.scores()) == ROUNDS
    assert ours._paths[0].name != parents._paths[0].name, "the same run in W&B"


def test_a_log_whose_folder_is_gone_gets_all_rounds(tmp_path: Path) -> None:
    log = TensorBoard(tmp_path / "log")
    fit(tmp_path / "run", log.make(), rounds=2)
    shutil.rmtree(log.folder)
    made = fit(tmp_path / "run", log.make())
    assert log.scores() == expected(made) and len(log.scores()) == ROUNDS


def test_a_picture_that_cannot_be_stored_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(TensorBoardLink, "show", refuse)
    made = fit(tmp_path / "run", TensorBoard(tmp_path / "log").make())
    assert made.run.status == "success"
    assert "no partition (no space left)" in caplog.text
