"""``flsuite fork``, ``verify`` and ``pack`` end to end."""

import csv
import errno
import os
import re
import shutil
import signal
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from rich.filesize import decimal
from torch.utils.data import Dataset

from flsuite.analysis.listing import list_runs
from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.commands.comparison import compare
from flsuite.commands.fork import replay
from flsuite.commands.main import main
from flsuite.commands.pack import digest
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.files import save_tensors
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.folder import RunFolder
from flsuite.runs.fork import is_inherited
from flsuite.runs.record import is_finished, kept_on_disk, memories_of, round_of, versions_in_flight
from flsuite.runs.run import Run
from flsuite.runs.summary import RunSummary, print_summary
from flsuite.runs.table import MetricsTable
from tests.commands.command import cli, files, refused
from tests.conftest import THREADS, mostly_long

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
SHORT = [
    *("--data.train_samples", "300", "--model.backbone.hidden", "[4]"),
    *("--trainer.rounds", "4", "--trainer.max_epochs", "1", "--data.clients", "4"),
    *("--trainer.keep_rounds", "2", "--trainer.enable_progress_bar", "false"),
    *("--trainer.schedule.speeds", "Stragglers", "--trainer.engine", "InProcess"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    torch.set_num_threads(THREADS)  # as in each test, but earlier
    cli("fit", "--config", CONFIG, "--run_dir", str(folder), *SHORT)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def verified(*args: str) -> bool:
    with pytest.raises(SystemExit) as end:
        main(["verify", *args])
    assert end.value.code in (0, 1)
    return not end.value.code


@pytest.fixture(scope="module")
def again(finished: Path) -> Path:
    folder = finished.parent / "again"
    replay(finished, 2, 4, folder)
    assert not compare(finished, folder, 2, 4).faults
    return folder


@pytest.fixture
def repeated(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replays begin after round 2, and give what has been done again once."""

    def copy(run: Path, start: int, stop: int, folder: Path) -> None:
        assert start == 2
        shutil.copytree(again, folder)

    monkeypatch.setattr("flsuite.commands.fork.replay", copy)


@pytest.mark.long
@pytest.mark.parametrize("at", ["0", "2"])
def test_an_honest_record_is_verified(run: Path, at: str, capsys: Any) -> None:
    assert verified(str(run), "--at", at, "--rounds", "2")
    assert "are equal, bit for bit" in capsys.readouterr().out


@pytest.mark.usefixtures("repeated")
def test_a_replay_that_meets_no_checkpoint_names_the_next_one(run: Path, capsys: Any) -> None:
    assert verified(str(run), "--at", "2", "--rounds", "1")
    assert "--at 2 --rounds 2 compares those of round 4" in capsys.readouterr().out


def test_a_packed_run_is_verified_where_its_folder_is_gone(run: Path, capsys: Any) -> None:
    cli("pack", str(run), "--output", "a.zip")
    assert "a.zip exists" in refused(capsys, "pack", str(run), "--output", "a.zip")
    shutil.rmtree(run)
    assert verified("a.zip", "--at", "2")
    out, said = capsys.readouterr()
    assert "are equal, bit for bit" in out and "environment" not in out
    assert "no weights" not in out, "it meets a checkpoint"
    assert "forked from" not in out + said, "a replay is a fork, but not the user's"
    data = bytearray(Path("a.zip").read_bytes())
    data[len(data) // 2] ^= 1
    Path("b.zip").write_bytes(bytes(data))
    assert "b.zip" in refused(capsys, "verify", "b.zip")
    with zipfile.ZipFile("a.zip") as packed, zipfile.ZipFile("c.zip", "w") as changed:
        for name in packed.namelist():
            changed.writestr(name, packed.read(name) + b"\n" * name.startswith("content/"))
    assert "c.zip was changed" in refused(capsys, "verify", "c.zip")


def change_settings(run: Path, **changes: Any) -> None:
    path = run / "settings.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


def edit_row(column: str, value: Callable[[str], str], wanted: dict[str, str]) -> Any:
    def edit(run: Path) -> None:
        path = run / "metrics.csv"
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        header = rows[0]
        for row in rows[1:]:
            if all(row[header.index(name)] == other for name, other in wanted.items()):
                row[header.index(column)] = value(row[header.index(column)])
                break
        else:
            raise AssertionError("no such row")
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    return edit


def other_digit(number: str) -> str:
    return number[:-1] + str(9 - int(number[-1]))


def edit_checkpoint(name: str, change: Callable[[dict[str, Any]], None]) -> Any:
    def edit(run: Path) -> None:
        path = run / "checkpoints" / name
        content = torch.load(path, weights_only=True)
        change(content)
        path.unlink()  # it may have twins
        save_tensors(content, path)

    return edit


def nudge_weight(content: dict[str, Any]) -> None:
    weight = next(iter(content["federation"]["state"].values()))
    weight.view(-1)[0] += 1e-6


def change_lines(name: str, old: str, new: str) -> Any:
    def edit(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))

    return edit


def drop_last_line(run: Path) -> None:
    path = run / "timeline.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def row_twice(run: Path) -> None:
    path = run / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    place = next(
        n for n, line in enumerate(lines) if ",global,test,accuracy," in line and line[0] == "3"
    )
    cells = lines[place].split(",")
    lines.insert(place, ",".join([*cells[:-1], "0.999\n"]))
    path.write_text("".join(lines))


def exported(run: Path) -> None:
    path = run / "checkpoints" / "model.ckpt"
    content = torch.load(path, weights_only=True)
    next(iter(content["state_dict"].values())).add_(1.0)
    torch.save(content, path)


def count_updates(content: dict[str, Any]) -> None:
    content["federation"]["clock"]["client_updates"] += 1


def remember(content: dict[str, Any]) -> None:
    content["federation"]["clients"][0] = 4


TEST = {"round": "4", "scope": "global", "split": "test", "metric": "accuracy"}
EDITS: dict[str, Callable[[Path], None]] = {
    "a score": edit_row("value", lambda v: f"{float(v) + 0.01:.9g}", TEST),
    "the last digit": edit_row("value", other_digit, TEST),
    "a client's loss": edit_row(
        "value", lambda v: "0.1", {"round": "3", "scope": "1", "split": "train", "metric": "loss"}
    ),
    "bytes": edit_row("bytes", lambda v: str(int(v) // 2), {"round": "4"}),
    "a virtual second": edit_row("virtual_s", lambda v: f"{float(v) / 2:.9g}", {"round": "3"}),
    "a weight at the start": edit_checkpoint("round-000002.ckpt", nudge_weight),
    "a weight at the end": edit_checkpoint("round-000004.ckpt", nudge_weight),
    "a setting": change_lines("settings.yaml", "lr: ", "lr: 1"),
    "a config": change_lines("config.yaml", "lr: ", "lr: 1"),
    "a fit": drop_last_line,
    "the timeline": lambda run: (run / "timeline.csv").unlink(),
    "an outcome": change_lines("timeline.csv", ",merged,4,", ",late,4,"),
    "a row before the true one": row_twice,
    "the exported model": exported,
    "a clock": edit_checkpoint("round-000004.ckpt", count_updates),
    "the partition": change_lines("partition.csv", "0,train,", "0,val,"),
    "a client in the timeline": change_lines("timeline.csv", "\n9,1,", "\n9,2,"),
    "a row of an earlier round": edit_row("scope", lambda v: "2", {"round": "1", "scope": "1"}),
    "a fit of an earlier round": change_lines("timeline.csv", "\n1,1,", "\n1,2,"),
}


# Edits that the replay itself meets, and one of the others.
REPLAYED = ("a weight at the start", "a config", "the timeline")


@pytest.mark.parametrize("name", [name for name in EDITS if name not in REPLAYED])
def test_an_edited_record_is_found(name: str, run: Path, again: Path) -> None:
    EDITS[name](run)
    assert compare(run, again, 2, 4).faults


@pytest.mark.parametrize("name", mostly_long({name: name for name in REPLAYED}, "the timeline"))
def test_an_edited_record_does_not_verify(name: str, run: Path, capsys: Any) -> None:
    EDITS[name](run)
    assert not verified(str(run), "--at", "2")
    assert "does not verify" in capsys.readouterr().err


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def raise_(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def full_disk() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/again")
    except OSError as error:
        raise FederationError("cannot write to /tmp/again") from error


ENDS: dict[str, tuple[Callable[[], None], int, str]] = {
    "Ctrl-C": (raise_(KeyboardInterrupt()), 130, "interrupted"),
    "SIGTERM": (terminate, 143, "terminated"),
    "a full disk": (full_disk, 2, "No space left on device: '/tmp/again'; free some space in"),
    "a missing plugin": (
        raise_(FlsuiteError("plugins: cannot import 'a'")),
        2,
        "cannot import 'a'",
    ),
    "a failed run": (raise_(FederationError("no client")), 1, "cannot be done again: no client"),
}


@pytest.mark.parametrize(("end", "status", "words"), ENDS.values(), ids=ENDS)
def test_a_replay_that_did_not_end_is_no_verdict(
    end: Callable[[], None],
    status: int,
    words: str,
    run: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run.parent / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(run.parent / "tmp"))
    monkeypatch.setattr("flsuite.commands.fork.dispatch", lambda command, args: end())
    handler = signal.getsignal(signal.SIGTERM)
    assert cli("verify", str(run)) == status
    signal.signal(signal.SIGTERM, handler)
    said = capsys.readouterr().err
    assert words in said and ("does not verify" in said) == (status == 1)
    assert not [*(run.parent / "tmp").iterdir()]


@pytest.mark.usefixtures("repeated")
@pytest.mark.parametrize("name", ["last.ckpt", "model.ckpt"])
def test_a_record_without_its_model_is_not_verified(name: str, run: Path, capsys: Any) -> None:
    (run / "checkpoints" / name).unlink()
    assert not verified(str(run), "--at", "2", "--rounds", "1")
    out, said = capsys.readouterr()
    assert f"{name} is missing" in out + said and "does not verify" in said


def test_a_checkpoint_without_one_of_its_parts_is_one_line(run: Path, capsys: Any) -> None:
    path = run / "checkpoints" / "last.ckpt"
    whole = torch.load(path, weights_only=True)
    inner = whole["federation"]
    others: list[Any] = [[1], {**whole, "federation": {**inner, "clock": {"round": "4"}}}]
    optional = {"digests"}  # earlier versions wrote none
    others += [{k: v for k, v in whole.items() if k != name} for name in whole.keys() - optional]
    others += [
        {**whole, "federation": {k: v for k, v in inner.items() if k != name}} for name in inner
    ]
    for content in others:
        save_tensors(content, path)
        with pytest.raises(FlsuiteError):
            load_checkpoint(path)
        if content != [1] and "format" in content:
            with pytest.raises(FlsuiteError):
                round_of(path)
    for command in ("resume", "verify", "pack"):
        assert "last.ckpt is not a checkpoint of a run" in refused(capsys, command, str(run))


@pytest.mark.parametrize(("limit", "is_reached"), [(16, True), (17, False)])
def test_a_run_may_end_by_its_work(run: Path, limit: int, is_reached: bool) -> None:
    change_settings(run, rounds=None, max_client_updates=limit)
    assert is_finished(run) == is_reached
    assert [row["state"] == "finished" for _, row in list_runs([run]).iterrows()] == [is_reached]


@pytest.mark.long
def test_a_run_that_was_extended_is_verified(run: Path) -> None:
    cli("resume", str(run), "--trainer.rounds", "6")
    assert verified(str(run), "--at", "2", "--rounds", "4")
    cli("fork", str(run), "--at", "5", "--run_dir", "fork")
    assert verified("fork")


class AtTheEnd(FederationCallback):
    """Logs a score in the last round alone."""

    affects: ClassVar[Affects] = "nothing"

    def on_round_end(self, run: Run, round: int) -> None:
        if run.finished:
            run.log_metric("beauty", float(round), split="test")


@pytest.mark.long
def test_the_scores_of_an_earlier_end_are_verified_too(tmp_path: Path, capsys: Any) -> None:
    """A callback may add them under any name."""
    own = ["--trainer.callbacks+", f"{__name__}.AtTheEnd"]
    cli("fit", "--config", CONFIG, "--run_dir", "run", *SHORT, *own)
    cli("resume", "run", "--trainer.rounds", "6")
    assert [row["round"] for row in rows_of(Path("run")) if row["metric"] == "beauty"] == ["4", "6"]
    assert verified("run", "--at", "2", "--rounds", "4")
    assert verified("run", "--at", "2", "--rounds", "1") and verified("run", "--at", "4")
    edit_row("value", lambda v: "5", {"round": "4", "metric": "beauty"})(Path("run"))
    assert not verified("run", "--at", "2", "--rounds", "4")


def seal(run: Path) -> None:
    """Let the last checkpoint belong to the tables as they are."""
    tables = {"table": run / "metrics.csv", "timeline": run / "timeline.csv"}
    content: dict[str, Any] = {name: path.stat().st_size for name, path in tables.items()}
    content["digests"] = {name: digest(path) for name, path in tables.items()}
    edit_checkpoint("last.ckpt", lambda checkpoint: checkpoint.update(content))(run)


def interrupt(run: Path) -> None:
    """Leave a run as a kill does: no scores of an end, and no ``model.ckpt``."""
    (run / "checkpoints" / "model.ckpt").unlink()
    change_settings(run, rounds=400)
    edit_checkpoint("last.ckpt", lambda content: content["summary"].update(ends=[]))(run)
    path = run / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",accuracy/" not in line))
    seal(run)


@pytest.mark.usefixtures("repeated")
def test_a_run_that_was_killed_is_verified_as_far_as_it_came(run: Path, capsys: Any) -> None:
    cli("pack", str(run), "--output", "whole.zip")
    assert "interrupted" not in capsys.readouterr().err
    interrupt(run)
    cli("pack", str(run), "--output", "killed.zip")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run} was interrupted after round 4: flsuite resume" in line
    assert verified("killed.zip", "--at", "2")


@pytest.mark.parametrize(
    ("round", "origin", "is_parents"), [(2, None, True), (3, None, False), (2, {"round": 2}, False)]
)
def test_a_round_that_a_parent_picked_is_no_round_of_its_fork(
    round: int, origin: Any, is_parents: bool
) -> None:
    picked = {"federation": {"clock": {"round": round}}, "settings": {"fork": origin}}
    assert is_inherited(picked, {"fork": {"round": 2}}) == is_parents


@pytest.mark.long
def test_a_fork_keeps_the_round_that_its_parent_picked(run: Path, capsys: Any) -> None:
    flip = ("SignFlip", "--trainer.attack.fraction", "0.9", "--trainer.attack.scale", "20")
    changed = ("--trainer.aggregator", "SCAFFOLD", "--trainer.attack", *flip)
    cli("fork", str(run), "--at", "4", *changed, "--trainer.rounds", "5", "--run_dir", "fork")
    picked = load_checkpoint(Path("fork/checkpoints/best.ckpt"))
    assert not picked["settings"].get("attack")
    again = ("--config", "fork/config.yaml", "--run_dir", "fork", "--ckpt_path")
    round = picked["federation"]["clock"]["round"]
    assert f"flsuite fork {run} --at {round}" in refused(capsys, "fit", *again, "best")
    cli("fit", *again, "last", "--trainer.rounds", "6")
    assert verified("fork")


@pytest.mark.long
def test_the_picked_round_of_a_parent_with_another_rate_is_scored(run: Path, capsys: Any) -> None:
    """The rate is an argument of the model, and no score depends on it."""
    slow = ("--model.optimizer.lr", "0.0001", "--trainer.rounds", "5")
    cli("fork", str(run), "--at", "4", *slow, "--run_dir", "fork")
    for path in Path("fork/checkpoints").glob("best.ckpt"):  # whichever round was picked
        shutil.copy(run / "checkpoints" / "best.ckpt", path)
    capsys.readouterr()
    tables = []
    for folder in ("fork", str(run)):
        assert cli("test", folder, "--ckpt_path", "best") == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    other = ("--data.partition.alpha", "9")
    assert "hold the samples of the parent" in refused(
        capsys, "test", "fork", "--ckpt_path", "best", *other
    )


@pytest.mark.long
def test_a_fork_keeps_what_was_in_flight_in_the_round_that_its_parent_picked() -> None:
    schedule = ("Asynchronous", "--trainer.schedule.concurrency", "4")
    schedule += ("--trainer.schedule.buffer_size", "2", "--trainer.schedule.speeds", "Stragglers")
    cli("fit", "--config", CONFIG, "--run_dir", "one", *SHORT, "--trainer.schedule", *schedule)
    flip = ("SignFlip", "--trainer.attack.fraction", "0.9", "--trainer.attack.scale", "20")
    more = ("--trainer.rounds", "8", "--run_dir", "fork")
    cli("fork", "one", "--at", "4", "--trainer.attack", *flip, *more)
    picked = load_checkpoint(Path("fork/checkpoints/best.ckpt"))["federation"]
    assert picked["clock"]["round"] <= 4 and versions_in_flight(picked)
    assert all((Path("fork") / name).is_file() for name in memories_of(picked))
    assert cli("pack", "fork") == 0
    request = ("fork", "fork", "--at", "8", "--trainer.rounds", "9", "--run_dir", "again")
    assert cli(*request) == 0


@pytest.mark.long
def test_a_fork_is_without_whom_its_parent_is_without(run: Path) -> None:
    cli("fork", str(run), "--at", "2", "--without", "2", "--run_dir", "one")
    more = ("--trainer.rounds", "5", "--run_dir", "two")
    cli("fork", "one", "--at", "4", "--without", "1", *more)
    assert yaml.safe_load(Path("two/settings.yaml").read_text())["without"] == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize("speeds", ["null", "Measured"])
def test_measured_times_are_not_compared(speeds: str) -> None:
    measured = ("--trainer.schedule.speeds", speeds)
    cli("fit", "--config", CONFIG, "--run_dir", "other", *SHORT, *measured)
    assert verified("other", "--at", "2")


def cut(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text((run / name).read_text()[:-5])


def empty(name: str) -> Callable[[Path], object]:
    return lambda run: next(run.glob(name)).write_bytes(b"")


UNPACKABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda run: (run / "settings.yaml").unlink(), "no settings.yaml"),
    "empty settings": (empty("settings.yaml"), "does not hold the settings of a run"),
    "no last.ckpt": (lambda run: (run / "checkpoints/last.ckpt").unlink(), "no checkpoints/last"),
    "no timeline": (lambda run: (run / "timeline.csv").unlink(), "timeline.csv is missing"),
    "cut table": (cut("metrics.csv"), "is cut off; restore it"),
    "changed table": (
        edit_row("wall_s", other_digit, {"round": "1"}),
        "metrics.csv was changed after the checkpoint was written; restore the file",
    ),
    "damaged checkpoint": (empty("checkpoints/round-*.ckpt"), "cannot be read as a checkpoint"),
    "cut checkpoint": (
        lambda run: os.truncate(run / "checkpoints" / "round-000002.ckpt", 3000),
        "checkpoints/round-000002.ckpt cannot be read as a checkpoint",
    ),
    "no rounds": (
        lambda run: (run / "metrics.csv").write_text(",".join(MetricsTable.columns) + "\n"),
        "no finished round",
    ),
    "no memories of clients": (
        edit_checkpoint("last.ckpt", remember),
        "round-000004.pt is missing; restore it",
    ),
    "an endless cell": (
        lambda run: (run / "timeline.csv").open("a").write("9" * 200_000 + "\n"),
        "timeline.csv is damaged (field larger than",
    ),
}


@pytest.mark.parametrize(("damage", "words"), UNPACKABLE.values(), ids=UNPACKABLE)
def test_a_damaged_run_leaves_no_packed_file(
    damage: Callable[[Path], object], words: str, run: Path, capsys: Any
) -> None:
    damage(run)
    assert words in refused(capsys, "pack", str(run), "--output", "a.zip")
    assert not [*Path().glob("*.zip*"), *Path().glob(".*.tmp")]


def test_a_running_run_is_not_packed(run: Path, capsys: Any) -> None:
    with RunFolder(run).locked():
        assert "is still running" in refused(capsys, "pack", str(run), "--output", "a.zip")
    assert not Path("a.zip").exists()
    assert cli("pack", str(run), "--output", "a.zip") == 0


@pytest.mark.parametrize("command", ["pack", "verify", "fork", "contribution"])
def test_a_damaged_byte_of_a_table_is_one_line(command: str, run: Path, capsys: Any) -> None:
    path = run / "metrics.csv"
    content = bytearray(path.read_bytes())
    content[900] = 0xC4
    path.write_bytes(bytes(content))
    more = {"fork": ["--at", "3", "--run_dir", "fork"]}.get(command, [])
    line = refused(capsys, command, str(run), *more)
    assert "metrics.csv is damaged at byte 900; restore it" in line


MEASURED = {
    "class_path": "flsuite.federation.Asynchronous",
    "init_args": {"speeds": {"class_path": "flsuite.federation.Measured"}},
}
UNREPEATABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no round": (lambda run: change_settings(run, fork={"round": 4}), "no round of its own"),
    "measured": (
        lambda run: change_settings(run, schedule=MEASURED),
        "measured times have decided",
    ),
    "no text": (lambda run: (run / "settings.yaml").write_text("a: ["), "not valid YAML"),
}


@pytest.mark.parametrize(("change", "words"), UNREPEATABLE.values(), ids=UNREPEATABLE)
def test_what_cannot_be_done_again_is_said_in_one_line(
    change: Callable[[Path], object], words: str, run: Path, capsys: Any
) -> None:
    change(run)
    assert words in refused(capsys, "verify", str(run))


@pytest.mark.parametrize("name", ["metrics.csv", "timeline.csv"])
def test_a_table_that_was_cut_off_is_said_in_one_line(name: str, run: Path, capsys: Any) -> None:
    path = run / name
    lines = path.read_text().splitlines(keepends=True)
    for size in len(lines[-1]) // 2, 1:
        path.write_text("".join(lines)[:-size])
        assert not verified(str(run), "--at", "2")
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{name}, line {len(lines)} is cut off" in line


@pytest.mark.usefixtures("repeated")
def test_small_differences_pass_on_another_cpu_alone(run: Path, capsys: Any) -> None:
    edit_checkpoint("round-000004.ckpt", nudge_weight)(run)
    edit_row("value", lambda v: f"{float(v) + 1e-4:.9g}", TEST)(run)
    seal(run)
    assert not verified(str(run), "--at", "2")
    assert "threads and CPU are those of the record" in capsys.readouterr().err
    change_lines("versions.txt", "threads ", "threads 9")(run)
    assert verified(str(run), "--at", "2")
    out = capsys.readouterr().out
    assert "another environment: threads 9" in out and "0.001 is allowed, 0.01 for a score" in out
    edit_row("value", lambda v: f"{float(v) + 0.1:.9g}", TEST)(run)
    assert not verified(str(run), "--at", "2")


def rows_of(run: Path) -> Iterator[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        yield from csv.DictReader(file)


def test_a_round_that_was_not_kept_is_replayed_and_kept(run: Path, capsys: Any) -> None:
    args = ["fork", str(run), "--at", "3", "--run_dir", "fork"]
    assert "unknown key" in refused(capsys, *args, "--trainer.beauty", "1")
    wrong = refused(capsys, *args, "--without", "44")
    assert wrong.endswith("there is no client 44; there are 0 to 3")
    assert not (run / "checkpoints" / "round-000003.ckpt").exists()
    cli(*args, "--without", "1")
    assert "replaying it from round 2" in capsys.readouterr().err
    assert (run / "checkpoints" / "round-000003.ckpt").is_file() and not (run / ".replay").exists()
    fork = Path("fork")
    scopes = {row["scope"] for row in rows_of(fork) if row["round"] == "4"}
    assert "1" not in scopes and {"0", "2", "3", "global"} <= scopes
    settings = yaml.safe_load((fork / "settings.yaml").read_text())
    assert settings["fork"]["round"] == 3 and settings["without"] == [1]


@pytest.mark.long
def test_a_fork_of_a_replayed_round_ends_like_its_parent(run: Path) -> None:
    cli("fork", str(run), "--at", "3", "--run_dir", "same")
    assert [*rows_of(Path("same"))][-1]["value"] == [*rows_of(run)][-1]["value"]
    assert verified("same")


def test_only_a_replay_writes_to_the_parent_and_needs_its_whole_table(
    run: Path, capsys: Any
) -> None:
    """Several forks of a kept round begin at a time, and its own rows are whole."""
    edit_row("wall_s", other_digit, {"round": "4"})(run)
    replays = ("fork", str(run), "--at", "3", "--run_dir", "other")
    with RunFolder(run).locked():
        assert cli("fork", str(run), "--at", "2", "--run_dir", "fork") == 0
        assert "another process is writing" in refused(capsys, *replays)
    assert f"{run / 'metrics.csv'} was changed after" in refused(capsys, *replays)


def test_a_refused_fork_leaves_nothing_in_a_folder_that_was_there(run: Path, capsys: Any) -> None:
    Path("out/clients").mkdir(parents=True)
    Path("out/clients/mine.txt").write_text("mine")
    request = ("fork", str(run), "--at", "4", "--trainer.rounds", "4", "--run_dir", "out")
    line = refused(capsys, *request)
    assert line.endswith("after round 4; begin at an earlier one, or raise trainer.rounds (now 4)")
    assert [str(path) for path in Path("out").rglob("*")] == ["out/clients", "out/clients/mine.txt"]


def test_a_fork_whose_first_round_fails_leaves_no_folder(run: Path, capsys: Any) -> None:
    args = ["fork", str(run), "--at", "2", "--run_dir", "fork"]
    line = refused(capsys, *args, "--model.optimizer.momentum", "-1")
    assert "no client can train" in line and not Path("fork").exists()
    shutil.move(run / "timeline.csv", "kept.csv")
    assert "timeline.csv is missing; restore it" in refused(capsys, *args)
    assert not Path("fork").exists()


def test_an_interrupted_fork_names_the_folder_that_it_leaves_if_any(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = files(run)

    def interrupted(at: str) -> str:
        assert cli("fork", str(run), "--at", at, "--run_dir", "fork") == 130
        return (
            capsys.readouterr().err.splitlines()[-1].removeprefix("flsuite: error: interrupted; ")
        )

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "requests", interrupt)
    assert interrupted("3") == "the same command does the rounds again"
    assert not Path("fork").exists() and files(run) == before
    assert interrupted("2") == "flsuite resume fork continues after the last finished round"
    monkeypatch.setattr("flsuite.commands.fork.dispatch", interrupt)
    assert interrupted("2") == "nothing was written, and the same command starts again"
    assert files(run) == before


@pytest.mark.long
def test_the_keys_of_a_fork_are_those_that_it_was_forked_with(run: Path, capsys: Any) -> None:
    cli("fork", str(run), "--at", "2", "--run_dir", "one", "--trainer.aggregator", "FedAdam")
    args = ["fork", "one", "--at", "3", "--run_dir", "two"]
    assert "unknown key" in refused(capsys, *args, "--trainer.aggregator.mu", "1")
    cli(*args, "--trainer.aggregator.lr", "0.05")
    settings = yaml.safe_load(Path("two/settings.yaml").read_text())
    assert settings["aggregator"]["class_path"].endswith("FedAdam")
    assert "0.05" in str(settings["aggregator"])


def test_the_end_of_a_run_tells_what_its_kept_rounds_take(finished: Path, capsys: Any) -> None:
    print_summary(RunSummary("accuracy"), finished)
    kept = [finished / "checkpoints" / f"round-00000{round}.ckpt" for round in (2, 4)]
    size = sum(path.stat().st_size for path in kept)
    assert kept_on_disk(finished) == (2, size)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "kept rounds, bytes" in line)
    assert f"2 / {decimal(size)}" in row


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["fork", "run"], "--at"),
        (["fork", "run", "--at", "9"], "has 4 rounds; give --at up to 4"),
        (["fork", "run", "--at", "-1"], "must be a round"),
        (["fork", "nowhere", "--at", "1"], "is not a run"),
        (["verify", "run", "--at", "1"], "must be one of [0, 2"),
        (["verify", "run", "--rounds", "0"], "at least 1"),
        (["verify", "run/config.yaml"], "is not a run packed"),
        (["pack", "nowhere"], "is not a run"),
    ],
)
def test_a_wrong_request_is_one_line(args: list[str], reason: str, run: Path, capsys: Any) -> None:
    assert reason in refused(capsys, *args)


def test_a_changed_file_of_the_split_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "split.csv", tmp_path / "run"
    file.write_text("sample,client\n" + "".join(f"{n},{n % 4}\n" for n in range(200)))
    partition = "--data.partition", "FromFile", "--data.partition.path", str(file)
    assert cli("fit", "--config", CONFIG, "--run_dir", str(run), *SHORT, *partition) == 0
    file.write_text(file.read_text().replace("0,0\n1,1\n", "0,1\n1,0\n"))
    capsys.readouterr()
    for at in ("0", "2"):
        assert cli("verify", str(run), "--at", at, "--rounds", "1") == 2
        said = capsys.readouterr().err
        assert re.search(r"partition.path is split.csv, content (\w+), but .* content (?!\1)", said)


class Blobs(Dataset[tuple[torch.Tensor, int]]):
    """Two classes, apart in the first feature."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([2.0 * (index % 2) - 1.0, index / 40]), index % 2


def test_a_run_of_a_dataset_is_verified(tmp_path: Path, capsys: Any) -> None:
    own = {"class_path": f"{__name__}.Blobs"}
    data = {"class_path": "FromDataset", "init_args": {"train": own, "test": own, "clients": 2}}
    model = {"class_path": "Classifier", "init_args": {"backbone": "MLP"}}
    config, run = tmp_path / "config.yaml", str(tmp_path / "run")
    config.write_text(yaml.safe_dump({"model": model, "data": data, "trainer": {"rounds": 2}}))
    assert (
        cli("fit", "--config", str(config), "--run_dir", run, "--trainer.accelerator", "cpu") == 0
    )
    assert cli("verify", run) == 0
    assert "verified:" in capsys.readouterr().out
