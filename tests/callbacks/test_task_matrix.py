"""The accuracy by task after each task: the matrix, its summaries, and its federation."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from flsuite.analysis.partition import task_figure
from flsuite.callbacks import FederationCallback, RoundEarlyStopping, TaskMatrix
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, clone
from flsuite.data import Synthetic, TaskSequence
from flsuite.data.tasks import _TaskData
from flsuite.federation import Synchronous
from flsuite.metrics import average_accuracy, backward_transfer, forgetting, forward_transfer
from flsuite.models import MLP, NFClassifier
from flsuite.runs.run import Run
from flsuite.trainer import FederatedTrainer
from tests.aggregators.federations import assert_same_models
from tests.conftest import classifier, equal_states, trainer

CLIENTS, TASKS, LENGTH = 3, 3, 2
ENDS = [2, 4, 6]
SUMMARIES = {
    "task_accuracy": average_accuracy,
    "forgetting": forgetting,
    "backward_transfer": backward_transfer,
    "forward_transfer": forward_transfer,
}


class Kept(FederationCallback):
    """Keeps every client's whole model after each round, and before the first one."""

    def __init__(self) -> None:
        self.models: dict[int, list[State]] = {}

    def on_federation_start(self, run: Run) -> None:
        self.keep(run)

    def on_round_end(self, run: Run, round: int) -> None:
        self.keep(run)

    def keep(self, run: Run) -> None:
        self.models[run.round] = [
            clone(run.federation.client_state(client)) for client in range(CLIENTS)
        ]


def sequence(val_fraction: float = 0.0, root: str | None = None, **settings: Any) -> TaskSequence:
    """Return three tasks of two rounds and two of seven classes; one class is never met."""
    source: dict[str, Any] = {"val_fraction": val_fraction, "root": root, "batch_size": 32}
    data = Synthetic(features=6, classes=7, samples=700, clients=CLIENTS, **source)
    return TaskSequence(data, **{"tasks": TASKS, "rounds_per_task": LENGTH, **settings})


def fit(
    model: Any = None,
    ckpt_path: str | None = None,
    arrangement: Any = "heterogeneous",
    **settings: Any,
) -> FederatedTrainer:
    made = trainer(**{"rounds": 6, **settings})
    made.fit(model or classifier(), sequence(arrangement=arrangement), ckpt_path=ckpt_path)
    return made


def data_of(made: FederatedTrainer) -> _TaskData:
    assert made.federation is not None and isinstance(made.federation.data, _TaskData)
    return made.federation.data


def matrix(made: FederatedTrainer) -> Tensor:
    assert made.run is not None
    (callback,) = [c for c in made.run.callbacks if isinstance(c, TaskMatrix)]
    assert callback.matrix is not None
    return callback.matrix


def logged(made: FederatedTrainer, *names: str) -> dict[tuple[int, str, str], float]:
    """Return the test scores whose names start like these, by round, scope and metric."""
    rows = [row for row in made.run.folder.table.rows if row[6] == "test"]
    return {(row[0], row[5], row[7]): row[8] for row in rows if row[7].startswith(names)}


def predicted(state: State, x: Tensor) -> Tensor:
    """Predict with the tiny network, written out."""
    hidden = (x @ state["network.1.weight"].T + state["network.1.bias"]).relu()
    return (hidden @ state["network.3.weight"].T + state["network.3.bias"]).argmax(1)


def accuracy(state: State, x: Tensor, y: Tensor) -> float:
    return (predicted(state, x) == y).double().mean().item()


def by_hand(kept: Kept, data: _TaskData) -> Tensor:
    """Compute the matrix ``(clients, 1 + tasks, tasks)`` from the models that were kept."""
    accuracies = torch.zeros(CLIENTS, 1 + TASKS, TASKS, dtype=torch.float64)
    for i, round in enumerate([0, *ENDS]):
        for client in range(CLIENTS):
            for j, group in enumerate(data.sequences[client]):
                rows = torch.isin(data.test.y, torch.tensor(group))
                accuracies[client, i, j] = accuracy(
                    kept.models[round][client], data.test.x[rows], data.test.y[rows]
                )
    return accuracies


# The matrix


@pytest.fixture(scope="module")
def plain() -> FederatedTrainer:
    return fit(callbacks=[Kept()])


