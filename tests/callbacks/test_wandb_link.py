"""A run's data in Weights & Biases, offline and online, and after a resume."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from lightning.pytorch.loggers import WandbLogger

from flsuite.analysis.groups import experiment_hash
from flsuite.callbacks import FederationCallback, StopAt
from flsuite.callbacks.loggers import client_rounds, confusion_counts
from flsuite.data.federated import DataSpec, DataSplit
from flsuite.federation.client.entries import Entries
from flsuite.models import MLP, Classifier
from flsuite.runs.run import Run
from tests.callbacks.test_logging import WORK, unsynchronised, work_so_far
from tests.callbacks.wandb_files import Recorded, recorded
from tests.callbacks.wandb_server import WandbServer
from tests.conftest import classifier, digits, equal_states, trainer

ROUNDS = 3
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
FINAL = {"clients/heatmap/_type", "confusion/_type"}


def offline(folder: Path, **kwargs: Any) -> WandbLogger:
    return WandbLogger(offline=True, project="flsuite", save_dir=folder, **kwargs)


# Offline


class Undrawable(FederationCallback):
    affects = "nothing"

    def on_round_end(self, run: Run, round: int) -> None:
        run.log_picture("mine", "no figure")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Recorded]]:
    """Run an experiment twice in one process, the second time with a picture that fails."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        import wandb

        for callbacks in ([StopAt("accuracy", 0.1)], [Undrawable()]):
            folder = tmp_path_factory.mktemp("wandb")
            made = trainer(
                rounds=ROUNDS, evaluate_every=2, logger=offline(folder), callbacks=callbacks
            )
            made.fit(classifier(), digits())
            assert wandb.run is None, "the next experiment would go on in this run"
            found.append((made, *recorded(folder)))
    return found


@pytest.fixture(scope="module")
def whole(fits: list[tuple[Any, Recorded]]) -> tuple[Any, Recorded]:
    """Return the run that has done all of its rounds."""
    return fits[1]


def test_one_row_a_round_without_a_chart_per_client(whole: tuple[Any, Recorded]) -> None:
    _, run = whole
    assert all("round" in row and "step" not in row for row in run.rows)
    assert [row["round"] for row in run.rounds] == [1, 2, 3], "a picture that fails costs no row"
    for row in run.rounds:
        assert {"train/loss", "wall_s"} <= row.keys()
        assert ({"val/accuracy", "test/accuracy"} <= row.keys()) == (row["round"] > 1)
        assert not [name for name in row if name.startswith("client/")]
    assert run.step_metrics["*"] == "round"
    assert run.steps == list(range(len(run.rows)))


def test_the_same_experiment_twice_is_two_runs(fits: list[tuple[Any, Recorded]]) -> None:
    (_, one), (_, other) = fits
    assert one.id != other.id and one.rounds[0]["train/loss"] == other.rounds[0]["train/loss"]


def test_the_config_has_settings_and_the_group_a_hash(whole: tuple[Any, Recorded]) -> None:
    _, run = whole
    assert run.config["model"]["class_path"] == "flsuite.models.Classifier"
    assert run.config["model"]["init_args"]["backbone"]["init_args"]["hidden"] == [16]
    assert run.config["data"]["init_args"]["partition"]["init_args"]["alpha"] == 0.5
    assert run.config["aggregator"]["class_path"] == "flsuite.aggregators.FedAvg"
    assert run.config["rounds"] == ROUNDS
    assert run.config["engine"]["class_path"] == "flsuite.federation.InProcess"
    assert run.group.startswith("FedAvg-") and len(run.group) == len("FedAvg-") + 8
    assert (run.name, run.job_type) == ("FedAvg-3", "fit")
    assert set(run.tags) == {"Digits", "Dirichlet(0.5)"}


