"""Workers sum the models of a part of the cohort, and nothing else changes."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from flsuite.aggregators import (
    SCAFFOLD,
    Aggregator,
    FedAsync,
    FedAvg,
    FedBuff,
    FedFisher,
    Mean,
    Objective,
    Quantize,
    RegMean,
)
from flsuite.aggregators.uplink import part_size
from flsuite.callbacks import FederationCallback, RoundProgress
from flsuite.common.messages import (
    Broadcast,
    ClientContext,
    ClientResult,
    ClientUpdate,
    FitRequest,
    Outcome,
)
from flsuite.common.state import State, mean_of
from flsuite.federation import InProcess, Processes, Vectorized
from flsuite.federation.engines.base import jobs_of
from flsuite.runs.preparation import worker_setup
from tests.conftest import classifier, digits, equal_states, trainer

CLIENTS = 45  # two clients in each part, and one in the last


def fit(private: Sequence[str] = (), **kwargs: Any) -> Any:
    made = trainer(**{"rounds": 1, "evaluate_every": 1000, "score_clients": 2, **kwargs})
    made.fit(classifier(private=private), digits(clients=CLIENTS))
    return made


def sums_parts(made: Any) -> bool:
    return worker_setup(made, made.run).sums_parts


class Reads(FederationCallback):
    """Averages the models that it receives."""

    affects = "nothing"

    def __init__(self) -> None:
        self.seen: list[tuple[State, float]] = []

    def on_round_start(self, run: Any, round: int, clients: Sequence[int]) -> None:
        self.seen.clear()

    def on_client_end(self, run: Any, outcome: Outcome) -> None:
        assert isinstance(outcome, ClientResult)
        self.seen.append((outcome.update.state, outcome.update.samples))


class ReadsSound(FederationCallback):
    """Needs every update, but does nothing with it."""

    affects = "nothing"

    def on_client_end(self, run: Any, outcome: Outcome) -> None:
        assert run.federation is not None


class Spoils(Callback):
    """Gives one client a NaN, and lets another one fail."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        client = trainer.train_dataloader.client
        if client == 3:
            next(pl_module.parameters()).data[0, 0] = float("nan")
        if client == 8:
            raise ValueError("of client 8")


class SpoilsHead(Callback):
    """Gives two clients in different parts a NaN: the last of a part, the first of another."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.train_dataloader.client in (5, 8):
            pl_module.network[3].weight.data[0, 0] = float("nan")


class KeepsALock(Objective):
    """One client's memory cannot be sent."""

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        if client.id == 5:
            client.memory["lock"] = threading.Lock()


