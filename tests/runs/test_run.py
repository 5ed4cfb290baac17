"""Runs that stop early can be extended, and their last round is measured like any other."""

import logging
from pathlib import Path
from typing import Any

import pytest

from flsuite.callbacks import (
    FederationCallback,
    FlowMonitor,
    GradientDissimilarity,
    LatentSpace,
    RoundEarlyStopping,
)
from flsuite.data import IID
from flsuite.models import ACVAE, MLP, NFClassifier
from tests.conftest import classifier, digits, equal_states, trainer


def stopping(patience: int = 2) -> RoundEarlyStopping:
    """Stops after ``1 + patience`` rounds, because nothing is an improvement of 10."""
    return RoundEarlyStopping(patience=patience, min_delta=10.0)


def fit(folder: Path, *callbacks: Any, rounds: int = 9) -> Any:
    made = trainer(rounds=rounds, run_dir=folder, callbacks=list(callbacks))
    made.fit(classifier(), digits(2), ckpt_path="last")
    return made


def test_a_stopped_run_is_extended_with_more_patience_or_without_the_callback(
    tmp_path: Path,
) -> None:
    whole = fit(tmp_path / "whole", rounds=5)
    assert fit(tmp_path / "run", stopping(1)).round == 2
    patient = fit(tmp_path / "run", stopping(2))
    assert patient.round == 3
    extended = fit(tmp_path / "run", rounds=5)
    assert extended.round == 5
    assert equal_states(extended.federation.state, whole.federation.state)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_finished_run_says_that_there_is_nothing_to_train(
    is_stopped: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [stopping(2)] if is_stopped else []
    rounds = 9 if is_stopped else 3
    fit(tmp_path, *callbacks, rounds=rounds)
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        assert fit(tmp_path, *callbacks, rounds=rounds).round == 3
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "the run is finished after round 3" in said
    assert ("patience" in said) == is_stopped


class StopsAt(FederationCallback):
    """Stops in a hook of its own, in a round that is not due for evaluation."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_client_end(self, run: Any, outcome: Any) -> None:
        if self.hook == "on_client_end" and run.round == 1:
            run.stop()

    def on_round_end(self, run: Any, round: int) -> None:
        if self.hook == "on_round_end" and round == 2:
            run.stop()


@pytest.mark.parametrize("hook", ["on_client_end", "on_round_end"])
def test_a_run_stopped_by_any_hook_scores_its_last_round(hook: str) -> None:
    made = trainer(rounds=9, evaluate_every=5, callbacks=[StopsAt(hook)])
    made.fit(classifier(), digits(2))
    rows = made.run.folder.table.rows
    assert made.round == 2
    assert {row[0] for row in rows if row[6:8] == ("test", "accuracy")} == {2}
    assert {row[0] for row in rows if row[7].startswith("accuracy/")} == {2}


def flow_model() -> NFClassifier:
    return NFClassifier(feature_dim=8, couplings=1, flow_width=8, backbone=MLP(hidden=(16,)))


def latent_model() -> ACVAE:
    return ACVAE(latent_dim=4, width=4)


@pytest.mark.parametrize(
    ("observer", "model", "metric"),
    [
        (GradientDissimilarity(every=100), classifier, "train/gamma"),
        (FlowMonitor(every=100, samples=20), flow_model, "test/flow_nll"),
        (LatentSpace(every=100), latent_model, "picture"),
    ],
    ids=["gamma", "flow", "latent"],
)
def test_observers_measure_the_last_round_of_a_stopped_run(
    observer: Any, model: Any, metric: str, tmp_path: Path
) -> None:
    made = trainer(rounds=9, run_dir=tmp_path, callbacks=[observer, stopping(1)])
    made.fit(model(), digits(2, partition=IID(), standardize=False, train_samples=60))
    assert made.round == 2
    if metric == "picture":
        assert [path.name for path in (tmp_path / "latent").iterdir()] == ["round-0002.png"]
    else:
        rows = made.run.folder.table.rows
        assert [row[0] for row in rows if f"{row[6]}/{row[7]}" == metric] == [2]
