"""Disks that are full or read-only: one line, the last checkpoint is kept, and the run goes on."""

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flsuite import files
from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FederationError
from flsuite.runs import checkpoint
from flsuite.runs.table import _AppendedTable
from tests.commands.command import QUICKSTART, cli
from tests.conftest import classifier, digits, equal_states, trainer

CLIENTS = 2


class AtRound(FederationCallback):
    """Does something to the disk when a round starts."""

    affects = "nothing"
    reads_updates = False

    def __init__(self, round: int, deed: Any) -> None:
        self.round, self.deed = round, deed

    def on_round_start(self, run: Any, round: int, clients: Any) -> None:
        if round == self.round:
            self.deed()


def fit(folder: Path, ckpt_path: str | None = None, deed: Any = None, rounds: int = 3) -> Any:
    callbacks = [AtRound(3, deed)] if deed else []
    made = trainer(rounds=rounds, run_dir=folder, callbacks=callbacks)
    model = classifier(private=["network.3"])  # so that clients keep something on disk
    made.fit(model, digits(CLIENTS, train_samples=90), ckpt_path=ckpt_path)
    return made


def check_going_on(folder: Path, unbroken: Any) -> None:
    """Check that a run that has failed in round 3 goes on to the weights of the unbroken one."""
    stopped = fit(folder, "last", rounds=2)  # finished: it is read, and nothing is trained
    assert stopped.round == 2
    resumed = fit(folder, "last")
    for client in range(CLIENTS):
        ours = resumed.federation.client_state(client)
        assert equal_states(ours, unbroken.federation.client_state(client))
    assert not list(folder.rglob(".*.tmp"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fit(tmp_path_factory.mktemp("whole"))


def _fails_from_then_on(
    target: Any, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Return a deed from which on every call of a function raises an error of the disk."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return lambda: monkeypatch.setattr(target, name, fail)


@pytest.mark.parametrize(
    ("target", "name", "number", "file"),
    [
        (_AppendedTable, "append", errno.EROFS, ""),
        (checkpoint, "save_tensors", errno.ENOSPC, ""),
        (checkpoint, "flush_to_disk", errno.EIO, ""),
        (files, "save_tensors", errno.ENOSPC, "/clients/round-000003.pt"),
        (files, "replace_file", errno.EROFS, ""),
    ],
    ids=["table", "checkpoint", "publishing", "clients", "clients_renamed"],
)
def test_every_place_that_writes_is_covered(
    target: Any,
    name: str,
    number: int,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unbroken: Any,
) -> None:
    deed = _fails_from_then_on(target, name, number, monkeypatch)
    with pytest.raises(FederationError) as caught:
        fit(tmp_path / "run", deed=deed)
    assert str(caught.value).startswith(
        f"cannot write to {tmp_path / 'run'}{file} ({os.strerror(number)}); the last checkpoint"
    )
    monkeypatch.undo()
    check_going_on(tmp_path / "run", unbroken)


def test_the_command_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fails_from_then_on(_AppendedTable, "append", errno.ENOSPC, monkeypatch)()  # in round 1, too
    small = ["--trainer.rounds", "1", "--trainer.max_epochs", "1", "--data.clients", "2"]
    run = str(tmp_path / "run")
    assert cli("fit", "--config", QUICKSTART, *small, "--run_dir", run) == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"flsuite: error: cannot write to {run}")


@contextlib.contextmanager
def full_table(run: Path) -> Iterator[Callable[[], None]]:
    """Yield a deed after which no byte fits into the table."""

    def deed() -> None:
        # In one step: the checkpoint of the round before may just flush the table.
        (run / "table").hardlink_to(run / "metrics.csv")
        (run / "full").symlink_to("/dev/full")
        (run / "full").replace(run / "metrics.csv")

    yield deed
    (run / "table").replace(run / "metrics.csv")


@contextlib.contextmanager
def limited_files(run: Path, bytes: int) -> Iterator[Callable[[], None]]:
    """Yield a deed after which files must be short, as with ``ulimit -f``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (full_table, r"/metrics\.csv \(No space left on device\).* free some space"),
        (partial(limited_files, bytes=20_000), r"/metrics\.csv \(File too large\).*ulimit -f"),
        (partial(limited_files, bytes=3000), r"\.pt\.tmp \(File too large\).*ulimit -f"),
    ],
    ids=["full", "limited", "limited tensors"],
)
def test_the_file_that_does_not_fit_is_named(
    limit: Any, line: str, tmp_path: Path, unbroken: Any
) -> None:
    with limit(tmp_path / "run") as deed, pytest.raises(FederationError, match=line) as caught:
        fit(tmp_path / "run", deed=deed)
    assert str(caught.value).startswith(f"cannot write to {tmp_path / 'run'}")
    check_going_on(tmp_path / "run", unbroken)


def test_other_errors_of_the_system_are_left_as_they_are(tmp_path: Path) -> None:
    def deed() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "the logger's server is gone")

    with pytest.raises(ConnectionResetError):
        fit(tmp_path / "run", deed=deed)


def test_a_disk_without_locks_or_flushing_of_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fails_from_then_on(files.fcntl, "flock", errno.ENOLCK, monkeypatch)()
    _fails_from_then_on(os, "fsync", errno.EINVAL, monkeypatch)()
    fit(tmp_path / "run", rounds=1)
    assert "has no locks: do not start a second run" in caplog.text
    assert fit(tmp_path / "run", "last", rounds=2).round == 2


def test_a_picture_that_cannot_be_drawn_costs_the_picture_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = str(tmp_path / "run")
    small = ["--trainer.max_epochs", "1", "--data.clients", "2"]
    request = ["fit", "--config", QUICKSTART, *small, "--run_dir", run]
    assert cli(*request, "--trainer.rounds", "1") == 0
    (tmp_path / "run" / "partition.png").unlink()
    (tmp_path / "run" / "partition.png").mkdir()
    (tmp_path / "run" / "curves.png").unlink()

    assert cli(*request, "--trainer.rounds", "2", "--ckpt_path", "last") == 0
    assert (tmp_path / "run" / "curves.png").exists()
    assert "partition.png was not written: " in caplog.text