@pytest.mark.parametrize("arrangement", ["heterogeneous", "disjoint"])
def test_rows_are_what_the_models_score_on_each_group(arrangement: str) -> None:
    kept = Kept()
    made = fit(arrangement=arrangement, callbacks=[kept])
    numbers = matrix(made)
    assert numbers.dtype == torch.float64
    torch.testing.assert_close(numbers, by_hand(kept, data_of(made)))
    assert numbers[:, 1:].diagonal(dim1=1, dim2=2).mean() > numbers[:, 0].mean() + 0.2, (
        "something is learned"
    )
    assert bool((numbers == numbers[:1]).all()) == (arrangement == "disjoint")


def test_the_table_has_a_row_of_the_matrix_after_each_task(plain: FederatedTrainer) -> None:
    made = plain
    numbers, expected = logged(made, "task_", "forgetting", "backward", "forward"), {}
    for task, round in enumerate(ENDS):
        so_far = matrix(made)[:, : task + 2]
        for j in range(TASKS):
            expected[round, "global", f"task_accuracy/{j}"] = float(so_far[:, -1, j].mean())
            expected |= {
                (round, str(c), f"task_accuracy/{j}"): float(so_far[c, -1, j])
                for c in range(CLIENTS)
            }
        for name, function in SUMMARIES.items():
            if task or name == "task_accuracy":
                values = [float(function(so_far[client])) for client in range(CLIENTS)]
                expected[round, "global", name] = sum(values) / CLIENTS
    assert numbers == pytest.approx(expected)


@pytest.mark.draws
def test_the_picture_lies_in_the_runs_folder(tmp_path: Path) -> None:
    fit(run_dir=str(tmp_path), rounds=3)
    assert np.ptp(imread(tmp_path / "tasks.png")[..., :3]) > 0.5
    panel = task_figure(np.array([[0.9, 0.25], [0.5, 0.75]])).axes[0]
    texts = {text.get_position(): text.get_text() for text in panel.texts}
    assert texts == {(0, 0): "0.90", (1, 0): "0.25", (0, 1): "0.50", (1, 1): "0.75"}


def test_some_clients_are_enough(plain: FederatedTrainer) -> None:
    some = fit(callbacks=[TaskMatrix(clients=2)])
    assert torch.equal(matrix(some), matrix(plain)[:2])
    assert {scope for _, scope, _ in logged(some, "task_accuracy")} == {"global", "0", "1"}


@pytest.mark.parametrize("clients", [0, -1])
def test_nobody_to_score_is_refused(clients: int) -> None:
    with pytest.raises(FlsuiteError, match="TaskMatrix: clients must be at least 1"):
        TaskMatrix(clients)


def test_looking_changes_nothing(plain: FederatedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskMatrix, "on_federation_start", lambda *args: None)
    unwatched = fit()
    assert not logged(unwatched, "task_accuracy")
    assert equal_states(unwatched.federation.state, plain.federation.state)
    assert unwatched.test() == plain.test()


# Elsewhere, and in parts


@pytest.mark.parametrize("rounds", [2, 3])
def test_broken_off_within_a_task_or_after_it_and_resumed(rounds: int, tmp_path: Path) -> None:
    whole = fit(schedule=Synchronous(2))
    fit(schedule=Synchronous(2), rounds=rounds, run_dir=str(tmp_path))
    resumed = fit(schedule=Synchronous(2), run_dir=str(tmp_path), ckpt_path="last")
    assert torch.equal(matrix(whole), matrix(resumed))
    assert_same_models(whole, resumed)
    ours, theirs = (
        {key: row for key, row in logged(made, "task_accuracy").items() if key[0] > rounds}
        for made in (resumed, whole)
    )
    assert theirs and {key: row for key, row in ours.items() if key[0] in ENDS} == theirs
    assert whole.test() == resumed.test()


