"""Runs that begin at a moment of another one, and clients that leave: what keeps its draws."""

import csv
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD

from flsuite.aggregators import (
    APFL,
    SCAFFOLD,
    Ditto,
    DPFedAvg,
    FedAdam,
    FedAvg,
    FedBuff,
    LocalOnly,
    Mean,
    SignFlip,
)
from flsuite.aggregators.part import Server
from flsuite.analysis.groups import group_runs
from flsuite.analysis.report import report_table
from flsuite.callbacks import GradientDissimilarity, TaskMatrix, dissimilarity
from flsuite.callbacks.dissimilarity import gradient_batches
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import save_tensors
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, Tree
from flsuite.data import Digits, TaskSequence
from flsuite.federation import Asynchronous, Auto, Stragglers, Synchronous
from flsuite.federation.engines import auto
from flsuite.models import MLP, Classifier
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.fork import Fork
from flsuite.runs.record import kept_rounds
from tests.aggregators.federations import assert_same_models
from tests.conftest import digits, equal_states, table, trainer
from tests.runs.killing import Interrupts

ROUNDS = 4


def fit(folder: Path, name: str, rounds: int = ROUNDS, lr: float = 0.1, **settings: Any) -> Any:
    resumed = {k: settings.pop(k) for k in ("ckpt_path",) if k in settings}
    clients, data = settings.pop("clients", 6), settings.pop("data", {})
    network = settings.pop("model", None)
    network = network or Classifier(MLP(hidden=(8,)), optimizer=partial(SGD, lr=lr))
    tasks = settings.pop("tasks", None)
    made = trainer(rounds=rounds, run_dir=folder / name, enable_checkpointing=True, **settings)
    samples = digits(clients, **{"train_samples": 240, **data})
    made.fit(network, tasks(samples) if tasks else samples, **resumed)
    return made


def in_tasks(samples: Digits) -> TaskSequence:
    return TaskSequence(samples, tasks=2, classes_per_task=3, rounds_per_task=2)


def virtual(**kwargs: Any) -> Synchronous:
    return Synchronous(speeds=Stragglers(), **kwargs)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "FedAvg": {"aggregator": FedAvg, "schedule": lambda: virtual(participation=3)},
    "SCAFFOLD": {"aggregator": SCAFFOLD, "schedule": lambda: virtual(participation=3)},
    "Ditto": {"aggregator": Ditto, "schedule": lambda: virtual(participation=3)},
    "FedAdam": {
        "aggregator": FedAdam,
        "schedule": lambda: virtual(over_selection=1.5, participation=3),
    },
    "FedBuff": {
        "aggregator": FedBuff,
        "schedule": lambda: Asynchronous(concurrency=3, buffer_size=2),
    },
    "tasks": {"aggregator": FedAvg, "tasks": lambda: in_tasks, "schedule": virtual},
    "DPFedAvg": {
        "aggregator": lambda: DPFedAvg(noise_multiplier=1.0, clip=1.0),
        "schedule": lambda: Synchronous(sampling="poisson", participation=0.5),
    },
}


def parts(name: str) -> dict[str, Any]:
    return {key: make() for key, make in CASES[name].items()}


def numbers(folder: Path) -> dict[Any, str]:
    """Return all numbers in a run's table but measured times, by round and name."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    named = {(int(r["round"]), r["scope"], r["split"], r["metric"]): r["value"] for r in rows}
    return {key: value for key, value in named.items() if not key[3].endswith("seconds")}


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that fits a case once for all tests, with kept rounds."""
    return cache(
        lambda name: fit(tmp_path_factory.mktemp(name), "run", keep_rounds=2, **parts(name))
    )


def fork_of(parent: Any, round: int) -> Fork:
    return Fork(str(parent.run.folder.path), round)


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_a_fork_without_changes_ends_like_its_parent(
    name: str, parents: Any, tmp_path: Path
) -> None:
    parent = parents(name)
    folder = parent.run.folder.path
    assert {2, 4} <= {*kept_rounds(folder)}
    for round in (0, 2) if name == "FedAvg" else (2,):
        made = fit(tmp_path, f"fork-{round}", fork=fork_of(parent, round), **parts(name))
        assert_same_models(made, parent)
        assert numbers(tmp_path / f"fork-{round}") == numbers(folder)
    if parent.schedule.is_virtual:  # other times are measured
        timelines = [run / "timeline.csv" for run in (folder, tmp_path / "fork-2")]
        assert timelines[0].read_text() == timelines[1].read_text()


