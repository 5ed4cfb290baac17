"""``flsuite sweep`` end to end: kills, several sweeps on one folder, edits, failures, tuning."""

import csv
import gc
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flsuite.commands import sweep as command
from flsuite.commands.cells import check
from flsuite.commands.sweeps.plan import fit_arguments, samples_of
from flsuite.commands.sweeps.queue import CellOutcome, Queue
from flsuite.commands.sweeps.reading import Sweep, read_sweep
from flsuite.commands.sweeps.until import note_sweep
from flsuite.common.errors import FlsuiteError
from flsuite.data import Digits
from flsuite.data.federated import FederatedData
from tests.commands.command import Capture, cli, files, refused
from tests.commands.sweeps.sweeping import (
    SWEEPS,
    results_of,
    signal_after_progress,
    start,
    write_sweep,
)
from tests.conftest import equal_states

QUICKSTART = str(SWEEPS / "comparison.yaml")
SMALL = {"trainer.rounds": 6, "trainer.max_epochs": 1, "data.clients": 3}
SHORT = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
SHIPPED = sorted(path for path in SWEEPS.glob("*.yaml") if path.stem != "wandb")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run the shipped quickstart, shortened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("sweep"))
        assert cli("sweep", "--config", write_quickstart(), *SHORT) == 0
        yield Path.cwd() / "runs" / "quickstart"


def write_quickstart(alphas: str = "[0.1]") -> str:
    """Write the shipped quickstart with FedProx and this grid, and return the file's name."""
    text = Path(QUICKSTART).read_text().replace("../", f"{SWEEPS.parent}/")
    text = text.replace("  FedAvg: {trainer.aggregator: FedAvg}\n", "")
    Path("quickstart.yaml").write_text(text.replace("[0.1, 1.0]", alphas))
    return "quickstart.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a finished sweep. Its cells are marked as done, and nothing was trained."""
    folder = tmp_path / "runs" / "quickstart"
    queue = Queue(read_sweep(write_quickstart(), SMALL), folder)
    while not queue.is_complete():
        with queue.claim() as cell:
            assert cell is not None
            queue.begin(cell)
            queue.finish(cell, CellOutcome(2.0, "accuracy", False, 0.5, 0.4))
    note_sweep(queue.sweep, folder, [])
    return folder