@pytest.mark.parametrize(("rounds", "warned"), [(4, True), (5, False)])
def test_a_run_that_ends_before_its_last_task_says_so(
    rounds: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        made = fit(rounds=rounds)
    said = [message for message in caplog.messages if "last task" in message]
    line = "trainer.rounds is 4, but the last task starts in round 5: it is never learned"
    assert said == [line] * warned
    assert matrix(made).shape == (CLIENTS, 3 if warned else 4, TASKS)


# Who is scored


def test_a_client_with_a_model_of_its_own_is_scored_by_it() -> None:
    kept = Kept()
    made = fit(classifier(private=["network.3"]), arrangement="disjoint", callbacks=[kept])
    assert made.federation is not None and made.federation.entries.personal
    torch.testing.assert_close(matrix(made), by_hand(kept, data_of(made)))
    assert all(
        not torch.equal(matrix(made)[0, 1:], matrix(made)[client, 1:]) for client in (1, 2)
    ), "the tasks are the same"


def test_the_score_of_a_round_is_on_the_classes_seen(plain: FederatedTrainer) -> None:
    made = plain
    (kept,) = [callback for callback in made.run.callbacks if isinstance(callback, Kept)]
    data, whole = data_of(made), made.datamodule.data.federated
    numbers, sizes = logged(made, "accuracy"), []
    for round in range(1, 7):
        task = (round - 1) // LENGTH
        met = [[c for group in groups[: task + 1] for c in group] for groups in data.sequences]
        rows = torch.isin(whole.test.y, torch.tensor([c for own in met for c in own]))
        sizes.append(int(rows.sum()))
        state = kept.models[round][0]
        assert numbers[round, "global", "accuracy"] == pytest.approx(
            accuracy(state, whole.test.x[rows], whole.test.y[rows])
        )
        for client in range(CLIENTS):
            own = whole.test.rows[client]
            own = own[torch.isin(whole.test.y[own], torch.tensor(met[client]))]
            assert numbers[round, str(client), "accuracy"] == pytest.approx(
                accuracy(state, whole.test.x[own], whole.test.y[own])
            )
    assert sizes[0] < sizes[-1] <= len(whole.test)


# What a model is told


class Told(NFClassifier):
    """Notes what it is told, and in which task it was until then."""

    calls: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []

    def begin_task(self, task: int, seen: Any, past: Any) -> None:  # type: ignore[override]
        Told.calls.append((int(self.previous.task), task, tuple(seen), tuple(past)))
        super().begin_task(task, seen, past)


def test_every_fit_begins_with_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the client's own state is loaded by then, not the previous client's."""
    monkeypatch.setattr(Told, "calls", [])
    made = fit(Told(feature_dim=6, couplings=2, flow_width=8, backbone=MLP(hidden=(8,)), lr=1e-2))
    assert made.federation is not None and not made.federation.entries.personal
    sequences, expected = data_of(made).sequences, []
    for round in range(1, 7):
        task, before = (round - 1) // LENGTH, max((round - 2) // LENGTH, 0)
        seen = sorted({c for groups in sequences for group in groups[: task + 1] for c in group})
        past = sorted({c for groups in sequences for group in groups[:task] for c in group})
        expected += [(before, task, tuple(seen), tuple(past))] * CLIENTS
    assert Told.calls == expected
    for client, groups in enumerate(sequences):
        own = made.federation.client_state(client)
        assert own["previous.task"].item() == TASKS - 1
        assert own["previous.met"].nonzero().flatten().tolist() == sorted(
            c for group in groups for c in group
        )


def test_the_round_that_is_picked_is_one_of_the_last_task(tmp_path: Path) -> None:
    """Pick among the last task's rounds, although early tasks score best: few classes are easy."""
    made = trainer(rounds=6, run_dir=str(tmp_path / "run"))
    made.fit(classifier(lr=0.3), sequence(0.2, arrangement="disjoint"))
    rows = made.run.folder.table.rows
    validation = {row[0]: row[8] for row in rows if row[5:8] == ("global", "val", "accuracy")}
    assert [row[8] for row in rows if row[5:8] == ("global", "train", "task")] == [0, 0, 1, 1, 2, 2]
    assert max(validation, key=validation.__getitem__) <= 2
    assert made.run is not None and made.run.summary.best["round"] == max(
        (5, 6), key=validation.__getitem__
    )


def test_a_run_that_is_stopped_within_a_task_has_a_row_for_it() -> None:
    """Stop in round 3, within the first task of four rounds."""
    stop = RoundEarlyStopping(patience=2, min_delta=1.0)
    made = trainer(rounds=12, callbacks=[stop])
    made.fit(classifier(), sequence(0.2, arrangement="disjoint", rounds_per_task=4))
    assert made.round == 3
    assert matrix(made).shape == (CLIENTS, 2, TASKS)
    assert {key[0] for key in logged(made, "task_accuracy")} == {3}


def test_the_final_table_has_the_forgetting(capsys: pytest.CaptureFixture[str]) -> None:
    made = fit(enable_progress_bar=True)
    said = capsys.readouterr().out
    value = logged(made, "forgetting")[(6, "global", "forgetting")]
    (line,) = [line for line in said.splitlines() if "forgetting" in line]
    assert f"{value:.4f}" in line


def test_a_run_goes_on_where_its_wrapped_data_has_moved(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    for rounds, root in ((1, "/here"), (2, "/there")):
        made = trainer(rounds=rounds, run_dir=folder)
        made.fit(classifier(), sequence(root=root), ckpt_path="last" if rounds == 2 else None)
    assert made.round == 2
