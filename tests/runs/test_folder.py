"""The folder of a run is claimed by one process, and nobody's files are lost."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flsuite.callbacks import FederationCallback, ForestProbe, RoundEarlyStopping
from flsuite.commands.main import main
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import save_tensors
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.folder import RunFolder, new_run_dir
from flsuite.runs.fork import Fork
from flsuite.runs.record import round_of
from tests.conftest import classifier, digits, trainer
from tests.runs.killing import Interrupts

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def fit(
    folder: Path, rounds: int = 1, ckpt_path: str | None = None, lr: float = 0.1, **kwargs: Any
) -> Any:
    made = trainer(rounds=rounds, run_dir=folder, **kwargs)
    made.fit(classifier(lr), digits(2), ckpt_path=ckpt_path)
    return made


def test_files_of_the_user_are_neither_replaced_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = CONFIG.read_text()
    (tmp_path / "config.yaml").write_text(own)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", "config.yaml", "--run_dir", ".", "--model.optimizer.lr", "-1"])
    assert done.value.code == 2
    assert "has a file config.yaml" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == own
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_folder_that_was_there_keeps_what_was_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FlsuiteError):
        fit(tmp_path, callbacks=[ForestProbe()])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("ckpt_path", [None, "last"])
@pytest.mark.parametrize("name", ["checkpoints/best.ckpt", "clients/round-000001.pt"])
def test_files_in_the_folders_of_a_run_are_kept(
    name: str, ckpt_path: str | None, done: Path, tmp_path: Path
) -> None:
    """A fork would copy its parent's files over them, and a run would remove them later."""
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("mine")
    fork = Fork(run=str(done), round=2)
    with pytest.raises(FlsuiteError, match=rf"has a file {name} that a run would replace"):
        fit(tmp_path / "run", 2, ckpt_path, fork=fork)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path.read_text() for path in files] == ["mine"]


def test_folders_of_runs_that_start_together_differ() -> None:
    assert len({new_run_dir("name", 1).name.count("-") for _ in range(3)}) == 1
    assert len(new_run_dir("name", 1).name.split("-")[2]) == 3, "milliseconds"


def test_a_run_that_is_just_beginning_is_not_taken_for_files_of_the_user(tmp_path: Path) -> None:
    beginning = RunFolder(tmp_path)
    with beginning.locked():
        (tmp_path / "timeline.csv").touch()
        for ckpt_path in (None, "last"):
            with pytest.raises(FlsuiteError, match="another process is writing to"):
                fit(tmp_path, ckpt_path=ckpt_path)
    with pytest.raises(FlsuiteError, match=r"has a file timeline\.csv"):
        fit(tmp_path)


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_second_run_looks_while_the_first_one_writes(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_locks:
        monkeypatch.setattr("flsuite.common.files.fcntl", None)
    refusals: list[str] = []

    def versions() -> str:
        """Start the second run between two files of the first one."""
        with pytest.raises(FlsuiteError) as refused:
            fit(tmp_path / "run")
        refusals.append(str(refused.value))
        return ""

    monkeypatch.setattr("flsuite.runs.folder.versions", versions)
    assert fit(tmp_path / "run").round == 1
    said = "another process is writing to" if has_locks else "already holds a run"
    assert len(refusals) == 1 and said in refusals[0]


class _Resumes(FederationCallback):
    affects = "nothing"

    def on_round_start(self, run: Any, round: int, clients: Any) -> None:
        if round == 2:
            fit(run.folder.path, 4, "last")


def test_a_run_that_is_going_on_cannot_be_resumed_beside_it(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match="another process is writing to"):
        fit(tmp_path, 3, callbacks=[_Resumes()])
    assert fit(tmp_path, 4, "last").round == 4


def test_fewer_rounds_leave_the_record_of_a_finished_run(tmp_path: Path) -> None:
    fit(tmp_path, rounds=3)
    fit(tmp_path, rounds=2, ckpt_path="last")
    assert yaml.safe_load((tmp_path / "settings.yaml").read_text())["rounds"] == 3


def test_a_shorter_table_is_refused_and_left_alone(tmp_path: Path) -> None:
    fit(tmp_path, rounds=2)
    table = tmp_path / "metrics.csv"
    table.write_bytes(table.read_bytes()[:-13])
    before = table.read_bytes()
    with pytest.raises(FlsuiteError, match=r"metrics\.csv has \d+ bytes, but had \d+"):
        fit(tmp_path, rounds=3, ckpt_path="last")
    assert table.read_bytes() == before
    table.unlink()
    with pytest.raises(FlsuiteError, match=r"metrics\.csv is missing; restore it"):
        fit(tmp_path, rounds=3, ckpt_path="last")
    with pytest.raises(FlsuiteError, match="already holds a run"):
        fit(tmp_path, rounds=3)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("done") / "run"
    fit(folder, rounds=2)
    return folder


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("name", ["metrics.csv", "timeline.csv"])
def test_a_table_with_another_digit_is_not_resumed_if_the_checkpoint_has_a_digest(
    name: str, is_older: bool, done: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(done, tmp_path / "run")
    before = (run / name).read_bytes()
    (run / name).write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + b"\n")
    if is_older:
        content = load_checkpoint(run / "checkpoints" / "last.ckpt")
        del content["digests"]
        save_tensors(content, run / "checkpoints" / "last.ckpt")
        assert fit(run, 3, "last").round == 3
        return
    damaged = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(FlsuiteError, match=rf"run/{name} was changed after .*; restore the file"):
        fit(run, 3, "last")
    fork = Fork(run=str(run), round=2)
    with pytest.raises(FlsuiteError, match=rf"run/{name} was changed after"):
        fit(tmp_path / "fork", 3, fork=fork)
    assert not (tmp_path / "fork").exists()
    assert damaged == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [b"", b"client,split,class,samples\n", None])