@pytest.mark.long
def test_two_sweeps_on_one_folder_run_each_cell_once(tmp_path: Path) -> None:
    name = write_quickstart()
    both = [start("--config", name, *SHORT, "--workers", "1") for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out
    logs = [log.read_text() for log in tmp_path.rglob("log.txt")]
    assert [log.count("$ flsuite fit") for log in logs] == [1, 1]
    assert len(list(tmp_path.rglob("done.json"))) == 2


@pytest.mark.timeout(600)  # four sweeps one after the other
@pytest.mark.long
def test_a_sweep_killed_three_times_equals_the_unbroken_one(finished: Path, tmp_path: Path) -> None:
    folder, name = tmp_path / "runs" / "quickstart", write_quickstart()
    for more in (1, 3, 4):
        process = start("--config", name, *SHORT)
        signal_after_progress(process, folder, more, signal.SIGKILL)
        assert len(list(folder.rglob("done.json"))) < 2
    process = start("--config", name, *SHORT)
    out = signal_after_progress(process, folder, 1, signal.SIGTERM)
    assert process.returncode == 143
    assert "terminated; the same command" in out
    assert not list(folder.rglob("failed.txt"))
    assert cli("sweep", "--config", name, *SHORT) == 0

    ours, theirs = results_of(folder), results_of(finished)
    assert len(ours) == 2 and ours.keys() == theirs.keys()
    for run, (weights, table) in ours.items():
        assert equal_states(weights, theirs[run][0]), run
        assert table.equals(theirs[run][1]), run
    launches = [log.read_text().count("$ flsuite fit") for log in folder.rglob("log.txt")]
    assert max(launches) > 1, "no kill has hit a cell"


def test_a_cell_is_what_flsuite_fit_makes_of_its_arguments(tmp_path: Path) -> None:
    prox = "{class_path: FedProx, init_args: {mu: 0.1}}"
    name = write_sweep("s.yaml", f"{{P: {{trainer.aggregator: {prox}}}}}", seeds="[2]")
    assert cli("sweep", "--config", name, "--data.partition.alpha", "0.1") == 0
    sweep, folder = read_sweep(name, {"data.partition.alpha": 0.1}), tmp_path / "runs" / "s"
    (cell,) = Queue(sweep, folder).known()
    assert (cell.method, cell.seed) == ("P", 2)
    assert cli("fit", *fit_arguments(sweep, cell, tmp_path / "fit")) == 0
    ((weights, table),) = results_of(tmp_path / "fit").values()
    assert equal_states(weights, results_of(folder)[str(cell.folder)][0])
    assert table.equals(results_of(folder)[str(cell.folder)][1])
    config = yaml.safe_load((folder / cell.folder / "config.yaml").read_text())
    assert config["trainer"]["aggregator"]["init_args"]["mu"] == 0.1
    assert config["data"]["init_args"]["partition"]["init_args"]["alpha"] == 0.1


@pytest.mark.long
def test_models_are_trained_once_for_all_methods(tmp_path: Path) -> None:
    methods = "{FisherMerge: {trainer.aggregator: FisherMerge}, FedAvg: {}}"
    write_sweep("once.yaml", methods, "updates_from: FedAvg\nworkers: 2")
    write_sweep("each.yaml", methods)
    for name in ("once", "each"):
        out, _ = (process := start("--config", f"{name}.yaml")).communicate(timeout=300)
        assert process.returncode == 0, out
    once, each = results_of(Path("runs/once")), results_of(Path("runs/each"))
    for (cell, (state, _)), (other, (own, _)) in zip(once.items(), each.items(), strict=True):
        assert cell.partition("-")[0] == other.partition("-")[0]
        assert equal_states(state, own)
    kept = [path.parent.parent.name for path in Path("runs").glob("*/*/seed-1/updates")]
    assert [name.partition("-")[0] for name in kept] == ["FedAvg"]
    log = next(Path("runs/once").glob("FisherMerge*/seed-1/log.txt")).read_text()
    assert "from_updates" in log and "keep_updates=false" in log


def test_an_unchanged_sweep_does_nothing(folder: Path, capsys: Capture) -> None:
    before = files(folder)
    assert cli("sweep", "--config", write_quickstart(), *SHORT) == 0
    assert "nothing to do: 2 of 2 cells are done" in capsys.readouterr().out
    assert files(folder) == before


def test_status_shows_scores(folder: Path, capsys: Capture) -> None:
    shutil.rmtree(next(folder.glob("FedProx-alpha=0.1-*")) / "seed-2")
    before = files(folder)
    assert cli("sweep", "--config", write_quickstart(), *SHORT, "--status") == 0
    out = capsys.readouterr().out
    assert "1 of 2 cells are done, 1 waiting" in out and "time left: about 0:0" in out
    (row,) = (line for line in out.splitlines() if "FedProx alpha=0.1" in line)
    assert "waiting" in row and "0." in row.split("│")[2]
    assert files(folder) == before


@pytest.mark.long
def test_an_edited_sweep_runs_the_new_cells_alone(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "runs" / "quickstart"))
    before = files(folder)
    assert cli("sweep", "--config", write_quickstart("[10.0]"), *SHORT) == 0
    captured = capsys.readouterr()
    assert "2 of 2 cells are done" in captured.out
    assert "2 runs in the folder do not belong" in captured.out
    assert "FedProx alpha=10.0 seed 1" in captured.err and "alpha=0.1" not in captured.err
    after = files(folder)
    assert {name: after[name] for name in before} == before
    assert sum(name.endswith("done.json") for name in after) == 4


