"""Workers score the clients' own models, with the same results as this process."""

import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.aggregators import FedBuff
from flsuite.federation import Asynchronous, InProcess, Processes, Ray, Stragglers
from flsuite.federation.server.evaluation import Evaluator
from flsuite.models import MLP, Classifier
from tests.conftest import digits, equal_states, trainer
from tests.plain import Net


def fit(
    engine: Any, kind: Any = Classifier, private: tuple[str, ...] = ("network.3",), **kwargs: Any
) -> Any:
    """Fit a classifier of which only a part is shared, unless nothing is private."""
    made = trainer(**{"rounds": 2, "engine": engine, **kwargs})
    model = kind(MLP(hidden=(16,)), partial(torch.optim.SGD, lr=0.1), private=private)
    made.fit(model, digits(clients=5, val_fraction=0.2))
    return made


def rows(made: Any) -> list[tuple[Any, ...]]:
    """Return the scores of the run, without times."""
    table = made.run.folder.table.rows
    return [(r.round, r.scope, r.split, r.metric, r.value) for r in table if r.split != "train"]


@pytest.mark.parametrize("engine", [Processes, pytest.param(Ray, marks=pytest.mark.long)])
def test_workers_score_what_this_process_would(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fit(InProcess())
    monkeypatch.setattr(Evaluator, "own", None)  # a call of this process would fail
    there = fit(engine(workers=2))
    assert rows(there) == rows(here) != []
    assert equal_states(there.federation.state, here.federation.state)


def test_a_fit_after_a_score_starts_from_the_same_weights() -> None:
    every, last = fit(Processes(1), rounds=3), fit(Processes(1), rounds=3, evaluate_every=3)
    assert equal_states(every.federation.state, last.federation.state)
    assert [row for row in rows(every) if row[0] == 3] == rows(last)


def test_clients_in_flight_stay_in_flight_while_others_are_scored() -> None:
    schedule = {"concurrency": 3, "speeds": Stragglers()}
    here = fit(InProcess(), aggregator=FedBuff(), schedule=Asynchronous(**schedule), rounds=4)
    there = fit(Processes(2), aggregator=FedBuff(), schedule=Asynchronous(**schedule), rounds=4)
    assert rows(there) == rows(here) != []


class Draws(Classifier):
    """A classifier whose scores depend on random draws."""

    def evaluation_step(self, batch: Any) -> dict[str, Tensor]:
        columns = super().evaluation_step(batch)
        return {**columns, "loss": columns["loss"] + torch.rand_like(columns["loss"])}


@pytest.mark.parametrize("private", [("network.3",), ()], ids=["own models", "a shared model"])
def test_what_an_evaluation_draws_depends_on_the_client_alone(private: Any) -> None:
    here, there = (rows(fit(engine, Draws, private)) for engine in (InProcess(), Processes(3)))
    assert here == there


def test_ctrl_c_while_lightning_scores_interrupts_the_run() -> None:
    class Interrupted(Net):
        def validation_step(self, batch: Any, _: int) -> None:
            signal.raise_signal(signal.SIGINT)

    # A shell starts processes in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # Lightning would exit with status 1
            trainer(rounds=1).fit(Interrupted(), digits(clients=2))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_the_model_is_raised_in_this_process() -> None:
    class Faulty(Classifier):
        def evaluation_step(self, batch: Any) -> dict[str, Tensor]:
            if len(batch[1]) > 64:  # not in the trial before round 1
                raise ValueError("no scores today")
            return super().evaluation_step(batch)

    with pytest.raises(ValueError, match="no scores today"):
        fit(Processes(2), Faulty)


def test_a_worker_that_dies_while_it_scores_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = os.getpid()

    class Dies(Classifier):
        def evaluation_step(self, batch: Any) -> dict[str, Tensor]:
            if os.getpid() != server and not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().evaluation_step(batch)

    with caplog.at_level(logging.WARNING, logger="flsuite"):
        there = fit(Processes(2), Dies)
    assert "is replaced" in caplog.text
    assert rows(there) == rows(fit(InProcess()))
