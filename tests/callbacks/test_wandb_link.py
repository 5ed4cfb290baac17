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

from flsuite.aggregators import FedBuff
from flsuite.analysis.groups import experiment_hash
from flsuite.callbacks import FederationCallback, RoundLogger, StopAt
from flsuite.callbacks.pictures import client_rounds, confusion_counts
from flsuite.client.entries import Entries
from flsuite.data.spec import DataSpec, DataSplit
from flsuite.models import MLP, Classifier
from flsuite.runs.run import Run
from flsuite.schedules import Asynchronous, Stragglers
from tests.callbacks.wandb_files import Recorded, recorded
from tests.callbacks.wandb_server import WandbServer
from tests.conftest import classifier, digits, trainer

ROUNDS = 2
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
FINAL = {"clients/heatmap/_type", "confusion/_type"}


def offline(folder: Path, **kwargs: Any) -> WandbLogger:
    return WandbLogger(offline=True, project="flsuite", save_dir=folder, **kwargs)


# Offline


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Run three experiments in one process: the same one twice, and another seed."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        import wandb

        for number, seed in enumerate((3, 3, 4)):
            logger = offline(folder / str(number))
            made = trainer(rounds=ROUNDS, logger=logger, seed=seed)
            made.fit(classifier(), digits())
            assert wandb.run is None, "the next experiment would go on in this run"
    return recorded(folder)


def test_one_row_a_round_without_a_chart_per_client(runs: list[Recorded]) -> None:
    for run in runs:
        assert all("round" in row and "step" not in row for row in run.rows)
        assert [row["round"] for row in run.rounds] == [1, 2]
        for row in run.rounds:
            assert {"train/loss", "val/accuracy", "test/accuracy", "wall_s"} <= row.keys()
            assert not [name for name in row if name.startswith("client/")]
        assert run.step_metrics["*"] == "round"
        assert run.steps == list(range(len(run.rows)))


def test_the_same_experiment_twice_is_two_runs(runs: list[Recorded]) -> None:
    assert len({run.id for run in runs}) == 3
    values = [[(row["train/loss"], row["test/accuracy"]) for row in run.rounds] for run in runs]
    assert values[0] == values[1] != values[2]


def test_config_has_settings_rounds_and_engine(runs: list[Recorded]) -> None:
    for run in runs:
        assert run.config["model"]["class_path"] == "flsuite.models.Classifier"
        assert run.config["model"]["init_args"]["backbone"]["init_args"]["hidden"] == [16]
        assert run.config["data"]["init_args"]["partition"]["init_args"]["alpha"] == 0.5
        assert run.config["aggregator"]["class_path"] == "flsuite.aggregators.FedAvg"
        assert run.config["rounds"] == ROUNDS
        assert run.config["engine"]["class_path"] == "flsuite.engines.InProcess"


def test_seeds_share_a_group_and_have_names(runs: list[Recorded]) -> None:
    assert [run.name for run in runs] == ["FedAvg-3", "FedAvg-3", "FedAvg-4"]
    (group,) = {run.group for run in runs}
    assert group.startswith("FedAvg-") and len(group) == len("FedAvg-") + 8
    assert {run.job_type for run in runs} == {"fit"}
    assert all(set(run.tags) == {"Digits", "Dirichlet(0.5)"} for run in runs)


