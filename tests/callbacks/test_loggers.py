"""CSV, TensorBoard and MLflow: one log for a run, however often it is resumed."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger

from flsuite.callbacks.logger_links import _mlflow_name, _read_rows
from tests.conftest import classifier, digits, trainer


def run_in_parts(folder: Path, make: Callable[[], Logger], *parts: int) -> None:
    """Fit to each of these rounds in turn, with a new logger as a new process has."""
    for rounds in parts:
        made = trainer(rounds=rounds, logger=make(), run_dir=folder / "run")
        made.fit(classifier(), digits(3, train_samples=120), ckpt_path="last")


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


def mlflow_logger(folder: Path, **kwargs: Any) -> MLFlowLogger:
    pytest.importorskip("mlflow")
    return MLFlowLogger(
        tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=str(folder), **kwargs
    )


@pytest.mark.long
def test_mlflow_goes_on_in_one_run(tmp_path: Path) -> None:
    run_in_parts(tmp_path, lambda: mlflow_logger(tmp_path), 2, 4)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FINISHED" and run.info.run_name == "FedAvg-3"
    assert run.data.params["aggregator/class_path"] == "flsuite.aggregators.FedAvg"
    history = client.get_metric_history(run.info.run_id, "test/accuracy")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert "test/accuracy.0" in run.data.metrics


@pytest.mark.long
def test_mlflow_starts_anew_where_its_run_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Older versions of MLflow replace the handlers of the root logger.
    monkeypatch.setattr(logging.getLogger("flsuite"), "handlers", [caplog.handler])
    run_in_parts(tmp_path, lambda: mlflow_logger(tmp_path), 1)
    (tmp_path / "other").mkdir()
    run_in_parts(tmp_path, lambda: mlflow_logger(tmp_path / "other"), 2)
    assert "MLflow: the run is missing" in caplog.text


def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"loss,step\n0.5,1\n\xff,2\n0.2,nan\n0.1,3")
    rows = _read_rows(tmp_path)
    assert rows == [{"loss": 0.5, "step": 1.0}, {"step": 2.0}], "half a row is none"
