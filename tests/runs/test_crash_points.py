"""A run that is killed at any write, link, rename or removal goes on to the same end."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from flsuite.aggregators import FedAvgM
from flsuite.callbacks import RoundEarlyStopping
from flsuite.federation import Asynchronous, Schedule, Synchronous
from flsuite.models import MLP, Classifier
from flsuite.runs.checkpoint import BackgroundTask
from flsuite.runs.table import _AppendedTable
from flsuite.trainer import FederatedTrainer
from tests.conftest import digits, equal_states, trainer
from tests.federation.schedules.simulation import PerClient
from tests.runs.killing import table_of

CLIENTS = 3
KILLED = 9
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "synchronous": lambda: Synchronous(2),
    "asynchronous": lambda: Asynchronous(2, 1, speeds=PerClient(1.0, 2.5, 4.0)),
}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def fit(folder: Path, schedule: str) -> FederatedTrainer:
    """Fit a federation with all that a checkpoint can hold, or go on with it."""
    made = trainer(
        rounds=2,
        aggregator=FedAvgM(momentum=0.9),
        schedule=SCHEDULES[schedule](),
        keep_optimizers=True,
        callbacks=[RoundEarlyStopping("loss", patience=5)],
        run_dir=folder,
    )
    model = Classifier(
        MLP(hidden=(8,)),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        private=["network.3"],
    )
    made.fit(model, digits(CLIENTS, train_samples=90), ckpt_path="last")
    return made


def count_writes(patch: pytest.MonkeyPatch, last: int = 0) -> list[int]:
    """Count what changes the disk, in a list of one number.

    Args:
        patch: Undoes it.
        last: The process ends at this one: before a rename, and in the middle of a file. 0 for
            never.
    """
    done = [0]

    def is_last() -> bool:
        done[0] += 1
        return done[0] == last

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_last():
                os._exit(KILLED)
            return original(*args, **kwargs)

        return call

    def halve(path: Path, before: int) -> None:
        if is_last():
            os.truncate(path, (before + path.stat().st_size) // 2)
            os._exit(KILLED)

    def save(content: Any, file: BinaryIO, original: Callable[..., Any] = torch.save) -> None:
        original(content, file)
        file.flush()  # what is not on the disk could not be cut in the middle
        halve(Path(file.name), before=0)

    def append(table: _AppendedTable, original: Callable[..., int] = _AppendedTable.append) -> int:
        before = table.path.stat().st_size if table.path else 0
        size = original(table)
        if table.path:
            halve(table.path, before)
        return size

    for name in ("link", "replace", "unlink"):
        patch.setattr(os, name, ending(getattr(os, name)))
    patch.setattr(torch, "save", save)
    patch.setattr(_AppendedTable, "append", append)
    # In this thread, so that the order is the same every time.
    patch.setattr(BackgroundTask, "start", lambda self, work: work())
    return done


def fit_and_die(folder: Path, schedule: str, last: int) -> int:
    """Fit in a process that ends at this write, and return its exit status."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        count_writes(pytest.MonkeyPatch(), last)
        fit(folder, schedule)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", [9, pytest.param(2, marks=pytest.mark.long)])
def test_killed_at_any_write_and_resumed_equals_never_stopped(
    schedule: str, step: int, tmp_path: Path
) -> None:
    """Try every ninth write, or every second one."""
    torch.set_num_threads(1)  # a forked process would wait for OpenMP's threads, which it lacks
    with pytest.MonkeyPatch.context() as patch:
        writes = count_writes(patch)
        whole = fit(tmp_path / "whole", schedule)
    for last in range(1, writes[0] + 1, step):
        folder = tmp_path / str(last)
        assert fit_and_die(folder, schedule, last) == KILLED
        resumed = fit(folder, schedule)
        assert equal_states(resumed.federation.state, whole.federation.state), last
        for client in range(CLIENTS):
            ours, theirs = (made.federation.client_state(client) for made in (resumed, whole))
            assert equal_states(ours, theirs), (last, client)
        assert table_of(folder, "virtual_s").equals(table_of(tmp_path / "whole", "virtual_s")), last