def test_the_hash_of_a_group_is_that_of_settings_yaml(tmp_path: Path) -> None:
    def settings(name: str, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        made = trainer(rounds=1, run_dir=tmp_path / name, **kwargs)
        made.fit(classifier(), digits())
        return made.run.settings, yaml.safe_load((tmp_path / name / "settings.yaml").read_text())

    known, read = settings("one")
    assert experiment_hash(known) == experiment_hash(read)
    assert experiment_hash(settings("seed", seed=5)[0]) == experiment_hash(known)
    assert experiment_hash(settings("epochs", max_epochs=2)[0]) != experiment_hash(known)


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_GROUP", "ours")
    logger = offline(tmp_path, name="mine", tags=["own"], job_type="trial")
    trainer(rounds=1, logger=logger).fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    assert (run.name, run.tags, run.job_type) == ("mine", ["own"], "trial")
    assert "group" not in logger._wandb_init, "W&B takes it from the environment"


def content(run: Recorded, row: dict[str, Any], key: str) -> Any:
    """Return the content of a table that a row refers to."""
    return json.loads((run.path.parent / "files" / row[f"{key}/path"]).read_text())


def test_clients_are_a_table_per_evaluation(tmp_path: Path) -> None:
    made = trainer(rounds=3, evaluate_every=2, logger=offline(tmp_path))
    made.fit(classifier(), digits())
    (run,) = recorded(tmp_path)
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


def test_pictures_and_the_confusion_matrix(tmp_path: Path) -> None:
    made = trainer(rounds=2, logger=offline(tmp_path))
    made.fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    first, *_, last = run.rows
    assert first["partition/_type"] == "image-file" and first["round"] == 0
    assert last.keys() >= FINAL and last["round"] == 2
    assert last["clients/heatmap/_type"] == "image-file"

    counts = confusion_counts(made.run)
    assert counts is not None
    samples = len(made.federation.data.test)
    right = sum(counts.to_numpy().diagonal())
    assert counts.to_numpy().sum() == samples
    assert right / samples == pytest.approx(run.rounds[-1]["test/accuracy"])

    scores = client_rounds(made.run, "accuracy")
    assert list(scores.columns) == [1, 2] and list(scores.index) == [0, 1, 2, 3, 4]
    assert scores.notna().all(axis=None)


def test_a_model_with_predictions_of_its_own_has_a_confusion_matrix_too() -> None:
    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            return {"own": batch[0].sum(1)}

    made = trainer(rounds=1)
    made.fit(Predicts(MLP((4,)), lambda p: torch.optim.SGD(p, lr=0.1)), digits())
    counts = confusion_counts(made.run)
    assert counts is not None and counts.to_numpy().sum() == len(made.federation.data.test)


def test_the_resident_model_stays_the_global_one(tmp_path: Path) -> None:
    def final_weights(**kwargs: Any) -> dict[str, torch.Tensor]:
        model = classifier()
        trainer(rounds=1, **kwargs).fit(model, digits())
        return model.state_dict()

    plain, logged = final_weights(), final_weights(logger=offline(tmp_path))
    assert all(torch.equal(plain[name], logged[name]) for name in plain)


def test_the_summary_is_explicit(tmp_path: Path) -> None:
    stop = StopAt("accuracy", 0.5)
    made = trainer(rounds=30, callbacks=[stop], logger=offline(tmp_path))
    made.fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    reached = [row["round"] for row in run.rounds if row["val/accuracy"] >= 0.5]
    assert run.summary["rounds_to_target"] == reached[0] == made.round
    for title, scores in (("last", made.run.summary.last), ("picked", made.run.summary.best)):
        assert run.summary[f"{title}/round"] == scores["round"]
        assert run.summary[f"{title}/test/accuracy"] == pytest.approx(scores["accuracy"])
    assert not [name for name in run.summary if name.startswith("last/test/accuracy/")]


def test_the_final_model_is_uploaded_if_lightnings_logger_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    sent: list[Any] = []
    monkeypatch.setattr(wandb.Run, "log_artifact", lambda self, artifact: sent.append(artifact))
    for is_asked in (False, True):
        logger = offline(tmp_path / f"log-{is_asked}")
        logger._log_model = is_asked  # Lightning refuses it offline
        made = trainer(rounds=1, logger=logger, run_dir=tmp_path / f"run-{is_asked}")
        made.fit(classifier(), digits())
    (model,) = [artifact for artifact in sent if artifact.type == "model"]  # others are tables
    assert list(model.manifest.entries) == ["model.ckpt"]


def test_no_target_no_rounds_to_it(runs: list[Recorded]) -> None:
    assert all("rounds_to_target" not in run.summary for run in runs)
    assert all(run.summary["last/round"] == ROUNDS for run in runs)


def test_the_work_of_each_round_and_the_timeline(tmp_path: Path) -> None:
    made = trainer(
        rounds=3,
        aggregator=FedBuff(),
        schedule=Asynchronous(4, buffer_size=2, speeds=Stragglers()),
        logger=offline(tmp_path / "log"),
        run_dir=tmp_path / "run",
    )
    made.fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    rows = {row.round: row for row in made.run.folder.table.rows}
    names = ("virtual_s", "client_updates", "bytes")
    assert [tuple(row[name] for name in names) for row in run.rounds] == [
        tuple(getattr(rows[n], name) for name in names) for n in (1, 2, 3)
    ]
    assert all("train/staleness_max" in row for row in run.rounds)
    assert run.rows[-1]["timeline/_type"] == "image-file"


def test_an_offline_resume_goes_on_with_the_steps(tmp_path: Path) -> None:
    for rounds in (2, 4):
        made = trainer(rounds=rounds, logger=offline(tmp_path / "log"), run_dir=tmp_path / "run")
        made.fit(classifier(), digits(), ckpt_path="last")
    runs = recorded(tmp_path)
    assert len(runs) == 2 and len({run.id for run in runs}) == 1
    assert [row["round"] for run in runs for row in run.rounds] == [1, 2, 3, 4]
    # The partition and two rounds, the pictures of an end; two rounds, the pictures of the end.
    assert [run.steps for run in runs] == [[0, 1, 2, 3], [4, 5, 6]]
    assert "partition/_type" not in runs[1].rows[0]


def test_a_checkpoint_of_an_earlier_version_names_its_wandb_run() -> None:
    logger = RoundLogger()
    logger.load_state_dict({"wandb_id": "abc"})
    assert logger.state_dict() == {"loggers": [{"link": "WandbLink", "id": "abc"}]}


def test_a_table_that_wandb_refuses_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = WandbLogger.log_metrics

    def without_tables(self: WandbLogger, metrics: dict[str, Any], *args: Any) -> None:
        if "clients" in metrics:
            raise ConnectionError("no answer")
        send(self, metrics, *args)

    monkeypatch.setattr(WandbLogger, "log_metrics", without_tables)
    trainer(rounds=3, logger=offline(tmp_path)).fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    assert [row["round"] for row in run.rounds] == [1, 2, 3]
    assert caplog.text.count("W&B: no clients from round 1") == caplog.text.count("W&B: no ") == 1


def test_a_round_whose_picture_fails_has_its_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Undrawable(FederationCallback):
        affects = "nothing"

        def on_round_end(self, run: Run, round: int) -> None:
            run.log_picture("mine", "no figure")  # type: ignore[arg-type]

    made = trainer(rounds=2, logger=offline(tmp_path), callbacks=[Undrawable()])
    made.fit(classifier(), digits())
    (run,) = recorded(tmp_path)
    assert [row["round"] for row in run.rounds] == [1, 2]
    assert "WandbLogger: no mine (" in caplog.text


def test_a_resume_without_the_logger_does_not_forget_its_run(tmp_path: Path) -> None:
    for rounds, is_logged in ((1, True), (2, False), (3, True)):
        logger = offline(tmp_path / "log") if is_logged else False
        made = trainer(rounds=rounds, logger=logger, run_dir=tmp_path / "run")
        made.fit(classifier(), digits(), ckpt_path="last")
    assert len({run.id for run in recorded(tmp_path)}) == 1


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