def test_a_fork_is_resumed_like_any_run_even_without_its_parent(
    parents: Any, tmp_path: Path
) -> None:
    shutil.copytree(parents("Ditto").run.folder.path, tmp_path / "parent")

    def run(folder: str, rounds: int = ROUNDS, **more: Any) -> Any:
        fork = Fork(str(tmp_path / "parent"), 2)
        return fit(tmp_path, folder, rounds, lr=0.05, fork=fork, **more, **parts("Ditto"))

    whole = run("whole")
    run("parts", rounds=3)
    (tmp_path / "parent").rename(tmp_path / "moved")
    assert_same_models(run("parts", ckpt_path="last"), whole)
    settings = whole.run.settings
    assert settings["fork"]["round"] == 2 and settings["forked_from"] == str(tmp_path / "parent")


def test_a_fork_that_was_killed_in_its_first_round_begins_again(
    parents: Any, tmp_path: Path
) -> None:
    parent = parents("Ditto")
    fork = fork_of(parent, 2)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, "fork", fork=fork, callbacks=[Interrupts(3)], **parts("Ditto"))
    assert not (tmp_path / "fork" / "checkpoints" / "last.ckpt").exists()
    made = fit(tmp_path, "fork", fork=fork, ckpt_path="last", **parts("Ditto"))
    assert_same_models(made, parent)
    assert numbers(tmp_path / "fork") == numbers(parent.run.folder.path)


