"""Injected faults lose these clients, and nothing else."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite.aggregators import SCAFFOLD, FedAvg, FedBuff, FreeRider, MultiKrum, PairwiseMasks, TopK
from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.federation import (
    Asynchronous,
    Clock,
    Faults,
    Fit,
    InProcess,
    Processes,
    Schedule,
    Stragglers,
    Synchronous,
)
from flsuite.runs.rounds import rehearse
from tests.conftest import classifier, digits, equal_states, mostly_long, trainer

IN_PROCESS = {"raises": 0.05, "nan": 0.05, "shapes": 0.05, "late": 0.05, "twice": 0.05}
ALL = {**IN_PROCESS, "dies": 0.03, "hangs": 0.01}
CLIENTS = 12


class Absent(Faults):
    """Skips the clients that would fail. Duplicates count once."""

    def _declare(self) -> None:
        super()._declare()
        self.faults = ()  # no fault is injected

    def _with_faults(self, fits: Sequence[Fit]) -> list[Fit]:
        for fit in super()._with_faults(fits):
            if fit.fault not in (None, "twice"):
                fit.outcome = "dropped"
        return [fit for fit in fits if fit.outcome == "arrived"]


def fit(schedule: Schedule, ckpt_path: str | None = None, **kwargs: Any) -> Any:
    made = trainer(
        **{"rounds": 4, "evaluate_every": 100, "score_clients": 2, "schedule": schedule, **kwargs}
    )
    made.fit(classifier(), digits(clients=CLIENTS), ckpt_path=ckpt_path)
    return made


class Seen(FederationCallback):
    """Records every failure that the federation reports."""

    affects = "nothing"
    reads_updates = False

    def __init__(self) -> None:
        self.failures: list[tuple[int, int, str]] = []

    def on_client_end(self, run: Any, outcome: Any) -> None:
        if hasattr(outcome, "reason"):
            self.failures.append((outcome.round, outcome.client, outcome.reason))


def test_a_run_under_all_faults_equals_one_without_these_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Seen()
    engine = Processes(workers=2, timeout=4.0)
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        faulty = fit(Faults(Synchronous(), **ALL), engine=engine, callbacks=[seen])
    absent = fit(Absent(Synchronous(), **ALL))
    assert equal_states(faulty.federation.state, absent.federation.state)

    # Every client that was lost is named, with its reason.
    reasons = [reason for *_, reason in seen.failures]
    for part in (
        "RuntimeError: raised on purpose (schedule.raises)",
        "is not finite",
        "has shape",
        "it did not finish within 4 seconds (engine.timeout)",
        "its worker died twice",
        "its update did not arrive in time",
    ):
        assert any(part in reason for reason in reasons), part
    said = [record.getMessage() for record in caplog.records]
    for round, client, reason in seen.failures:
        alone = f"round {round}: client {client} failed"
        alike = rf"round {round}: \d+ of \d+ clients failed alike \(.*\b{client}\b.*\)"
        assert any(re.fullmatch(f"({alone}|{alike}): {re.escape(reason)}", line) for line in said)
    assert any("was refused: it came a second time" in line for line in said)
    assert any("was refused: it came too late" in line for line in said)


SETTINGS: dict[str, dict[str, Any]] = {
    "asynchronous": {"aggregator": FedBuff(), "schedule": Asynchronous(4, 2, speeds=Stragglers())},
    "top_k": {"compression": TopK(0.1)},
    "secure_sum": {"secure_sum": PairwiseMasks()},
    "scaffold": {"aggregator": SCAFFOLD()},
    "attacked": {"aggregator": MultiKrum(0.1), "attack": FreeRider(fraction=0.3, last_change=True)},
}


@pytest.mark.parametrize("kwargs", mostly_long(SETTINGS, "asynchronous", "attacked"))
def test_in_process_the_run_equals_one_without_these_clients(kwargs: dict[str, Any]) -> None:
    def states(made: Any) -> dict[str, torch.Tensor]:
        own = [made.federation.client_state(client) for client in range(CLIENTS)]
        everything = [made.federation.state, *own]
        return {f"{n}.{name}": v for n, part in enumerate(everything) for name, v in part.items()}

    kwargs = dict(kwargs)
    inner = kwargs.pop("schedule", Synchronous())
    faulty = fit(Faults(inner, **IN_PROCESS), **kwargs)
    absent = fit(Absent(inner, **IN_PROCESS), **kwargs)
    whole = fit(inner, **kwargs)
    assert equal_states(states(faulty), states(absent))
    assert not equal_states(states(faulty), states(whole))
    clocks = faulty.federation.clock, absent.federation.clock
    assert clocks[0].seconds == clocks[1].seconds or not inner.is_virtual


def test_clients_that_are_gone_before_the_unmasking_cost_nothing() -> None:
    whole = fit(Synchronous(), rounds=2, secure_sum=PairwiseMasks())
    for engine in (InProcess(), Processes(workers=2)):
        masks, faults = PairwiseMasks(), Faults(Synchronous(), gone=0.2)
        made = fit(faults, rounds=2, secure_sum=masks, engine=engine)
        assert equal_states(made.federation.state, whole.federation.state)
        gone = {f.client for f in made.federation.schedule.ended if f.fault == "gone"}
        assert gone and made.federation.clock.bytes < whole.federation.clock.bytes


def test_too_many_clients_that_are_gone_end_the_run() -> None:
    with pytest.raises(FederationError, match="7 are needed"):
        fit(Faults(Synchronous(), gone=0.9), rounds=3, secure_sum=PairwiseMasks())


def test_who_unmasks_nothing_can_be_gone_from_a_secure_sum_alone() -> None:
    with pytest.raises(FlsuiteError, match="Faults needs secure aggregation"):
        fit(Faults(Synchronous(), gone=0.1))


def test_a_late_client_is_not_in_the_sum_of_its_part() -> None:
    def state(kind: type[Faults], engine: Any) -> Any:
        schedule = kind(Synchronous(), late=0.3)
        made = trainer(
            rounds=2, evaluate_every=9, score_clients=2, engine=engine, schedule=schedule
        )
        made.fit(classifier(), digits(clients=45, train_samples=900))  # two clients in each part
        return made.federation.state

    absent = state(Absent, InProcess())
    for engine in (InProcess(), Processes(workers=2)):
        assert equal_states(state(Faults, engine), absent)


@pytest.mark.parametrize(
    ("inner", "aggregator"),
    [(Synchronous(), FedAvg()), (Asynchronous(6, 2, speeds=Stragglers()), FedBuff())],
    ids=["synchronous", "asynchronous"],
)
def test_a_resumed_run_goes_on_with_the_same_faults(
    inner: Schedule, aggregator: Any, tmp_path: Path
) -> None:
    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> Any:
        faults = Faults(inner, **{**IN_PROCESS, "late": 0.2})
        settings = {"rounds": rounds, "aggregator": aggregator, "run_dir": tmp_path / folder}
        return fit(faults, ckpt_path, **settings)

    whole, held = run("whole", 3), 0
    for rounds in range(1, 4):
        resumed = run("parts", rounds, "last" if rounds > 1 else None)
        held += len(resumed.schedule.state_dict()["held"])
    assert held, "messages are held back while the run is stopped"
    assert equal_states(resumed.federation.state, whole.federation.state)
    bytes_up = [
        [row.value for row in made.run.folder.table.rows if row.metric in ("bytes_up", "failed")]
        for made in (resumed, whole)
    ]
    assert bytes_up[0] == bytes_up[1], "late messages are counted after a resume too"


@pytest.mark.parametrize("inner", [Synchronous(), Asynchronous(4, 2, speeds=Stragglers())])
def test_a_late_client_has_received_the_model_once(inner: Schedule) -> None:
    aggregator = FedBuff() if inner.is_asynchronous else FedAvg()
    made = fit(Faults(inner, late=0.3), aggregator=aggregator)
    rows = [row for row in made.run.folder.table.rows if row.scope == "global"]
    down, came, failed = (
        [row.value for row in rows if row.metric == name]
        for name in ("bytes_down", "clients", "failed")
    )
    size = sum(4 * value.numel() for value in made.federation.state.values())
    assert sum(failed) and down == [size * (c + f) for c, f in zip(came, failed, strict=True)]


def test_faults_are_drawn_by_seed_fit_and_client() -> None:
    def drawn(seed: int) -> list[str | None]:
        schedule = Faults(Synchronous(), **ALL)
        schedule.configure([1] * 200, seed)
        return [fit.fault for fit in schedule.start(Clock())]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {*drawn(1)} == {None, *ALL}


@pytest.mark.parametrize("limit", [{"rounds": 8}, {"max_client_updates": 30}])
def test_a_rehearsal_knows_of_the_faults_and_counts_no_late_update(limit: dict[str, int]) -> None:
    def made() -> Any:
        schedule = Faults(Synchronous(speeds=Stragglers()), **{**IN_PROCESS, "late": 0.2})
        return trainer(**limit, schedule=schedule, evaluate_every=100)

    prepared, real = made().prepare(classifier(), digits(clients=6)), made()
    outcomes = [row.outcome for row in rehearse(prepared)]
    real.fit(classifier(), digits(clients=6))
    merged = [row for row in real.run.folder.table.rows if row.metric == "clients"]
    assert {"merged", "failed", "late"} == {*outcomes} and len(outcomes) == 6 * real.round
    assert outcomes.count("merged") == sum(row.value for row in merged)


def test_a_rehearsal_names_the_key_of_the_speeds() -> None:
    made = trainer(rounds=1, schedule=Faults(Synchronous(), nan=0.1))
    with pytest.raises(FlsuiteError, match=r"set trainer\.schedule\.schedule\.speeds"):
        list(rehearse(made.prepare(classifier(), digits(clients=6))))


@pytest.mark.parametrize(
    ("engine", "faults", "message"),
    [
        (InProcess(), {"hangs": 0.1, "dies": 0.1}, "needs a timeout of fits, but InProcess"),
        (InProcess(), {"dies": 0.1}, r"worker processes, .*set trainer\.engine to"),
        (Processes(workers=1), {"hangs": 0.1}, r"but Processes has none; .*Processes\(timeout="),
    ],
)
def test_faults_that_the_engine_would_not_survive_are_refused(
    engine: Any, faults: dict[str, float], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        fit(Faults(Synchronous(), **faults), engine=engine, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nan": 1.0}, r"Faults: nan must be in \[0, 1\)"),
        ({"nan": 0.9, "raises": 0.2, "late": 0.06}, r"sum of the probabilities .* got 1\.16$"),
        ({"schedule": None}, "schedule must be a "),
        ({"schedule": Faults(Synchronous(), nan=0.5)}, "schedule is a Faults too.* in one of them"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        Faults(**{"schedule": Synchronous(), **arguments})