def test_the_hash_of_a_group_is_that_of_settings_yaml(tmp_path: Path) -> None:
    def settings(name: str, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        made = trainer(rounds=1, run_dir=tmp_path / name, **kwargs)
        made.fit(classifier(), digits())
        return made.run.settings, yaml.safe_load((tmp_path / name / "settings.yaml").read_text())

    known, read = settings("one")
    assert experiment_hash(known) == experiment_hash(read)
    assert experiment_hash(settings("seed", seed=5)[0]) == experiment_hash(known)
    assert experiment_hash(settings("epochs", max_epochs=2)[0]) != experiment_hash(known)


def content(run: Recorded, row: dict[str, Any], key: str) -> Any:
    """Return the content of a table that a row refers to."""
    return json.loads((run.path.parent / "files" / row[f"{key}/path"]).read_text())


def test_clients_are_a_table_per_evaluation(whole: tuple[Any, Recorded]) -> None:
    made, run = whole
    assert [("clients/path" in row) for row in run.rounds] == [False, True, True]

    table = content(run, run.rounds[-1], "clients")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["client"] for row in rows] == list(range(5))
    values = {row[5:8]: row.value for row in made.run.folder.table.rows if row.round == 3}
    for row in rows:
        client = str(row["client"])
        assert row["samples"] == values[client, "train", "samples"]
        assert row["test/accuracy"] == pytest.approx(values[client, "test", "accuracy"])
        assert row["val/loss"] == pytest.approx(values[client, "val", "loss"])


def test_pictures_and_the_confusion_matrix(whole: tuple[Any, Recorded]) -> None:
    made, run = whole
    first, *_, last = run.rows
    assert first["partition/_type"] == "image-file" and first["round"] == 0
    assert last.keys() >= FINAL and last["round"] == 3
    assert last["clients/heatmap/_type"] == "image-file"

    counts = confusion_counts(made.run)
    assert counts is not None
    samples = len(made.federation.data.test)
    right = sum(counts.to_numpy().diagonal())
    assert counts.to_numpy().sum() == samples
    assert right / samples == pytest.approx(run.rounds[-1]["test/accuracy"])

    scores = client_rounds(made.run, "accuracy")
    assert list(scores.columns) == [2, 3] and list(scores.index) == [0, 1, 2, 3, 4]
    assert scores.notna().all(axis=None)


def test_a_model_with_predictions_of_its_own_has_a_confusion_matrix_too() -> None:
    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            return {"own": batch[0].sum(1)}

    made = trainer(rounds=1)
    made.fit(Predicts(MLP((4,)), lambda p: torch.optim.SGD(p, lr=0.1)), digits())
    counts = confusion_counts(made.run)
    assert counts is not None and counts.to_numpy().sum() == len(made.federation.data.test)


def test_the_resident_model_stays_the_global_one(whole: tuple[Any, Recorded]) -> None:
    made, _ = whole
    plain = trainer(rounds=ROUNDS, evaluate_every=2)
    plain.fit(classifier(), digits())
    assert equal_states(made.model.state_dict(), plain.model.state_dict())


def test_the_summary_is_explicit(fits: list[tuple[Any, Recorded]]) -> None:
    (made, run), (_, whole) = fits
    reached = [row["round"] for row in run.rounds if row.get("val/accuracy", 0) >= 0.1]
    assert run.summary["rounds_to_target"] == reached[0] == made.round == 2
    assert "rounds_to_target" not in whole.summary and whole.summary["last/round"] == ROUNDS
    for title, scores in (("last", made.run.summary.last), ("picked", made.run.summary.best)):
        assert run.summary[f"{title}/round"] == scores["round"]
        assert run.summary[f"{title}/test/accuracy"] == pytest.approx(scores["accuracy"])
    assert not [name for name in run.summary if name.startswith("last/test/accuracy/")]


def test_the_final_model_is_uploaded_if_asked_and_what_the_user_has_set_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    sent: list[Any] = []
    monkeypatch.setenv("WANDB_RUN_GROUP", "ours")
    monkeypatch.setattr(wandb.Run, "log_artifact", lambda self, artifact: sent.append(artifact))
    logger = offline(tmp_path / "log", name="mine", tags=["own"], job_type="trial")
    logger._log_model = True  # Lightning refuses it offline
    trainer(rounds=1, logger=logger, run_dir=tmp_path / "run").fit(classifier(), digits())
    (model,) = [artifact for artifact in sent if artifact.type == "model"]  # others are tables
    assert list(model.manifest.entries) == ["model.ckpt"]
    (run,) = recorded(tmp_path)
    assert (run.name, run.tags, run.job_type) == ("mine", ["own"], "trial")
    assert "group" not in logger._wandb_init, "W&B takes it from the environment"


def test_the_work_of_each_round_and_the_timeline(tmp_path: Path) -> None:
    log = offline(tmp_path / "log")
    made = unsynchronised(rounds=3, logger=log, run_dir=tmp_path / "run")
    made.fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    assert [tuple(row[name] for name in WORK) for row in run.rounds] == work_so_far(made)
    assert all("train/staleness_max" in row for row in run.rounds)
    assert run.rows[-1]["timeline/_type"] == "image-file"