CHANGES: dict[str, dict[str, Any]] = {
    "a rate": {"lr": 0.01},
    "a rule": {"aggregator": FedAdam()},
    "an attack": {"attack": SignFlip(clients=[0, 1])},
    "a schedule": {"schedule": Asynchronous(concurrency=3), "aggregator": FedBuff()},
    "a client": {"without": [2]},
    "epochs": {"max_epochs": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_acts_from_the_moment_on(name: str, parents: Any, tmp_path: Path) -> None:
    parent = parents("plain")
    made = fit(tmp_path, "fork", fork=fork_of(parent, 2), **CHANGES[name])
    assert made.round == ROUNDS
    own, theirs = numbers(tmp_path / "fork"), numbers(parent.run.folder.path)
    before = ({k: v for k, v in run.items() if k[0] <= 2} for run in (own, theirs))
    assert next(before) == next(before)
    after = (ROUNDS, "global", "test", "loss")
    assert own[after] != theirs[after]


@pytest.mark.parametrize("aggregator", [APFL, FedAvg])
def test_clients_forget_an_algorithm_that_is_replaced(
    aggregator: Any, parents: Any, tmp_path: Path
) -> None:
    """APFL would read what Ditto has left, and FedAvg would keep it for ever."""
    settings = {"aggregator": aggregator(), "schedule": virtual()}
    made = fit(tmp_path, "fork", 4, fork=fork_of(parents("Ditto"), 2), **settings)
    memories = [made.federation.clients[client].get("objective", {}) for client in range(6)]
    assert all("personal" not in memory for memory in memories)


# Clients that leave


@pytest.mark.parametrize("aggregator", [SCAFFOLD, FedBuff])
def test_who_was_not_drawn_again_is_not_missed(aggregator: Any, tmp_path: Path) -> None:
    def run(folder: str, **more: Any) -> Any:
        few = Asynchronous(2, 1) if aggregator is FedBuff else virtual(participation=2)
        return fit(tmp_path, folder, aggregator=aggregator(), schedule=few, clients=12, **more)

    parent = run("parent", keep_rounds=2)
    trained = {key[1] for key in table(parent) if key[0] > 2 and key[2] == "train"}
    absent = next(c for c in range(12) if str(c) not in trained)
    made = run("fork", without=[absent], fork=fork_of(parent, 2))
    assert equal_states(made.federation.state, parent.federation.state)


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedBuff", "DPFedAvg"])
def test_the_others_train_when_and_as_they_would(name: str, parents: Any, tmp_path: Path) -> None:
    """In the first round, before the models differ, their numbers are the same."""
    whole = table(parents(name))
    made = fit(tmp_path, "without", rounds=1, without=[1], **parts(name))
    of_clients = {k: v for k, v in table(made).items() if k[1] != "global" and k[2] == "train"}
    assert "1" not in {key[1] for key in table(made)}
    # With over-selection, and in a buffer, another client takes the place of the absent one.
    replaced = name in ("FedAdam", "FedBuff")
    common = {key for key in of_clients if key in whole or not replaced}
    assert common and all(of_clients[key] == whole[key] for key in common)


def test_who_is_absent_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = []

    def noted(data: Any, client: int, *args: Any) -> Any:
        clients.append(client)
        return gradient_batches(data, client, *args)

    monkeypatch.setattr(dissimilarity, "gradient_batches", noted)
    for callback in (GradientDissimilarity(), GradientDissimilarity(clients=4)):
        clients.clear()
        fit(tmp_path, f"{callback.clients}", rounds=1, without=[1, 4], callbacks=[callback])
        assert {*clients} == {0, 2, 3, 5}


def test_the_clients_that_are_compared_are_present_ones(tmp_path: Path) -> None:
    made = fit(tmp_path, "run", rounds=2, without=[0, 1], score_clients=2, aggregator=LocalOnly())
    scored = {key[1] for key in table(made) if key[0] == 1 and key[2] == "test"}
    assert scored >= {"2", "3"} and not scored & {"0", "1", "4", "5"}
    settings = {**parts("tasks"), "callbacks": [TaskMatrix(clients=2)]}
    with pytest.raises(FlsuiteError, match=r"all of its 2 clients are in trainer\.without; raise"):
        fit(tmp_path, "tasks", rounds=2, without=[0, 1], **settings)


def test_who_left_has_no_part_in_the_accuracy_by_task(parents: Any, tmp_path: Path) -> None:
    """Its row stays in the matrix, which is compared with the parent's."""
    made = fit(tmp_path, "fork", fork=fork_of(parents("tasks"), 2), without=[1], **parts("tasks"))
    rows = table(made)
    by_client = [rows[ROUNDS, str(c), "test", "task_accuracy/0"] for c in (0, 2, 3, 4, 5)]
    assert (ROUNDS, "1", "test", "task_accuracy/0") not in rows
    mean = rows[ROUNDS, "global", "test", "task_accuracy/0"]
    assert mean == pytest.approx(sum(by_client) / 5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"without": [6]}, "there is no client 6; there are 0 to 5"),
        ({"without": [0, 1, 2, 3, 4, 5]}, "no client is left"),
        ({"fork": 5}, "has no checkpoint of round 5 (it has "),
        ({"fork": Fork("nowhere", 2)}, "it is not the folder of a run"),
        ({"fork": 2, "seed": 5}, "hold the samples of the parent"),
        ({"fork": 2, "data": {"train_samples": 100}}, "hold the samples of the parent"),
        ({"fork": 2, "model": Classifier(MLP(hidden=(9,)))}, "the model is not the parent's"),
        ({"keep_rounds": 0}, "keep_rounds must be at least 1"),
    ],
)
def test_what_cannot_hold_is_one_line(
    settings: dict[str, Any], reason: str, parents: Any, tmp_path: Path
) -> None:
    if isinstance(round := settings.get("fork"), int):
        settings = {**settings, "fork": fork_of(parents("plain"), round)}
    with pytest.raises(FlsuiteError) as error:
        fit(tmp_path, "fork", **settings)
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "fork").exists()


NOISE = {"aggregator": DPFedAvg(noise_multiplier=1.0)}
OTHER_NOISE = {"aggregator": DPFedAvg(noise_multiplier=3.0)}
OTHER_COHORT = {**NOISE, "schedule": Synchronous(participation=0.5, sampling="poisson")}


