"""A run can be killed at any moment, and ends as if it had not been."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite.aggregators import FedAdam, FedAvgM
from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import save_tensors
from flsuite.data import Digits, Dirichlet
from flsuite.federation import InProcess, Processes, Synchronous
from flsuite.federation.server.stores import ClientStore
from flsuite.models import MLP, Classifier
from flsuite.runs.checkpoint import load_checkpoint, write_checkpoint
from flsuite.trainer import FederatedTrainer
from tests.aggregators.federations import assert_same_models, table_data, table_model
from tests.conftest import classifier, digits, equal_states, trainer
from tests.runs.killing import kill_and_resume, rounds_on_disk, table_of


def complete_run(
    folder: str, engine: Any, ckpt_path: str | None = "last", rounds: int = 16
) -> FederatedTrainer:
    """Fit a federation that needs all that a checkpoint can hold.

    It has server momentum, partial participation, a private head and kept optimizers.
    """
    torch.set_num_threads(1)
    made = trainer(
        rounds=rounds,
        aggregator=FedAvgM(momentum=0.9),
        schedule=Synchronous(0.5),
        engine=engine,
        evaluate_every=5,
        keep_optimizers=True,
        run_dir=folder,
    )
    model = Classifier(
        MLP(hidden=(16,)),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        private=["network.3"],
    )
    made.fit(model, Digits(clients=8, partition=Dirichlet(0.5), batch_size=32), ckpt_path=ckpt_path)
    return made


def fit(folder: Path, rounds: int = 1, ckpt_path: str | None = None, **kwargs: Any) -> Any:
    model, data = kwargs.pop("model", None), kwargs.pop("data", None)
    made = trainer(rounds=rounds, run_dir=folder, **kwargs)
    made.fit(model or classifier(), data or digits(2), ckpt_path=ckpt_path)
    return made


def longer_run(folder: str, engine: Any, ckpt_path: str | None = "last") -> FederatedTrainer:
    return complete_run(folder, engine, ckpt_path, rounds=40)


@pytest.mark.parametrize(
    ("run", "engine", "kills"),
    [
        pytest.param(longer_run, InProcess(), 5, id="in_process, often"),
        pytest.param(longer_run, Processes(workers=2), 2, id="processes"),
    ],
)
@pytest.mark.long
def test_killed_and_resumed_equals_never_stopped(
    tmp_path: Path, run: Callable[..., FederatedTrainer], engine: Any, kills: int
) -> None:
    whole = run(str(tmp_path / "whole"), InProcess(), ckpt_path=None)
    folder = tmp_path / "killed"
    resumed = kill_and_resume(run, folder, engine, kills, whole.round)
    assert_same_models(resumed, whole)
    # Without a schedule's speeds, virtual time is measured too.
    whole_table = table_of(tmp_path / "whole", "virtual_s")
    assert table_of(folder, "virtual_s").equals(whole_table)


@pytest.mark.parametrize("buffers", ["average", "local", "reset"])
def test_statistics_resume_under_every_policy(buffers: str, tmp_path: Path) -> None:
    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> FederatedTrainer:
        settings = {"batchnorm": buffers, "schedule": Synchronous(2), "model": table_model()}
        return fit(tmp_path / folder, rounds, ckpt_path, data=table_data(clients=4), **settings)

    whole = run("whole", 3)
    run("halves", 1)
    assert_same_models(run("halves", 3, "last"), whole)


def test_killed_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    first = fit(tmp_path)
    for name in ("last.ckpt", "best.ckpt"):
        (tmp_path / "checkpoints" / name).unlink()
    again = fit(tmp_path, 1, "last")
    assert equal_states(first.federation.state, again.federation.state)
    assert rounds_on_disk(tmp_path) == 1


def test_a_run_whose_checkpoint_is_lost_does_not_start_over(tmp_path: Path) -> None:
    fit(tmp_path, 2)
    (tmp_path / "checkpoints" / "last.ckpt").unlink()
    table = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(FlsuiteError, match=r"2 rounds but no checkpoints/last\.ckpt"):
        fit(tmp_path, 3, "last")
    assert (tmp_path / "metrics.csv").read_bytes() == table
    fit(tmp_path, 3, "best")
    assert rounds_on_disk(tmp_path) == 3


class _KilledAtSave(FederationCallback):
    """Ends the process's work where a round has been trained and is not yet in a checkpoint."""

    affects = "nothing"

    def on_round_recorded(self, run: Any, *args: Any) -> None:
        run.folder.table.append()  # cuts off what the picked round does not know
        raise KeyboardInterrupt