def test_a_dry_run_lists_cells_and_time_and_runs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    checked(monkeypatch, refused_lines)
    before = files(folder)
    assert cli("sweep", "--config", write_quickstart("[0.1, 10.0]"), *SHORT, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "2 of 4 cells are done, 2 waiting" in out and "time left: about" in out
    assert "FedProx-alpha=10.0-" in out and files(folder) == before


@pytest.mark.long
def test_tuning_and_failures_end_to_end(tmp_path: Path, capsys: Capture) -> None:
    methods = "{A: {}, B: {}, C: {model.optimizer.lr: 1.0e+30}}"
    tune = "tune: {trials: 2, seeds: [101], A: {model.optimizer.lr: [0.1, 1.0e-5]}}"
    name = write_sweep("s.yaml", methods, f"{tune}\nworkers: 2")
    assert cli("sweep", "--config", name) == 1
    folder, captured = tmp_path / "runs" / "s", capsys.readouterr()

    with (folder / "tuning.csv").open() as file:
        chosen = {row["values"]: row["chosen"] for row in csv.DictReader(file)}
    assert chosen == {
        '{"model.optimizer.lr": 0.1}': "True",
        '{"model.optimizer.lr": 1e-05}': "False",
    }
    (config,) = folder.glob("A-*/seed-1/config.yaml")
    content = yaml.safe_load(config.read_text())
    assert content["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.1
    trials = [yaml.safe_load(p.read_text()) for p in folder.glob("tuning/*/*/settings.yaml")]
    assert [trial["seed"] for trial in trials] == [101, 101]

    # A cell that fails is named at the end, and the others are done.
    (line,) = (line for line in captured.out.splitlines() if line.startswith("failed: "))
    assert line.startswith("failed: C seed 1: ") and "log.txt" in line
    assert "1 of 5 cells are not done" in captured.err
    assert len(list(folder.rglob("done.json"))) == 4

    # Trials are no results: their seed is not one of the report's runs.
    assert cli("report", str(folder)) == 0
    out = capsys.readouterr().out
    assert "1e-05" not in out and "seed 1 more than once" in out  # what A has chosen is B
    Path(name).write_text(Path(name).read_text().replace(", C:", "}\n#"))
    assert cli("sweep", "--config", name) == 0
    assert "nothing to do: 4 of 4 cells are done" in capsys.readouterr().out


# Files that cannot be run

UNBUILDABLE = {
    "{A: {}}\ngrid: {data.partition.alpha: [0.1, -1.0]}": ("data.partition.alpha -1.0", "alpha"),
    "{A: {trainer.aggregator: FedProx}, B: {}}\ngrid: {trainer.aggregator.mu: [0.1]}": ("B", "mu"),
    "{A: {}}\ntune: {trials: 1, seeds: [9], A: {model.optimizer.lr: [big]}}": ("lr big", "big"),
}


def refused_lines(sweep: Sweep, folder: Path) -> list[str]:
    return list(check(sweep, folder, samples_of(sweep))["refused"].values())


def checked(patch: pytest.MonkeyPatch, refused: Callable[[Sweep, Path], list[str]]) -> None:
    """Check sweeps in this process, which cannot run them."""

    def answer(sweep: Sweep, folder: Path, is_dry: bool) -> Any:
        lines = {"workers": 1, "refused": refused(sweep, folder)}
        return nullcontext(SimpleNamespace(check=lambda: lines))

    patch.setattr(command, "_CellProcess", answer)


@pytest.mark.parametrize("methods", UNBUILDABLE)
def test_what_cannot_be_built_is_named_with_its_method(methods: str) -> None:
    sweep = read_sweep(write_sweep("s.yaml", methods))
    (line,) = refused_lines(sweep, Path("runs"))
    assert all(part in line for part in UNBUILDABLE[methods]) and "\n" not in line


def test_a_method_that_trains_otherwise_cannot_merge_anothers_models() -> None:
    methods = "{A: {}, B: {trainer.aggregator: OTFusion}, C: {model.optimizer.lr: 0.7}}"
    sweep = read_sweep(write_sweep("s.yaml", methods, "updates_from: A"))
    (line,) = refused_lines(sweep, Path("runs"))
    assert line.startswith("method C") and "model.optimizer.lr is 0.7 here" in line


def test_plugins_and_full_names_of_another_version_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("swept.py").write_text(
        "from flsuite.aggregators import FedAvg\nclass Swept(FedAvg): ...\n"
    )
    monkeypatch.syspath_prepend(".")
    attack = "{class_path: flsuite.attacks.sign_flip.SignFlip, init_args: {fraction: 0.4}}"
    others = (
        f"trainer.schedule: flsuite.schedules.synchronous.Synchronous, trainer.attack: {attack}"
    )
    others += ", data.partition: flsuite.data.partitions.iid.IID"
    methods = f"A: {{trainer.aggregator: Swept}}, B: {{trainer.aggregator: swept.Swept, {others}}}"
    methods = f"{{{methods}, C: {{trainer.aggregator: flsuite.aggregators.fedavg.FedAvg}}}}"
    sweep = read_sweep(write_sweep("s.yaml", methods), {"plugins": ["swept"]})
    assert refused_lines(sweep, Path("runs")) == []


def test_a_source_that_cannot_start_is_named_once() -> None:
    methods = "{A: {trainer.aggregator: FedProx}, B: {}, C: {trainer.aggregator: OTFusion}}"
    sweep = read_sweep(write_sweep("s.yaml", methods, "updates_from: A"))
    (line,) = refused_lines(sweep, Path("runs"))
    assert line.startswith("method A: FedProx changes how clients train")
    assert line.endswith("or name another one in updates_from")


@pytest.mark.long
def test_a_finished_source_without_models_is_named_before_anything_runs() -> None:
    methods = "{A: {}, B: {trainer.aggregator: OTFusion}}"
    name = write_sweep("s.yaml", methods, "updates_from: A")
    assert cli("sweep", "--config", name, "--folder", "runs") == 0
    for path in [*Path("runs").glob("B-*"), *Path("runs").glob("A-*/*/updates")]:
        shutil.rmtree(path)
    (line,) = refused_lines(read_sweep(name), Path("runs"))
    assert line.startswith("method B: from_updates: runs/A-")
    assert "delete the folder if a sweep made it" in line


@pytest.mark.long
def test_all_that_cannot_begin_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    krum = "{trainer.aggregator: {class_path: Krum, init_args: {byzantine: 1}}}"
    faults = "{class_path: Faults, init_args: {schedule: Synchronous, hangs: 0.5}}"
    methods = f"{{A: {{}}, K: {krum}, H: {{trainer.schedule: {faults}}}}}"
    name = write_sweep("s.yaml", methods, seeds="[1, 2]")
    Path(name).write_text(Path(name).read_text().replace(", data.clients: 3", ""))
    Path(name).write_text(Path(name).read_text() + "grid: {data.clients: [3, 6]}\n")
    sweep = read_sweep(name)
    refused = refused_lines(sweep, tmp_path)
    assert [line.split(":")[0] for line in refused] == [
        "method K, data.clients 3",
        "method H, data.clients 3",
        "method H, data.clients 6",
    ]
    assert "needs" in refused[0] and "Processes(timeout=...)" in refused[1]
    assert files(tmp_path).keys() == {"s.yaml"}

    # What has been run could begin.
    for cell in samples_of(sweep):
        if cell.method == "H":
            (tmp_path / cell.folder).mkdir(parents=True)
            (tmp_path / cell.folder / "done.json").touch()
    assert refused_lines(sweep, tmp_path) == refused[:1]

    checked(monkeypatch, lambda *_: refused)
    assert cli("sweep", "--config", name) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-4:-1] == refused and "3 experiments cannot start" in lines[-1]


def test_of_many_that_cannot_begin_the_first_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    methods = ", ".join(f"M{n}: {{data.clients: -{n}}}" for n in range(22))
    checked(monkeypatch, lambda sweep, _: [f"method {name}" for name in sweep.methods])
    assert cli("sweep", "--config", write_sweep("s.yaml", f"{{{methods}}}")) == 2
    begin, *lines, end = capsys.readouterr().err.splitlines()
    assert begin == "checking that 22 experiments can start"
    assert lines == [f"method M{n}" for n in range(20)]
    assert "22 experiments cannot start, for the reasons above and 2 more" in end


def test_data_that_is_missing_is_one_line_and_a_dry_run_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def load(self: Digits) -> Any:
        assert not self.download, "a dry run may not download"
        raise FlsuiteError(f"{type(self).__name__} is not here: set FLSUITE_DATA_ROOT")

    monkeypatch.setattr(Digits, "load", load)
    name = write_sweep("s.yaml", "{A: {}, B: {trainer.aggregator: FedProx}}")
    sweep = read_sweep(name)
    checked(
        monkeypatch,
        lambda *_: list(check(sweep, tmp_path, samples_of(sweep), True)["refused"].values()),
    )
    assert cli("sweep", "--config", name, "--dry-run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    reason = "Digits is not here: set FLSUITE_DATA_ROOT"
    assert line == f"flsuite: error: sweep: 2 experiments cannot start: {reason}"


@pytest.mark.long
def test_several_processes_check_in_the_order_of_the_methods(capsys: Capture) -> None:
    wrong = ", ".join(f"M{n}: {{data.clients: -{n}}}" for n in range(16))
    name = write_sweep("s.yaml", f"{{{wrong}}}")
    assert cli("sweep", "--config", name, "--folder", "runs", "--dry-run") == 2
    lines = capsys.readouterr().err.splitlines()
    named = [line.split(":")[0] for line in lines if "clients" in line]
    assert named == [f"method M{n}" for n in range(16)]
    assert "16 experiments cannot start" in lines[-1]


def test_an_engine_that_is_chosen_later_is_not_refused_before() -> None:
    faults = "{class_path: Faults, init_args: {schedule: Synchronous, dies: 0.1}}"
    methods = f"{{A: {{trainer.engine: Auto, trainer.schedule: {faults}}}}}"
    sweep = read_sweep(write_sweep("s.yaml", methods))
    assert not check(sweep, Path("runs"), samples_of(sweep))["refused"]


def test_a_check_that_does_not_end_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("flsuite.commands.sweep._CHECK", 0.1)
    monkeypatch.setattr("flsuite.commands.sweep._CHECK_ONE", 0.0)
    assert cli("sweep", "--config", write_sweep("s.yaml", "{FedAvg: {}}")) == 1
    assert "check of the methods did not end within 0.1 seconds" in capsys.readouterr().err


def test_a_wrong_file_is_refused_before_anything_runs(capsys: Capture) -> None:
    methods = "{FedAvg: {}, FedProx: {trainer.aggregator: FedProxx}}"
    name = write_sweep("s.yaml", methods)
    line = refused(capsys, "sweep", "--config", name)
    assert "method FedProx: --trainer.aggregator" in line
    assert "FedProxx (did you mean FedProx?)" in line
    Path(name).write_text("config: x.yaml\nseed: [1]\nmethods: {A: {}}\n")
    assert "did you mean seeds?" in refused(capsys, "sweep", "--config", name)
    assert "unknown option --rounds" in refused(
        capsys, "sweep", "--config", QUICKSTART, "--rounds", "3"
    )
    assert "--config" in refused(capsys, "sweep")
    assert "there is no config file none.yaml" in refused(capsys, "sweep", "--config", "none.yaml")
    for mode in ([], ["--dry-run"], ["--status"]):
        line = refused(capsys, "sweep", "--config", QUICKSTART, "--folder", name, *mode)
        assert f"{name} is a file; name another folder" in line


@pytest.mark.long
def test_the_check_keeps_no_cell_in_memory(tmp_path: Path) -> None:
    """A trainer and its run refer to each other, so only a collection frees a cell's data."""
    path = tmp_path / "sweep.yaml"
    config = str(SWEEPS.parent / "quickstart.yaml")
    content = {"config": config, "seeds": [1], "methods": {"A": {}, "B": {"trainer.rounds": 3}}}
    path.write_text(yaml.safe_dump({**content, "grid": {"data.clients": [4, 5]}}))
    gc.collect()
    before = held()
    gc.disable()
    try:
        assert refused_lines(read_sweep(path), tmp_path) == []
        assert held() <= before + 1, "only the last cell may be there"
    finally:
        gc.enable()


def held() -> int:
    return sum(type(one) is FederatedData for one in gc.get_objects())


# What is shipped


@pytest.mark.parametrize(
    ("sweep", "method"), [("fusedspacefed", "FusedSpaceFed-tuned"), ("realignment", "tuned")]
)
def test_the_tuned_setting_of_a_sweep_is_that_of_its_config(sweep: str, method: str) -> None:
    folder = SWEEPS.parent / "fusedspacefed"
    published, tuned = (
        yaml.safe_load((folder / f"{name}.yaml").read_text())["model"]["init_args"]
        for name in ("breastmnist", "breastmnist-tuned")
    )
    changed = yaml.safe_load((SWEEPS / f"{sweep}.yaml").read_text())["methods"][method]
    own = {k.removeprefix("model."): v for k, v in changed.items() if k.startswith("model.")}
    assert own == {k: v for k, v in tuned.items() if published.get(k) != v}


@pytest.mark.long
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_sweep_can_be_built(path: Path) -> None:
    name = f"configs/sweeps/{path.name}"
    assert path.read_text().startswith(f"# flsuite sweep --config {name}\n")
    sweep = read_sweep(path)
    cells, seen = [], set[object]()
    for cell in samples_of(sweep):  # each method and each value of the grid, not each pair
        parts = {cell.method, *((key, str(value)) for key, value in cell.overrides.items())}
        if not parts <= seen:
            cells.append(cell)
            seen |= parts
    # The cells have the cores for themselves.
    assert check(sweep, Path("runs"), cells) == {"workers": 1, "refused": {}}


@pytest.mark.long
def test_a_wandb_sweep_gives_commands_that_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    monkeypatch.chdir(SWEEPS.parents[1])
    content = yaml.safe_load((SWEEPS / "wandb.yaml").read_text())
    assert content["command"][:3] == ["${env}", "flsuite", "fit"]
    for values in zip(*(p["values"] for p in content["parameters"].values()), strict=True):
        chosen = dict(zip(content["parameters"], ({"value": v} for v in values), strict=True))
        arguments = create_sweep_command_args({"args": chosen})["args"]
        assert cli(*content["command"][2:-1], *arguments, "--print_config") == 0


def test_samples_of_a_shipped_sweep_run_in_the_folder_of_the_method() -> None:
    sweep = read_sweep(SWEEPS / "asynchronous.yaml")
    names = [sample.folder.parent.name.rpartition("-")[0] for sample in samples_of(sweep)]
    assert names == list(sweep.methods)