class Dies(Callback):
    """Kills the workers of some clients, each up to ``times`` times."""

    def __init__(self, folder: Path, times: int, clients: tuple[int, ...] = (5,)) -> None:
        self.folder, self.times, self.clients = folder, times, clients

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        client = trainer.train_dataloader.client
        done = len(list(self.folder.glob(f"{client}-*")))
        if client in self.clients and done < self.times:
            (self.folder / f"{client}-{done}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class OwnWeight(Mean):
    """A user-defined mean."""

    def weight(self, update: ClientUpdate) -> float:
        return 1.0 + update.client


@pytest.mark.parametrize("aggregator", [FedAvg, SCAFFOLD, FedBuff, OwnWeight])
def test_sums_of_parts_give_the_weights_of_all_models(aggregator: Any) -> None:
    rounds = 2 if aggregator is SCAFFOLD else 1
    summed = fit(aggregator=aggregator(), rounds=rounds)
    assert sums_parts(summed)
    callback = Reads()
    whole = fit(aggregator=aggregator(), callbacks=[callback], rounds=rounds)
    assert not sums_parts(whole)
    assert equal_states(summed.federation.state, whole.federation.state)
    assert summed.federation.log.bytes == whole.federation.log.bytes > 0
    if type(aggregator()) is FedAvg:
        mean = mean_of(callback.seen)
        assert all(torch.allclose(mean[k].float(), v) for k, v in whole.federation.state.items())


@pytest.fixture(scope="module")
def whole() -> Any:
    """Return a run in this process."""
    torch.set_num_threads(1)
    return fit()


@pytest.fixture(scope="module")
def spoiled() -> Any:
    torch.set_num_threads(1)
    return fit(callbacks=[Spoils()])


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_and_this_process_sum_alike(workers: int, spoiled: Any) -> None:
    there = fit(callbacks=[Spoils()], engine=Processes(workers))
    assert equal_states(spoiled.federation.state, there.federation.state)
    for made in (spoiled, there):
        assert [f.client for f in made.federation.log.failures] == [3, 8]
        assert "is not finite" in made.federation.log.failures[0].reason
        assert len(made.federation.log.updates) == CLIENTS - 2


def test_each_client_of_a_part_has_a_second_try(whole: Any, tmp_path: Path) -> None:
    callback = Dies(tmp_path, times=1, clients=(4, 5))
    made = fit(engine=Processes(2), callbacks=[callback])
    assert len(list(tmp_path.iterdir())) == 2, "it has happened"
    assert not made.federation.log.failures
    assert equal_states(made.federation.state, whole.federation.state)


def test_a_client_that_is_refused_for_its_own_entries_is_in_no_sum() -> None:
    head = ("network.3",)
    whole = fit(private=head, callbacks=[SpoilsHead(), ReadsSound()])
    assert not sums_parts(whole)
    for engine in (InProcess(), Processes(2)):
        summed = fit(private=head, engine=engine, callbacks=[SpoilsHead()])
        assert [f.client for f in summed.federation.log.failures] == [5, 8]
        assert sums_parts(summed)
        assert equal_states(summed.federation.state, whole.federation.state)


def test_a_client_that_cannot_be_sent_takes_no_other_with_it() -> None:
    made = fit(aggregator=Aggregator(objective=KeepsALock()), engine=Processes(2))
    assert sums_parts(made)
    assert [f.client for f in made.federation.log.failures] == [5]


class OwnProgress(RoundProgress):
    def on_client_end(self, run: Any, outcome: Outcome) -> None:
        """Override a method."""


def test_a_callback_that_does_not_say_what_it_reads_has_every_model() -> None:
    hook = FederationCallback()
    hook.on_client_end = lambda run, outcome: None  # type: ignore[method-assign]
    for callback, is_summed in (
        (FederationCallback(), True),
        (RoundProgress(), True),
        (OwnProgress(), False),
        (hook, False),
    ):
        made = trainer(rounds=1, callbacks=[callback])
        made.prepare(classifier(), digits(clients=3))
        assert sums_parts(made) == is_summed


def test_a_client_that_always_kills_its_worker_takes_no_other_with_it(tmp_path: Path) -> None:
    made = fit(engine=Processes(2), callbacks=[Dies(tmp_path, times=9)])
    assert [f.client for f in made.federation.log.failures] == [5]
    assert "died twice" in made.federation.log.failures[0].reason


@pytest.mark.parametrize(
    "kwargs",
    [
        {"aggregator": FedAsync()},
        {"aggregator": FedFisher(steps=1)},
        {"compression": Quantize(bits=16)},
    ],
)
def test_who_needs_every_update_has_it(kwargs: dict[str, Any]) -> None:
    made = trainer(rounds=1, **kwargs)
    made.fit(classifier(), digits(clients=3))
    assert not sums_parts(made)


def test_models_that_are_measured_after_a_stack_are_summed_one_by_one() -> None:
    """Each is loaded into the same model, which the next one overwrites."""
    alone, stacked = (
        fit(engine=engine, aggregator=RegMean(alpha=0.9)).federation.state
        for engine in (InProcess(), Vectorized(clients=50))
    )
    assert all(torch.allclose(alone[k], stacked[k], rtol=1e-4, atol=1e-5) for k in alone)


@pytest.mark.parametrize(("cohort", "size"), [(1, 1), (39, 1), (40, 2), (100, 5), (10_000, 16)])
def test_parts_follow_from_the_size_of_the_cohort(cohort: int, size: int) -> None:
    assert part_size(cohort) == size


def test_a_stack_has_whole_parts_of_one_broadcast() -> None:
    state = {"w": torch.zeros(3)}
    first, second = Broadcast(1, state, {}), Broadcast(1, state, {})
    requests = [
        *(FitRequest(n, n, first, {}, part=n // 2) for n in range(6)),
        FitRequest(6, 6, first, {}),  # it comes back alone
        *(FitRequest(n, n, second, {}, adapts=1) for n in (7, 8)),
    ]
    jobs = [[request.number for request in job] for job in jobs_of(requests, True, stack=5)]
    assert jobs == [[0, 1, 2, 3], [4, 5], [6], [7, 8]]
    alone = [[request.number for request in job] for job in jobs_of(requests, True)]
    assert alone == [[0, 1], [2, 3], [4, 5], [6], [7], [8]]