def test_a_run_that_goes_on_from_its_picked_round_may_be_killed(tmp_path: Path) -> None:
    """The rows of later rounds are cut off, so last.ckpt must be the picked one by then."""
    momentum = {"aggregator": FedAvgM(0.9)}
    whole = fit(tmp_path / "run", 4, **momentum)
    checkpoints = tmp_path / "run" / "checkpoints"
    content = load_checkpoint(checkpoints / "last.ckpt")
    fit(tmp_path / "short", 2, **momentum)
    # The picked round is round 2, with the limits of the whole run.
    early = load_checkpoint(tmp_path / "short" / "checkpoints" / "last.ckpt")
    early["settings"] = content["settings"]
    del early["digests"]  # of a table with other seconds
    save_tensors(early, checkpoints / "best.ckpt")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", 4, "best", **momentum, callbacks=[_KilledAtSave()])
    again = fit(tmp_path / "run", 4, "last", **momentum)
    assert equal_states(again.federation.state, whole.federation.state)
    assert rounds_on_disk(tmp_path / "run") == 4


@pytest.mark.parametrize("linked", [".best.ckpt.tmp", "best.ckpt"])
def test_a_kill_between_link_and_rename_leaves_nothing_in_the_way(
    tmp_path: Path, linked: str
) -> None:
    """The new checkpoint is linked as the best one before it is renamed to the last one."""
    fit(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    best = (folder / "best.ckpt").read_bytes()
    os.link(folder / "best.ckpt", folder / ".last.ckpt.tmp")
    if linked != "best.ckpt":
        os.link(folder / ".last.ckpt.tmp", folder / linked)

    write_checkpoint({"any": 1}, folder)
    assert (folder / "best.ckpt").read_bytes() == best
    assert fit(tmp_path, 4, "last").round == 4 and not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": digits(partition=Dirichlet(0.1))}, r"alpha is 0\.1 here and 0\.5 there"),
        ({"aggregator": FedAdam()}, r"aggregator is '.*FedAdam' here"),
        ({"seed": 4}, "seed"),
    ],
)
def test_resuming_with_other_settings_names_them(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fit(tmp_path)
    with pytest.raises(FlsuiteError, match=message):
        fit(tmp_path, 2, "last", **settings)


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    fit(tmp_path / "a")
    last = tmp_path / "a" / "checkpoints" / "last.ckpt"
    with pytest.raises(FlsuiteError, match="belongs to another run"):
        fit(tmp_path / "b", 2, str(last))
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(FlsuiteError, match="cannot be read"):
        fit(tmp_path / "a", 2, "last")
    with pytest.raises(FlsuiteError, match="not a checkpoint of a run"):
        fit(tmp_path / "a", 2, str(last.with_name("model.ckpt")))


def test_memories_past_the_budget_come_back_from_disk(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, budget=100)
    for round in range(1, 6):
        store[round] = {"model": {"w": torch.full((20,), float(round))}}
        store.commit(round)
    assert [float(store[client]["model"]["w"][0]) for client in range(1, 6)] == [1, 2, 3, 4, 5]
    assert len(store._resident) == 1, "80 bytes each"
    store[3] = {"model": {"w": torch.zeros(20)}}
    store.commit(6)
    store.remove_unused(store.versions)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"round-{n:06d}.pt" for n in (1, 2, 4, 5, 6)
    ]
    assert store[99] == {} and 99 not in store
