"""Loggers by short name in the command and in YAML, and the charts that W&B is asked to make."""

import json
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from flsuite import errors
from flsuite.analysis.publish.wandb_charts import build_report, build_workspace, sections
from tests.analysis.made_runs import made_run, settings
from tests.callbacks.wandb_files import recorded
from tests.callbacks.wandb_server import WandbServer
from tests.commands.command import QUICKSTART, Capture, cli, refused

SHORT = (
    *("fit", "--config", QUICKSTART, "--trainer.rounds", "1", "--trainer.max_epochs", "1"),
    *("--data.clients", "3", "--data.train_samples", "200", "--run_dir", "run"),
)


BY_PATH = pytest.param("lightning.pytorch.loggers.CSVLogger", marks=pytest.mark.long)


@pytest.mark.parametrize("path", ["CSVLogger", BY_PATH])
def test_csv_by_name_writes_into_the_runs_folder(path: str, tmp_path: Path) -> None:
    assert cli(*SHORT, "--trainer.logger", path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (table,) = (tmp_path / "run").glob("lightning_logs/version_0/metrics.csv")
    assert "test/accuracy" in table.read_text()

    # The saved config means the folder of the next run, unless the user names one.
    again = ("fit", "--config", "run/config.yaml", "--run_dir")
    assert cli(*again, "again") == 0
    assert list((tmp_path / "again").glob("lightning_logs/version_0/metrics.csv"))
    assert cli(*again, "other", "--trainer.logger.save_dir", "mine") == 0
    assert list((tmp_path / "mine").glob("lightning_logs/version_0/metrics.csv"))


@pytest.mark.long
def test_loggers_in_yaml(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["data"]["init_args"]["clients"] = 3
    config["trainer"] |= {
        "rounds": 1,
        "logger": [
            "CSVLogger",
            {"class_path": "TensorBoardLogger", "init_args": {"name": "board"}},
            {"class_path": "WandbLogger", "init_args": {"offline": True, "project": "p"}},
        ],
    }
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    for rounds in ("1", "2"):
        more = ("--trainer.rounds", rounds, "--ckpt_path", "last")
        assert cli("fit", "--config", "mine.yaml", "--run_dir", "run", *more) == 0
    folder = tmp_path / "run"
    assert [path.name for path in (folder / "lightning_logs").iterdir()] == ["version_0"]
    assert [path.name for path in (folder / "board").iterdir()] == ["version_0"]
    runs = recorded(folder)
    assert len(runs) == 2 and len({run.id for run in runs}) == 1
    steps = [step for run in runs for step in run.steps]
    assert steps == sorted(set(steps))


@pytest.mark.long
def test_mlflow_by_name_writes_a_database(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    for rounds in ("1", "2"):
        more = ("--trainer.rounds", rounds, "--ckpt_path", "last")
        assert cli(*SHORT, "--trainer.logger", "MLFlowLogger", *more) == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "test/accuracy")]
    assert steps == [1, 2]
    assert client.get_experiment(run.info.experiment_id).name == "flsuite"
    assert list((tmp_path / "mlruns").glob("*/artifacts/pictures/partition.png"))


@pytest.mark.parametrize(
    ("logger", "package"), [("TensorBoardLogger", "tensorboard"), ("MLFlowLogger", "mlflow")]
)
def test_a_missing_package_is_one_line(
    logger: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    line = refused(capsys, *SHORT, "--trainer.logger", logger)
    assert line.endswith(f"{logger} needs {package}: pip install 'flsuite[{package}]'")


class Unusable(CSVLogger):
    def __init__(self) -> None:
        raise ModuleNotFoundError("a library is missing;\ninstall it")


def test_the_reason_of_a_logger_is_part_of_the_line(capsys: Capture) -> None:
    line = refused(capsys, *SHORT, "--trainer.logger", f"{__name__}.Unusable")
    assert "a library is missing; install it" in line


# Charts in W&B


@pytest.fixture
def server(wandb_server: WandbServer) -> WandbServer:
    pytest.importorskip("wandb_workspaces")
    return wandb_server


@pytest.mark.long
def test_a_workspace_is_saved(server: WandbServer, capsys: Capture) -> None:
    assert cli("workspace", "--project", "flsuite", "--metric", "f1_macro") == 0
    (view,) = server.views
    assert (view["entityName"], view["projectName"]) == ("lab", "flsuite")
    spec = json.loads(view["spec"])["section"]
    assert spec["runSets"][0]["grouping"] == [{"section": "run", "name": "group"}]
    titles = [section["name"] for section in spec["panelBankConfig"]["sections"]]
    assert titles == list(sections("f1_macro"))
    assert "flsuite?nw=" in capsys.readouterr().out


@pytest.mark.long
def test_a_dry_run_asks_nobody(server: WandbServer, capsys: Capture) -> None:
    assert cli("workspace", "--project", "flsuite", "--dry-run") == 0
    assert server.operations == []
    printed = capsys.readouterr().out
    for words in ("test accuracy by virtual seconds", "gamma", "RunComparer", "samples by client"):
        assert words in printed


@pytest.mark.long
def test_every_chart_of_a_workspace_is_valid(server: WandbServer) -> None:
    spec = build_workspace("lab", "flsuite", "flsuite", "accuracy")._spec
    charts = spec["spec"]["section"]["panelBankConfig"]["sections"]
    lines = [panel["config"] for section in charts for panel in section["panels"]]
    by_axis = {line["xAxis"] for line in lines if "test/accuracy" in line.get("metrics", [])}
    assert by_axis == {"round", "bytes", "virtual_s", "client_updates", "wall_s"}
    assert all(
        (line["groupAgg"], line["groupArea"]) == ("mean", "stddev")
        for line in lines
        if "xAxis" in line
    )
    assert server.operations == [], "it is built without the network"


@pytest.mark.long
def test_a_report_has_the_table_and_the_charts(server: WandbServer, capsys: Capture) -> None:
    assert cli(*SHORT) == 0
    assert cli("report", "run", "--wandb", "team/flsuite") == 0
    (view,) = server.views
    assert (view["entityName"], view["projectName"]) == ("team", "flsuite")
    text = view["spec"]
    for words in ("| runs |", "test/accuracy", "train/gamma", "clients/heatmap"):
        assert words in text
    assert "http" in capsys.readouterr().out


@pytest.mark.long
def test_the_charts_of_a_report_group_runs(server: WandbServer) -> None:
    made = build_report("lab", "flsuite", "accuracy", "| a |\n|---|\n")
    grids = [block for block in made.blocks if type(block).__name__ == "PanelGrid"]
    assert len(grids) == len(sections("accuracy"))
    assert all(grid.runsets[0].groupby == ["group"] for grid in grids)
    assert server.operations == []


@pytest.mark.parametrize(
    "command", [("workspace", "--project", "p"), ("report", "run", "--wandb", "p")]
)
def test_without_the_extra_the_command_names_it(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    if command[0] == "report":
        made_run(Path("run"), settings("FedAvg", 1), [("global", "test", "accuracy", [0.5])])
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    capsys.readouterr()
    assert cli(*command) == 2
    assert "pip install 'flsuite[workspaces]'" in capsys.readouterr().err


def test_a_workspace_of_no_project_is_refused(capsys: Capture) -> None:
    assert "arguments are required: --project" in refused(capsys, "workspace")


@pytest.mark.long
def test_a_server_that_is_not_there_is_one_line(server: WandbServer, capsys: Capture) -> None:
    server.close()
    line = refused(capsys, "workspace", "--project", "p", "--entity", "lab")
    assert "W&B: no answer to the request" in line