def test_an_offline_resume_goes_on_with_the_steps(tmp_path: Path) -> None:
    """The resume in between has no logger, and does not forget the run."""
    for rounds in (2, 3, 4):
        logger = offline(tmp_path / "log") if rounds != 3 else False
        made = trainer(rounds=rounds, logger=logger, run_dir=tmp_path / "run")
        made.fit(classifier(), digits(), ckpt_path="last")
    runs = recorded(tmp_path)
    assert len(runs) == 2 and len({run.id for run in runs}) == 1
    assert [row["round"] for run in runs for row in run.rounds] == [1, 2, 3, 4]
    # The partition and two rounds, the pictures of an end; two rounds, the pictures of the end.
    assert [run.steps for run in runs] == [[0, 1, 2, 3], [4, 5, 6]]
    assert "partition/_type" not in runs[1].rows[0]


def test_a_table_that_wandb_refuses_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = WandbLogger.log_metrics

    def without_tables(self: WandbLogger, metrics: dict[str, Any], *args: Any) -> None:
        if "clients" in metrics:
            raise ConnectionError("no answer")
        send(self, metrics, *args)

    monkeypatch.setattr(WandbLogger, "log_metrics", without_tables)
    logger = offline(tmp_path)
    trainer(rounds=2, logger=logger, callbacks=[Undrawable()]).fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    assert [row["round"] for row in run.rounds] == [1, 2]
    assert caplog.text.count("W&B: no clients from round 1") == caplog.text.count("W&B: no ") == 1
    assert "WandbLogger: no mine (" in caplog.text


def test_no_confusion_matrix_for_several_labels_per_sample() -> None:
    samples = DataSplit(torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.uint8))
    data = SimpleNamespace(spec=DataSpec((2,), 3, "multilabel"), test=samples)
    run: Any = SimpleNamespace(federation=SimpleNamespace(data=data, entries=Entries(*6 * [()])))
    assert confusion_counts(run) is None


# Online, with the local server


def command(folder: Path, rounds: int, *more: str) -> list[str]:
    """Return the command of a small online run, as a process of its own."""
    return [
        *(sys.executable, "-m", "flsuite", "fit", "--config", str(QUICKSTART)),
        *("--trainer.rounds", str(rounds), "--trainer.max_epochs", "1"),
        *("--trainer.logger", "WandbLogger", "--trainer.logger.project", "flsuite"),
        *("--run_dir", str(folder), *more),
    ]


@pytest.mark.long
@pytest.mark.parametrize("with_helper", [True, False], ids=["with its helper", "alone"])
def test_a_killed_online_run_has_every_round_once(
    with_helper: bool, wandb_server: WandbServer, tmp_path: Path
) -> None:
    """W&B's own process may die with the run, as in a container, or outlive it."""
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(folder, 100_000), cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        assert wandb_server.wait_for_rows(4), "no rows arrived"
        helpers = psutil.Process(process.pid).children(recursive=True)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for helper in helpers if with_helper else ():
        with suppress(psutil.NoSuchProcess):
            helper.kill()
    psutil.wait_procs(helpers, timeout=120)

    (run,) = wandb_server.runs
    before = wandb_server.steps(run)
    done = last_round(folder)
    resume = command(folder, done + 3, "--ckpt_path", "last")
    subprocess.run(resume, cwd=tmp_path, check=True, timeout=300)

    assert set(wandb_server.runs) == {run}, "one run id"
    steps = wandb_server.steps(run)
    assert len(steps) > len(before)
    assert all(earlier < later for earlier, later in pairwise(steps)), steps
    rounds = [row["round"] for row in wandb_server.history[run] if "train/loss" in row]
    assert rounds == list(range(1, done + 4))
    assert wandb_server.summaries[run]["last/round"] == done + 3

    # What the command leaves open has its default, as in Python.
    sent = wandb_server.runs[run]
    assert sent["groupName"].startswith("FedAvg-") and sent["displayName"] == "FedAvg-1"
    assert sent["jobType"] == "fit" and "Digits" in sent["tags"]


def last_round(folder: Path) -> int:
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return int(checkpoint["federation"]["clock"]["round"])
