"""Adaptation after the last round, and clients that stay outside the federation."""

from pathlib import Path

import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import Aggregator, FedAvg, FedBABU, FedPer
from flsuite.data import Dirichlet, Synthetic
from flsuite.federation import InProcess, Processes, Synchronous
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_equal,
    federation,
    run,
    table_model,
)
from tests.conftest import state, table


def data(unseen: float = 0.0) -> Synthetic:
    small = {"features": 5, "classes": 3, "samples": 400, "clients": 6, "batch_size": 16}
    return Synthetic(partition=Dirichlet(0.3, min_samples=8), unseen_clients=unseen, **small)


def last(made: object) -> dict[str, float]:
    """Return the global scores of the last round on test data."""
    rows = table(made)  # type: ignore[arg-type]
    newest = max(round for round, *_ in rows)
    return {k[3]: v for k, v in rows.items() if k[:3] == (newest, "global", "test")}


def test_it_changes_nothing_else() -> None:
    made, plain = (run(FedAvg(), 2, data(), adapt_epochs=n) for n in (3, 0))
    assert_equal(state(made), state(plain))
    before, after = last(plain), last(made)
    assert before.items() <= after.items()
    assert after["adapted/accuracy_client_mean"] > after["accuracy_client_mean"]


def test_its_epochs_are_whole_where_steps_are_limited() -> None:
    """One step less in each fit must not mean one epoch less of adaptation."""
    made, plain = (run(FedAvg(), 1, data(), adapt_epochs=3, max_steps=n) for n in (1, 2))
    for scores in map(last, (made, plain)):
        assert scores["adapted/loss"] < scores["loss"] - 0.1, "more than a step's gain"


@pytest.mark.parametrize("make", [FedPer, FedBABU])
def test_engines_and_a_resume_agree(make: type[Aggregator], tmp_path: Path) -> None:
    settings = {"schedule": Synchronous(0.8), "adapt_epochs": 2}
    whole = run(make(), 2, data(0.3), engine=InProcess(), **settings)
    folder = str(tmp_path / "run")
    run(make(), 1, data(0.3), run_dir=folder, **settings)
    resumed = federation(make(), 2, run_dir=folder, engine=Processes(workers=2), **settings)
    resumed.fit(table_model(), data(0.3), ckpt_path="last")
    assert last(resumed) == last(whole)


def test_clients_outside_never_train_and_are_scored() -> None:
    made = run(FedAvg(), 3, data(0.3), adapt_epochs=2)
    federation = made.federation
    assert (federation.data.clients, federation.data.unseen) == (4, 2)
    assert {update.client for update in federation.log.updates} == {0, 1, 2, 3}
    assert federation.server.layout.clients == 4

    rows = table(made)
    scored = {scope for _, scope, split, metric in rows if metric == "unseen_adapted/accuracy"}
    assert scored == {"global", "4", "5"}
    inside = {scope for _, scope, split, metric in rows if metric == "accuracy"}
    assert inside == {"global", "0", "1", "2", "3"}
    scores = last(made)
    assert scores["unseen_adapted/accuracy_client_mean"] >= scores["unseen/accuracy_client_mean"]


def test_the_clients_inside_have_the_rows_that_they_would_have_without_the_others() -> None:
    some, every = data(0.3), data()
    some.setup()
    every.setup()
    for client in range(4):
        assert torch.equal(some.federated.train_rows(client), every.federated.train_rows(client))
    assert len(some.federated.train_rows(5)) > len(every.federated.train_rows(5)), "none held out"
    pooled = set(some.federated.train_rows(-1).tolist())
    assert not pooled & set(some.federated.train_rows(4).tolist())


def test_nobody_inside_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="leaves none"):
        data(0.95).setup()


def test_a_client_that_fails_to_adapt_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    made = run(FedAvg(), 1, Quadratics((1.0, -1.0), (0.0, 1.0)), model=Quadratic(), adapt_epochs=1)
    assert "client 1 could not adapt: RuntimeError: no minimum" in caplog.text
    scored = {scope for _, scope, _, metric in table(made) if metric.startswith("adapted/")}
    assert "0" in scored and "1" not in scored


def test_the_final_table_has_the_scores_of_all_groups(capsys: pytest.CaptureFixture[str]) -> None:
    run(FedAvg(), 1, data(0.3), adapt_epochs=1, enable_progress_bar=True)
    shown = capsys.readouterr().out
    for group in ("adapted", "unseen", "unseen+adapted"):
        assert f" {group} accuracy, " in shown