@pytest.mark.parametrize(
    ("before", "after"), [(NOISE, OTHER_NOISE), (NOISE, OTHER_COHORT), ({}, NOISE)]
)
def test_a_guarantee_stays_what_it_was(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    """Epsilon would count the parent's rounds with noise that they did not have."""
    fit(tmp_path, "parent", rounds=2, keep_rounds=2, **before)
    with pytest.raises(FlsuiteError, match="epsilon counts all rounds with one noise"):
        fit(tmp_path, "fork", fork=Fork(str(tmp_path / "parent"), 2), **after)


class Opposite(Mean):
    """The mean with the other sign in later rounds, so that an early round is picked."""

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        sign = 1.0 if server.round == 1 else -0.5
        return {k: sign * v for k, v in super().result(server, sums, updates).items()}


@pytest.mark.parametrize("name", ["FedAvg", "FedBuff"])
def test_the_round_that_was_picked_before_stays_picked(name: str, tmp_path: Path) -> None:
    """Its checkpoint, the memories and the versions that it needs stay, too."""

    def run(folder: str, rounds: int, begin: int | None = None) -> Any:
        plain = {"aggregator": FedAvg(rule=Opposite())}
        settings = plain if name == "FedAvg" else parts(name)
        fork = Fork(str(tmp_path / "parent"), begin) if begin else None
        return fit(tmp_path, folder, rounds, lr=1.5, fork=fork, **settings)

    parent = run("parent", 5)
    best = int(parent.run.summary.best["round"])
    at = max(kept_rounds(tmp_path / "parent"))
    assert run("fork", at + 1, at).run.summary.best["round"] in (best, at + 1)
    assert (tmp_path / "fork" / "checkpoints" / "best.ckpt").is_file()
    if best < at:  # best.ckpt is a moment to begin at as well
        assert_same_models(run("again", 5, best), parent)


def test_a_fork_keeps_the_engine_that_auto_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(of_stacks: float) -> None:
        expected = lambda engine, *args: of_stacks if engine.decides else 10.0  # noqa: E731
        monkeypatch.setattr(auto, "expected_seconds", expected)

    seconds(of_stacks=5.0)
    parent = fit(tmp_path, "parent", 4, keep_rounds=2, engine=Auto())
    assert parent.run.engine.decides
    seconds(of_stacks=1e3)
    fork = Fork(str(tmp_path / "parent"), 2)
    assert_same_models(fit(tmp_path, "fork", 4, engine=Auto(), fork=fork), parent)


def test_kept_rounds_outlive_a_resume(parents: Any, tmp_path: Path) -> None:
    """So do the clients' memories that they need."""
    fit(tmp_path, "parts", rounds=3, keep_rounds=2, **parts("Ditto"))
    fit(tmp_path, "parts", keep_rounds=2, ckpt_path="last", **parts("Ditto"))
    made = fit(tmp_path, "fork", fork=Fork(str(tmp_path / "parts"), 2), **parts("Ditto"))
    assert_same_models(made, parents("Ditto"))


def test_a_fork_with_another_monitor_goes_on_counting(parents: Any, tmp_path: Path) -> None:
    """It picks among the rounds of its parent, as the report does."""
    fork = fork_of(parents("plain"), 2)
    same, other = (
        fit(tmp_path, name, fork=fork, monitor=monitor)
        for name, monitor in (("same", None), ("other", "loss"))
    )
    ours, theirs = other.run.summary, same.run.summary
    assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
    seconds = [row.wall_s for row in other.run.folder.table.rows]
    assert seconds == sorted(seconds)
    scores = other.results
    picked = scores["val/loss"].idxmin()
    assert ours.best["round"] == picked
    assert ours.best["loss"] == scores["test/loss"][picked]
    (own,) = group_runs([tmp_path / "other"])
    report = report_table([own], ["loss"])
    assert report["picked_round"].item() == picked


def test_a_picked_round_that_is_not_kept_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, "parent", keep_rounds=3, data={"val_fraction": 0.3})
    content = load_checkpoint(kept_rounds(tmp_path / "parent")[3])
    content["summary"]["best"]["round"] = 2
    save_tensors(content, kept_rounds(tmp_path / "parent")[3])
    fit(tmp_path, "fork", fork=Fork(run=str(tmp_path / "parent"), round=3))
    assert "has not kept round 2, which validation data picks so far" in caplog.text
