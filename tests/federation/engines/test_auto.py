"""The engine that measures: its choice at given costs, and what a run records and keeps."""

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import flsuite.federation.engines.auto as auto
from flsuite.aggregators import SCAFFOLD, Centralized
from flsuite.common.errors import FlsuiteError
from flsuite.federation import (
    Asynchronous,
    Auto,
    Faults,
    InProcess,
    Measured,
    Processes,
    Synchronous,
    Vectorized,
)
from flsuite.federation.client.conditions import require_stackable
from flsuite.models import MLP, Classifier
from flsuite.runs.preparation import worker_setup
from flsuite.runs.session import choose_engine
from tests.aggregators.federations import assert_same_models
from tests.conftest import digits, trainer


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the seconds of a fit on each engine, which a test may change.

    A start of worker processes takes four seconds.
    """
    seconds = {"InProcess": 1.0, "Processes": 0.3, "Vectorized": 0.1, "shared": 0.1}

    def expected(engine: Any, setup: Any, requests: Any, fits: int, alone: float) -> float:
        if isinstance(engine, Vectorized):
            require_stackable(setup)
        name, workers = type(engine).__name__, getattr(engine, "workers", 1)
        is_shared = name == "Vectorized" and workers > 1
        return fits * seconds["shared" if is_shared else name] + (4.0 if workers > 1 else 0.0)

    monkeypatch.setattr(auto, "expected_seconds", expected)
    monkeypatch.setattr(auto, "cores", lambda: 4)
    return seconds


def choice(
    rounds: int = 10, clients: int = 6, ckpt_path: str | None = None, **settings: Any
) -> Any:
    """Return the engine that is chosen for a run, without training it."""
    made = trainer(rounds=rounds, engine=Auto(), **settings)
    run = made.prepare(model(), digits(clients=clients))
    chosen = choose_engine(run, made.engine, worker_setup(made, run), ckpt_path)
    return chosen, run.settings.get("engine")


def model() -> Classifier:
    return Classifier(MLP(hidden=(8,)), optimizer=partial(SGD, lr=0.1))


def test_the_least_expected_time_is_taken(costs: dict[str, float]) -> None:
    chosen, recorded = choice()
    assert isinstance(chosen, Vectorized) and (chosen.clients, chosen.workers) == (6, 1)
    assert recorded == {"class_path": "flsuite.federation.Vectorized", "init_args": {"clients": 6}}

    costs["shared"] = 0.08
    chosen, recorded = choice()
    assert isinstance(chosen, Vectorized) and (chosen.clients, chosen.workers) == (6, 1)
    chosen, recorded = choice(rounds=1000)  # the start of workers is paid back
    assert isinstance(chosen, Vectorized) and (chosen.clients, chosen.workers) == (2, 4)
    costs["Vectorized"] = costs["shared"] = 0.28  # not worth other digits
    chosen, recorded = choice(rounds=1000)
    assert isinstance(chosen, Processes) and chosen.workers == 4 and recorded is None


def test_a_run_of_a_few_seconds_trains_in_this_process(
    costs: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    costs["InProcess"] = 0.05
    with caplog.at_level(logging.INFO, logger="flsuite"):
        assert isinstance(choice()[0], InProcess)
    assert "engine: InProcess() (auto: for 60 fits, InProcess() 3.0 s)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"schedule": Asynchronous(6, 5, speeds=Measured())}, "Asynchronous measures them"),
        ({"schedule": Asynchronous(3)}, "one client at a time"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"schedule": Synchronous(participation=1)}, "one client at a time"),
    ],
)
def test_without_stacks_the_reason_is_said(
    costs: dict[str, float], settings: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flsuite"):
        chosen, recorded = choice(**settings)
    assert not isinstance(chosen, Vectorized) and recorded is None
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("engine: ")]
    assert re.search(rf"; no (stacks|Vectorized\(clients=\d\)): .*{reason}", line)
    assert "\n" not in line and "InProcess() " in line


def test_stacks_of_fits_in_flight_are_of_one_process(costs: dict[str, float]) -> None:
    costs["shared"] = 0.01
    chosen, _ = choice(rounds=1000, schedule=Asynchronous(6, buffer_size=5))
    assert isinstance(chosen, Vectorized) and (chosen.clients, chosen.workers) == (3, 1)


def test_an_injected_death_needs_processes(costs: dict[str, float]) -> None:
    dies: dict[str, Any] = {"schedule": Faults(Synchronous(), dies=0.1)}
    costs["InProcess"] = costs["Vectorized"] = 1e-9
    assert isinstance(choice(rounds=1, **dies)[0], Processes | Vectorized)
    made = trainer(rounds=1, engine=Auto(workers=1), **dies)
    with pytest.raises(FlsuiteError, match="needs worker processes, but Auto has none"):
        made.prepare(model(), digits(clients=6))


def test_an_engine_that_fails_is_no_candidate(
    costs: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> float:
        raise RuntimeError("out of memory")

    expected = auto.expected_seconds
    monkeypatch.setattr(
        auto, "expected_seconds", lambda e, *args: (expected if e.decides else fails)(e, *args)
    )
    with caplog.at_level(logging.INFO, logger="flsuite"):
        assert isinstance(choice()[0], Vectorized)
    assert "; no InProcess(): out of memory; no Processes(workers=4): out of memory" in caplog.text
    monkeypatch.setattr(auto, "expected_seconds", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        choice()


def test_a_resumed_run_keeps_its_stacks_and_has_workers_again(
    costs: dict[str, float], tmp_path: Path
) -> None:
    begun = trainer(rounds=1, engine=Vectorized(clients=2), run_dir=tmp_path / "run")
    begun.fit(model(), digits(clients=6))
    chosen, recorded = choice(ckpt_path="last", run_dir=tmp_path / "run")
    assert isinstance(chosen, Vectorized) and (chosen.clients, chosen.workers) == (2, 3)
    assert recorded["init_args"] == {"clients": 2}


def test_training_in_one_place_is_one_fit(costs: dict[str, float]) -> None:
    costs["InProcess"] = 1e9
    assert isinstance(choice(aggregator=Centralized())[0], InProcess)


def test_a_run_ends_as_with_the_chosen_engine(costs: dict[str, float], tmp_path: Path) -> None:
    def fit(engine: Any, name: str, rounds: int = 2, **resumed: Any) -> Any:
        folder = tmp_path / name
        made = trainer(rounds=rounds, engine=engine, run_dir=folder, aggregator=SCAFFOLD())
        made.fit(model(), digits(clients=6), **resumed)
        return made

    named = fit(Vectorized(clients=6), "named")
    assert_same_models(fit(Auto(), "auto"), named)
    fit(Auto(), "parts", rounds=1)
    costs["InProcess"] = 1e-9  # now alone would be faster, but the run goes on as it began
    assert_same_models(fit(Auto(), "parts", ckpt_path="last"), named)

    fit(InProcess(), "alone", rounds=1)
    costs["InProcess"] = 1e9
    whole = fit(InProcess(), "whole")
    assert_same_models(fit(Auto(), "alone", ckpt_path="last"), whole)


def test_what_is_measured_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is really measured here, whatever comes out."""
    monkeypatch.setattr(auto, "_SECONDS", 0.01)
    monkeypatch.setattr(auto, "_SHORT", 0.0)
    measured = trainer(rounds=2, engine=Auto(workers=2), aggregator=SCAFFOLD())
    torch.manual_seed(3)
    measured.fit(model(), digits(clients=6))
    chosen = measured.run.engine
    plain = trainer(rounds=2, engine=chosen, aggregator=SCAFFOLD())
    plain.fit(model(), digits(clients=6))
    assert_same_models(measured, plain)
