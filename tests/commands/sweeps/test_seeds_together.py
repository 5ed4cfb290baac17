"""Cells that differ in the seed run in one process, and each is what it is alone."""

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.commands import cells
from flsuite.commands.sweeps.queue import Queue
from flsuite.commands.sweeps.reading import read_sweep
from flsuite.federation import Vectorized
from tests.commands.command import Capture, cli, refused
from tests.commands.sweeps.sweeping import results_of, signal_after_progress, start, write_sweep

VECTORIZED = "{A: {trainer.engine: Vectorized, trainer.rounds: 6}}"
TOGETHER = "together: seeds"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run three seeds, one after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("alone"))
        assert cli("sweep", "--config", write_sweep("s.yaml", VECTORIZED, seeds="[1, 2, 3]")) == 0
        yield Path.cwd() / "runs" / "s"


def assert_close(folder: Path, other: Path) -> None:
    """Compare the weights and tables of two sweeps, within the rounding of a larger stack."""
    ours, theirs = results_of(folder), results_of(other)
    assert len(ours) == 3 and ours.keys() == theirs.keys()
    for run, (weights, table) in ours.items():
        for name, value in theirs[run][0].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        values = [pair.pop("value").to_numpy() for pair in (table, theirs[run][1])]
        assert table.equals(theirs[run][1]), run
        torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(600)  # four sweeps one after the other
def test_cells_that_are_killed_together_continue_and_equal_cells_alone(
    alone: Path, tmp_path: Path, capsys: Capture
) -> None:
    name, folder = write_sweep("s.yaml", VECTORIZED, TOGETHER, "[1, 2, 3]"), tmp_path / "runs" / "s"
    process = start("--config", name)
    signal_after_progress(process, folder, 4, signal.SIGKILL)
    process = start("--config", name)
    out = signal_after_progress(process, folder, 3, signal.SIGTERM)
    assert process.returncode == 143 and "terminated; the same command" in out
    assert not list(folder.rglob("failed.txt")) and not list(folder.rglob("done.json"))
    logs = [path.read_text() for path in sorted(folder.rglob("log.txt"))]
    assert all(log.count("$ flsuite fit") == 2 for log in logs)
    assert all(f"--seed_everything {seed}" in log for seed, log in enumerate(logs, start=1))
    assert all("flsuite resume" in log for log in logs), "not every cell was interrupted"

    assert cli("sweep", "--config", name) == 0
    assert_close(folder, alone)
    assert len(list(folder.rglob("curves.png"))) == len(list(folder.rglob("done.json"))) == 3
    run = next(folder.glob("*/seed-2"))
    assert "together 3" in (run / "versions.txt").read_text()
    assert cli("verify", str(run), "--at", "0", "--rounds", "6") == 0
    assert "another environment: together 3 there, alone here" in capsys.readouterr().out


def test_a_cell_that_raises_leaves_the_others(alone: Path, tmp_path: Path, capsys: Capture) -> None:
    Path("my_code.py").write_text(
        "from flsuite.callbacks import FederationCallback\n"
        "class Failing(FederationCallback):\n"
        "    def on_round_start(self, run, round, clients):\n"
        "        if run.options.seed == 2 and round == 3:\n"
        "            raise RuntimeError('seed two')\n"
    )
    callback = "trainer.callbacks: [{class_path: my_code.Failing}]"
    methods = VECTORIZED.replace("}}", f", {callback}}}}}")
    name, folder = write_sweep("s.yaml", methods, TOGETHER, "[1, 2, 3]"), tmp_path / "runs" / "s"
    assert cli("sweep", "--config", name) == 1
    assert "A seed 2: RuntimeError: seed two" in capsys.readouterr().out
    assert len(list(folder.rglob("done.json"))) == 2
    theirs = {Path(run).name: own for run, own in results_of(alone).items()}
    for run, (weights, _) in results_of(folder).items():
        if Path(run).name != "seed-2":
            for key, value in theirs[Path(run).name][0].items():
                torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


def test_a_callback_that_exits_ends_its_own_cell_and_its_own_log_says_so(tmp_path: Path) -> None:
    Path("exiting_code.py").write_text(
        "import sys\n"
        "from flsuite.callbacks import FederationCallback\n"
        "class Exiting(FederationCallback):\n"
        "    def on_round_start(self, run, round, clients):\n"
        "        if run.options.seed == 1:\n"
        "            sys.exit('seed one')\n"
    )
    methods = (
        "{A: {trainer.engine: Vectorized, trainer.callbacks: [{class_path: exiting_code.Exiting}]}}"
    )
    name = write_sweep("s.yaml", methods, TOGETHER, "[1, 2]")
    assert cli("sweep", "--config", name) == 1
    (failing,) = (tmp_path / "runs" / "s").glob("*/seed-1")
    assert "SystemExit: seed one" in (failing / "failed.txt").read_text()
    assert "SystemExit" in (failing / "log.txt").read_text()
    other = failing.with_name("seed-2")
    assert (other / "done.json").is_file() and "SystemExit" not in (other / "log.txt").read_text()


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("{A: {trainer.engine: InProcess}}", "trainer.engine is InProcess"),
        (
            "{A: {trainer.engine: {class_path: Vectorized, init_args: {workers: 2}}}}",
            "Vectorized with one worker for every method",
        ),
    ],
)
def test_cells_that_cannot_share_a_stack_are_refused_before_anything_runs(
    methods: str, words: str, capsys: Capture
) -> None:
    name = write_sweep("s.yaml", methods, TOGETHER)
    line = refused(capsys, "sweep", "--config", name)
    assert "together joins the stacks of one process" in line and words in line


def test_a_logger_of_which_a_process_has_one_is_refused() -> None:
    class WandbLogger(CSVLogger):
        """Stands in for the logger of a package that may not be installed."""

    class Own(WandbLogger):
        """A user's own, which is still one of that package."""

    loggers = (CSVLogger("."), False), (WandbLogger("."), True), (Own("."), True)
    for logger, is_refused in loggers:
        trainer = FederatedTrainer(1, engine=Vectorized(), logger=logger)
        refusal = pytest.raises(FlsuiteError, match="has one WandbLogger; choose another")
        with refusal if is_refused else nullcontext():
            cells._refuse_alone(trainer)


def test_together_has_one_value(capsys: Capture) -> None:
    name = write_sweep("s.yaml", VECTORIZED, "together: rates")
    line = refused(capsys, "sweep", "--config", name)
    assert "together" in line and "seeds" in line


def test_workers_share_the_seeds_where_fewer_methods_are_left(tmp_path: Path) -> None:
    two = VECTORIZED.replace("}}", "}, B: {trainer.engine: Vectorized}}")
    for methods, workers, sizes in (
        (VECTORIZED, 1, [3]),
        (VECTORIZED, 2, [2, 1]),
        (two, 2, [3, 2, 1]),
    ):
        sweep = read_sweep(write_sweep("s.yaml", methods, TOGETHER, "[1, 2, 3]"), {}, workers)
        queue, claimed = Queue(sweep, tmp_path / f"{workers}{len(methods)}"), []
        while True:
            with queue.claim() as cell, queue.claim_seeds(cell) as others:
                if cell is None:
                    break
                claimed.append(1 + len(others))
                assert {one.method for one in others} <= {cell.method}
                for one in (cell, *others):
                    queue.begin(one)
                    queue.fail(one, "for the test")
        assert claimed == sizes