def test_a_resume_writes_a_damaged_partition_anew(
    damage: bytes | None, done: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(done, tmp_path / "run")
    path = run / "partition.csv"
    before = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage)
    fit(run, 2, "last")
    assert path.read_bytes() == before


def test_an_interrupt_leaves_no_folder_or_one_to_resume_and_says_which(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fork = tmp_path / "fork", Fork(run=str(done), round=2)
    with pytest.raises(KeyboardInterrupt, match=f"flsuite resume {run} continues"):
        fit(run, 3, fork=fork, callbacks=[Interrupts(3)])
    assert fit(run, 3, "last", fork=fork).round == 3

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flsuite.runs.store.replace_tensors", interrupt)  # the parent's best round
    with pytest.raises(KeyboardInterrupt, match="no folder is left; the same command starts again"):
        fit(tmp_path / "other", 3, fork=fork)
    assert not (tmp_path / "other").exists()


class _FailsInRound3(FederationCallback):
    affects = "nothing"

    def on_round_end(self, run: Any, round: int) -> None:
        if round == 3:
            raise RuntimeError("boom")


def test_going_on_from_the_best_round_keeps_the_last_one_until_a_round_is_done(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"monitor": "loss", "lr": 3.0}
    best = int(fit(tmp_path, 6, **settings).run.summary.best["round"])
    assert best < 5
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, 7, "best", callbacks=[Interrupts(best + 1)], **settings)
    again = fit(tmp_path, 7, "last", **settings)
    assert again.round == 7
    assert [row[0] for row in again.run.folder.table.rows if row[7] == "clients"] == [*range(1, 8)]


@pytest.mark.parametrize("keep_rounds", [1, 2])
def test_going_on_from_an_earlier_round_takes_back_the_best_one(
    keep_rounds: int, tmp_path: Path
) -> None:
    """It was a round that the run has not done any more."""
    fit(tmp_path, rounds=4, keep_rounds=keep_rounds)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "best.ckpt").unlink()
    shutil.copy(checkpoints / "round-000004.ckpt", checkpoints / "best.ckpt")
    early = load_checkpoint(checkpoints / "round-000002.ckpt")
    early["summary"]["best"]["round"] = 1
    save_tensors(early, checkpoints / "round-000002.ckpt")
    made = fit(tmp_path, 2, str(checkpoints / "round-000002.ckpt"))
    assert made.run.summary.best["round"] == 1
    is_kept = keep_rounds == 1
    assert (checkpoints / "best.ckpt").is_file() == is_kept
    assert not is_kept or round_of(checkpoints / "best.ckpt") == 1


def test_a_round_that_fails_after_its_aggregation_leaves_the_state_before_it(
    tmp_path: Path,
) -> None:
    made = trainer(rounds=4, run_dir=tmp_path, callbacks=[_FailsInRound3()])
    with pytest.raises(RuntimeError, match="boom"):
        made.fit(classifier(), digits(2))
    assert made.round == 2
    scores = made.test()[0]["accuracy"]
    assert made.test(ckpt_path="last")[0]["accuracy"] == scores


def test_scores_without_a_fit_are_refused_every_time(tmp_path: Path) -> None:
    made = trainer(run_dir=tmp_path / "nowhere")
    for model, data in ((classifier(), digits(2)), (None, None)):
        with pytest.raises(FlsuiteError, match=r"no last\.ckpt|nothing has been fitted"):
            made.test(model, data)


def test_early_stopping_without_validation_data_is_refused() -> None:
    made = trainer(rounds=2, callbacks=[RoundEarlyStopping()])
    with pytest.raises(FlsuiteError, match=r"there is none: set data\.val_fraction above 0"):
        made.fit(classifier(), digits(val_fraction=0.0))


def test_two_early_stoppings_on_two_scores_work_together(tmp_path: Path) -> None:
    callbacks = [RoundEarlyStopping(patience=9), RoundEarlyStopping("loss", patience=9)]
    assert fit(tmp_path, 1, callbacks=callbacks).round == 1
    assert fit(tmp_path, 2, "last", callbacks=callbacks).round == 2
