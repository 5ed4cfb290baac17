"""Federations that do not wait: FedAvg at a limit, equal on every engine and after every kill."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import (
    SCAFFOLD,
    Aggregator,
    Centralized,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedFisher,
    FisherAveraging,
    FisherMerge,
    OTFusion,
    RegMean,
    Rule,
)
from flsuite.callbacks import FederationCallback, StopAt
from flsuite.common.errors import FederationError
from flsuite.federation import (
    Asynchronous,
    Availability,
    Bernoulli,
    InProcess,
    Measured,
    OnOff,
    PerSample,
    Processes,
    Schedule,
    Stragglers,
    Synchronous,
    Trace,
)
from flsuite.models import MLP, Classifier
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.run import Run
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_same_models,
    federation,
    table_data,
    table_model,
)
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.schedules.simulation import PerClient
from tests.runs.killing import kill_and_resume, table_of


def stragglers(**settings: Any) -> Asynchronous:
    """Return a schedule in which every kind of event takes place."""
    chosen = {
        "concurrency": 6,
        "buffer_size": 3,
        "speeds": Stragglers(),
        "availability": Bernoulli(0.2),
        **settings,
    }
    return Asynchronous(**chosen)


def fitted(
    aggregator: Aggregator | Rule, schedule: Schedule, rounds: int = 6, **kwargs: Any
) -> Any:
    made = federation(aggregator, rounds, schedule=schedule, **kwargs)
    made.fit(table_model(momentum=0.9), table_data(clients=8))
    return made


@pytest.mark.parametrize(("cohort", "weighting"), [(8, "samples"), (3, "uniform")])
def test_with_equal_speeds_fedbuff_is_fedavg(cohort: int, weighting: Any) -> None:
    speeds = PerClient(*[1.0] * 8)
    settings: dict[str, Any] = {"keep_optimizers": True, "rounds": 3}
    waits = fitted(FedAvg(weighting), Synchronous(cohort, speeds=speeds), **settings)
    buffered = FedBuff("delta", eta=1.0, staleness="constant", weighting=weighting)
    flows = fitted(buffered, Asynchronous(cohort, cohort, speeds=speeds), **settings)

    assert_same_models(waits, flows)
    assert flows.federation.clock == waits.federation.clock


def test_fedavg_with_late_clients_is_fedbuff() -> None:
    ours = fitted(FedAvg("uniform"), stragglers())
    assert_same_models(ours, fitted(FedBuff(weighting="uniform"), stragglers()))


def test_fedasync_with_weight_one_takes_the_clients_model() -> None:
    class Kept(FederationCallback):
        states: list[dict[str, torch.Tensor]] = []

        def on_client_end(self, run: Run, outcome: Any) -> None:
            self.states.append(outcome.update.state)

        def on_round_end(self, run: Run, round: int) -> None:
            floats = {k: v for k, v in self.states[-1].items() if v.is_floating_point()}
            assert equal_states({name: run.federation.state[name] for name in floats}, floats)

    aggregator = FedAsync(mixing=1.0, staleness="constant")
    fitted(aggregator, stragglers(buffer_size=1), rounds=5, callbacks=[Kept()])
    assert len(Kept.states) == 5


ALGORITHMS: dict[str, Callable[[], Aggregator]] = {
    "delta": FedBuff,
    "scaffold": lambda: SCAFFOLD(control="mean_gradient"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_engine_gives_the_same_run(name: str) -> None:
    make, buffers = ALGORITHMS[name], "average" if name == "delta" else "local"
    settings: dict[str, Any] = {"batchnorm": buffers, "keep_optimizers": True}
    here = fitted(make(), stragglers(), **settings)
    there = fitted(make(), stragglers(), engine=Processes(workers=3), **settings)
    assert_same_models(here, there)
    assert there.federation.clock == here.federation.clock
    assert stale(there) == stale(here)


def stale(made: FederatedTrainer) -> list[tuple[Any, ...]]:
    """Return the rows of the table that do not depend on the machine."""
    assert made.run is not None
    rows = made.run.folder.table.rows
    return [(*row[:2], *row[3:]) for row in rows if row[-2] != "seconds"]


def test_stale_updates_reach_the_optimum_of_quadratics() -> None:
    """Equal curvatures: the optimum is the mean of the minima, however late clients come back.

    The slow client takes part less often, and FedBuff weighs updates, not clients. So it is the
    mean by the share of updates: 10, 5 and 2 of 17.
    """
    minima, optimum = (0.0, 1.0, 2.0), 5 / 17 * 1 + 2 / 17 * 2

    # A small step of the server averages over the order of the arrivals.
    aggregator = FedBuff("delta", eta=0.04, staleness="constant")
    schedule = Asynchronous(3, buffer_size=1, speeds=PerClient(1, 2, 5))
    made = federation(aggregator, 300, schedule=schedule, evaluate_every=300)
    model = Quadratic(partial(torch.optim.SGD, lr=0.5))
    made.fit(model, Quadratics((1.0, 1.0, 1.0), minima))
    assert float(made.federation.state["w"]) == pytest.approx(optimum, abs=0.02)


def test_reset_statistics_take_the_mean_of_the_clients() -> None:
    """Every fit starts from the initial statistics, so no changes add up."""

    class Mean(FederationCallback):
        def on_round_start(self, run: Run, round: int, clients: Any) -> None:
            self.arrived: list[torch.Tensor] = []

        def on_client_end(self, run: Run, outcome: Any) -> None:
            self.arrived.append(outcome.update.state["network.1.running_mean"])

        def on_round_end(self, run: Run, round: int) -> None:
            mean = torch.stack(self.arrived).double().mean(0).float()
            torch.testing.assert_close(run.federation.state["network.1.running_mean"], mean)

    aggregator = FedBuff("delta", staleness="constant")
    fitted(aggregator, stragglers(), rounds=3, batchnorm="reset", callbacks=[Mean()])


def test_bad_clients_do_not_stop_the_others() -> None:
    """One client raises, and the update of another is not finite."""
    curvatures, minima = (1.0, -1.0, float("inf"), 1.0), (0.0, 0.0, 0.0, 1.0)
    schedule = Asynchronous(4, buffer_size=2, speeds=PerClient(1, 1, 1.5, 2))
    made = federation(FedBuff(), 8, schedule=schedule, max_epochs=2)
    made.fit(Quadratic(), Quadratics(curvatures, minima))
    assert 0 < float(made.federation.state["w"]) < 1
    failed = {row[3]: row[-1] for row in stale(made) if row[-2] == "failed"}
    assert made.federation.clock.client_updates == 16 and failed


def test_when_nobody_can_train_the_run_ends() -> None:
    schedule = Asynchronous(2, speeds=PerClient(1, 2))
    made = federation(FedBuff(), 5, schedule=schedule)
    with pytest.raises(FlsuiteError, match="no client can train: client 0 failed"):
        made.fit(Quadratic(), Quadratics((-1.0, -1.0), (0.0, 0.0)))


class Ends(FederationCallback):
    """Ends a run that would go on for ever."""

    def on_round_end(self, run: Any, round: int) -> None:
        assert round < 300


@pytest.mark.parametrize(
    "schedule",
    [
        Asynchronous(2, speeds=PerClient(0, 0, 9)),  # the others take turns until it comes back
        Synchronous(2, speeds=PerClient(0, 0, 0)),
    ],
    ids=["some", "rounds"],
)
def test_fits_that_take_no_time_end_a_run_that_only_time_would_end(schedule: Schedule) -> None:
    limits = {"max_virtual_seconds": 20, "callbacks": Ends()}
    made = federation(FedBuff(), None, schedule=schedule, **limits)  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="rounds have taken no virtual time, and"):
        made.fit(Quadratic(), Quadratics((1.0,) * 3, (0.0,) * 3))


def asynchronous_run(
    folder: str, engine: Any, ckpt_path: str | None = "last", rounds: int = 16
) -> FederatedTrainer:
    """Fit a federation that needs all that a checkpoint can hold."""
    torch.set_num_threads(1)
    made = trainer(
        rounds=rounds,
        aggregator=FedAvgM(momentum=0.5),
        schedule=stragglers(concurrency=7, buffer_timeout=0.5),
        engine=engine,
        evaluate_every=5,
        keep_optimizers=True,
        run_dir=folder,
        callbacks=[Ageing()],
    )
    model = Classifier(
        MLP(hidden=(16,)),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        private=["network.3"],
    )
    made.fit(model, digits(clients=8), ckpt_path=ckpt_path)
    return made


def longer_run(folder: str, engine: Any, ckpt_path: str | None = "last") -> FederatedTrainer:
    return asynchronous_run(folder, engine, ckpt_path, rounds=40)


class Ageing(FederationCallback):
    """Changes the weights by its own state, which clients of older versions must not see."""

    def __init__(self) -> None:
        self.age = 0

    def on_round_end(self, run: Run, round: int) -> None:
        self.age = round

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.data.mul_(1 - 1e-3 * self.age)

    def state_dict(self) -> dict[str, Any]:
        return {"age": self.age}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.age = state_dict["age"]


@pytest.mark.parametrize(
    ("run", "engine", "kills"),
    [
        pytest.param(asynchronous_run, InProcess(), 1, id="in_process"),
        pytest.param(longer_run, Processes(workers=2), 3, id="processes", marks=pytest.mark.long),
    ],
)
def test_killed_with_clients_in_flight_equals_never_stopped(
    tmp_path: Path, run: Callable[..., FederatedTrainer], engine: Any, kills: int
) -> None:
    whole = run(str(tmp_path / "whole"), InProcess(), ckpt_path=None)
    folder = tmp_path / "killed"
    resumed = kill_and_resume(run, folder, engine, kills, whole.round)
    assert_same_models(whole, resumed)
    assert table_of(folder).equals(table_of(tmp_path / "whole"))
    assert (folder / "timeline.csv").read_text() == (tmp_path / "whole/timeline.csv").read_text()


def test_only_versions_in_flight_are_kept(tmp_path: Path) -> None:
    made = trainer(
        rounds=12,
        aggregator=FedAsync(),
        schedule=Asynchronous(4, speeds=Stragglers()),
        run_dir=str(tmp_path / "run"),
    )
    made.fit(classifier(), digits(clients=8))
    in_flight = {fit.version for fit in made.schedule.in_flight}
    best = load_checkpoint(tmp_path / "run/checkpoints/best.ckpt")["federation"]["schedule"]
    in_flight |= {fit["version"] for fit in best["in_flight"]}  # of the picked round
    names = {f"version-{version:06d}.pt" for version in in_flight}
    assert {path.name for path in (tmp_path / "run/in_flight").iterdir()} == names
    assert len(names) <= 8


def test_a_run_can_be_extended_and_a_missing_version_is_named(tmp_path: Path) -> None:
    def fit(rounds: int, folder: str, ckpt_path: str | None = None) -> FederatedTrainer:
        settings = {"rounds": rounds, "schedule": stragglers(), "callbacks": [Ageing()]}
        made = trainer(aggregator=FedBuff(), run_dir=str(tmp_path / folder), **settings)
        made.fit(classifier(), digits(clients=8), ckpt_path=ckpt_path)
        return made

    whole = fit(5, "whole")
    fit(2, "extended")
    assert_same_models(whole, fit(5, "extended", "last"))

    for path in (tmp_path / "extended/in_flight").iterdir():
        path.unlink()
    with pytest.raises(FlsuiteError, match=r"version \d+ of the global model,"):
        fit(7, "extended", "last")


@pytest.mark.parametrize(
    "rule",
    [
        FisherMerge(),
        FisherAveraging(estimator="training"),
        FedFisher("diag"),
        RegMean(),
        OTFusion(),
    ],
)
def test_rules_that_merge_whole_models_need_the_current_version(rule: Rule) -> None:
    name = type(rule).__name__
    chain = Classifier(MLP((4,)))  # one that OTFusion can merge
    made = federation(rule, 1, schedule=stragglers())
    with pytest.raises(FlsuiteError, match=rf"{name} needs current models, but Asyn.*FedBuff"):
        made.prepare(chain, table_data(clients=8))


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        ({"max_client_updates": 10}, lambda clock: 10 <= clock.client_updates < 13),
        ({"max_virtual_seconds": 0.6}, lambda clock: 0.6 <= clock.seconds < 3.0),
        ({"max_virtual_seconds": 1e6, "max_client_updates": 6}, lambda c: c.client_updates == 6),
        ({}, lambda clock: clock.round == 10),
    ],
)
def test_a_budget_ends_the_run(budget: dict[str, Any], spent: Callable[[Any], bool]) -> None:
    made = trainer(aggregator=FedBuff(), schedule=stragglers(), evaluate_every=99, **budget)
    made.fit(classifier(), digits(clients=8))
    assert spent(made.federation.clock)


def test_stop_at_a_score_on_validation_data(tmp_path: Path) -> None:
    def fit(value: float, ckpt_path: str | None = None) -> FederatedTrainer:
        made = trainer(
            rounds=40,
            aggregator=FedBuff(),
            schedule=stragglers(),
            callbacks=[StopAt("accuracy", value)],
            run_dir=str(tmp_path / "run"),
        )
        made.fit(classifier(), digits(clients=8), ckpt_path=ckpt_path)
        return made

    early = fit(0.4)
    table = pd.read_csv(tmp_path / "run/metrics.csv")
    of_model = table[(table.scope == "global") & (table.split == "val")]
    scores = of_model[of_model.metric == "accuracy"]
    assert (scores.value.iloc[:-1] < 0.4).all() and scores.value.iloc[-1] >= 0.4
    assert early.round > 1 and fit(0.4, "last").round == early.round
    assert fit(0.6, "last").round > early.round
    with pytest.raises(FlsuiteError, match="StopAt: metric must be one of"):
        StopAt("gamma")


def test_communication_takes_time() -> None:
    """Ten clients, half a second per kilobyte: the time of a round follows the bytes."""
    speeds = PerSample(seconds_per_sample=0.0, seconds_per_byte_up=5e-4)
    made = fitted(FedAvg(), Synchronous(speeds=speeds), rounds=1)
    sent = max(row[-1] for row in made.run.folder.table.rows if row[-2] == "bytes_up")
    of_one = sent / 8
    assert made.federation.clock.seconds == pytest.approx(of_one * 5e-4)


def test_a_client_that_comes_back_twice_has_one_row_of_totals(tmp_path: Path) -> None:
    schedule = Asynchronous(2, 3, buffer_timeout=9, speeds=PerClient(1, 5))
    made = trainer(rounds=1, aggregator=FedBuff(), schedule=schedule)
    made.fit(classifier(), digits(clients=2))
    rows = [row for row in made.run.folder.table.rows if row.scope == "0"]
    names = [row.metric for row in rows if row.split == "train"]
    assert len(names) == len(set(names))
    (up,) = (row.value for row in rows if row.metric == "bytes_up")
    (total,) = (
        row.value
        for row in made.run.folder.table.rows
        if row.scope == "global" and row.metric == "bytes_up"
    )
    assert up == total  # client 0 has come back three times


def test_bytes_of_clients_that_failed_or_never_answered_count() -> None:
    """Three of four receive the model for nothing; the update of one is refused on arrival."""

    class FirstLeaves(Availability):
        def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
            return started if client == 0 else None

    curvatures, minima = (1.0, -1.0, float("inf"), 1.0), (0.0, 0.0, 0.0, 1.0)
    schedule = Synchronous(speeds=PerClient(1, 1, 1, 1), availability=FirstLeaves())
    made = federation(FedAvg(), 1, schedule=schedule, max_epochs=2)
    made.fit(Quadratic(), Quadratics(curvatures, minima))
    assert made.federation.clock.bytes == 4 * (4 + 2)  # four bytes: four times down, twice up


def test_a_pooled_fit_counts_as_its_cohort_and_has_no_virtual_time() -> None:
    made = trainer(aggregator=Centralized(), max_client_updates=20)
    made.fit(classifier(), digits(clients=5))
    assert made.round == 4 and made.federation.clock.client_updates == 20
    for schedule in (Synchronous(speeds=Stragglers()), stragglers()):
        with pytest.raises(FlsuiteError, match="chronous needs clients, but Centralized"):
            fitted(Centralized(), schedule)


def test_a_trace_that_has_changed_is_another_setting(tmp_path: Path) -> None:
    def fit(rounds: int, path: Path, seconds: list[int], ckpt_path: str | None = None) -> None:
        lines = [f"{client},{time}" for client, time in enumerate(seconds)]
        path.write_text("client,seconds\n" + "\n".join(lines) + "\n")
        schedule = Asynchronous(2, speeds=Trace(str(path)))
        made = trainer(
            rounds=rounds, aggregator=FedBuff(), schedule=schedule, run_dir=str(tmp_path / "run")
        )
        made.fit(classifier(), digits(clients=3), ckpt_path=ckpt_path)

    fit(2, tmp_path / "trace.csv", [1, 2, 3])
    (tmp_path / "elsewhere").mkdir()
    fit(3, tmp_path / "elsewhere/trace.csv", [1, 2, 3], "last")
    with pytest.raises(FlsuiteError, match=r"schedule\.speeds\.path is 'trace\.csv"):
        fit(4, tmp_path / "trace.csv", [3, 2, 1], "last")


def test_over_selection_takes_the_first_and_names_the_rest(tmp_path: Path) -> None:
    schedule = Synchronous(4, over_selection=1.5, speeds=PerClient(1, 2, 3, 4, 5, 6, 7, 8))
    made = trainer(rounds=3, aggregator=FedAvg(), schedule=schedule, run_dir=str(tmp_path / "run"))
    made.fit(classifier(), digits(clients=8))
    timeline = pd.read_csv(tmp_path / "run/timeline.csv")
    assert timeline.version.nunique() == 3
    for _, fits in timeline.groupby("version"):
        merged, late = fits[fits.outcome == "merged"], fits[fits.outcome == "late"]
        assert len(merged) == 4 and len(late) == 2
        assert merged.client.max() < late.client.min()
        assert (late.ended_s == merged.ended_s.max()).all()
    assert made.federation.clock.seconds == timeline.ended_s.max()


def test_measured_speeds_work_without_being_repeatable() -> None:
    made = fitted(FedBuff(), Asynchronous(3, 2, speeds=Measured()), rounds=2)
    assert made.federation.clock.client_updates == 4
    assert made.federation.clock.seconds > 0


def test_a_lost_federation_keeps_its_last_round(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,start,end\n" + "".join(f"{c},0,2\n" for c in range(8)))
    made = trainer(
        rounds=500,
        evaluate_every=10,
        aggregator=FedBuff(),
        schedule=stragglers(availability=OnOff(str(trace))),
        run_dir=str(tmp_path / "run"),
    )
    with pytest.raises(FederationError, match="none is available from virtual second 2 on"):
        made.fit(classifier(), digits(clients=8))
    assert 0 < made.round < 500
    assert made.test()[0]["accuracy"] > 0
