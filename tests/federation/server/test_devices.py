"""Secure aggregation in whole federations: what the aggregator sees, and what comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flsuite import FederatedTrainer, FederationError, FlsuiteError
from flsuite.aggregators import (
    SCAFFOLD,
    Aggregator,
    FedAvg,
    FedBuff,
    FedFisher,
    Mean,
    OTFusion,
    PairwiseMasks,
    Rule,
    Server,
    TopK,
)
from flsuite.callbacks import FederationCallback
from flsuite.common.messages import ClientFailure, ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, scaled
from flsuite.federation import Asynchronous, Bernoulli, LogNormal, PerSample, Processes, Synchronous
from tests.conftest import classifier, digits, state, trainer


def fitted(
    aggregator: Aggregator | Rule, rounds: int = 2, private: Sequence[str] = (), **kwargs: Any
) -> FederatedTrainer:
    made = trainer(rounds=rounds, aggregator=aggregator, **{"seed": 1, **kwargs})
    data = digits(server_samples=50, train_samples=400)
    model = classifier(private=private)
    made.fit(model, data, ckpt_path="last" if "run_dir" in kwargs else None)
    return made


def distance(a: FederatedTrainer, b: FederatedTrainer) -> float:
    theirs = state(b)
    return max(float((value - theirs[name]).abs().max()) for name, value in state(a).items())


@pytest.fixture(scope="module")
def plain() -> FederatedTrainer:
    torch.set_num_threads(1)
    return fitted(FedAvg())


@pytest.fixture(scope="module")
def masked() -> FederatedTrainer:
    torch.set_num_threads(1)
    return fitted(FedAvg(), secure_sum=PairwiseMasks())


EVERY = [
    partial(FedAvg, "uniform"),
    SCAFFOLD,
    FedBuff,
    partial(FedFisher, "kfac", select=False, steps=5),
]


@pytest.mark.parametrize("make", EVERY)
def test_the_masked_sum_leads_to_the_model_of_the_plain_one(make: Callable[[], Aggregator]) -> None:
    assert 0.0 <= distance(fitted(make()), fitted(make(), secure_sum=PairwiseMasks())) < 2e-4


def test_results_depend_on_neither_the_keys_nor_the_engine(
    plain: FederatedTrainer, masked: FederatedTrainer
) -> None:
    there = fitted(FedAvg(), secure_sum=PairwiseMasks(), engine=Processes(workers=2))
    assert distance(masked, there) == 0.0
    assert distance(plain, masked) < 2e-4


seen: list[ClientUpdate] = []


class Watched(Mean):
    """The mean, which records everything that its server half receives."""

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        seen.extend(updates)
        # The resident model, on which clients train here, no longer holds a client's weights.
        module = server.tools.module({})
        assert all(torch.equal(module.state_dict()[k], v) for k, v in server.state.items())
        return super().result(server, sums, updates)


def test_the_aggregator_sees_sums_and_no_client(tmp_path: Path) -> None:
    seen.clear()
    made = fitted(Watched(), secure_sum=PairwiseMasks(), run_dir=str(tmp_path / "run"))
    assert len(seen) == 10
    assert all(not update.state and not update.extras for update in seen)
    assert all(len(update.class_counts) == 0 for update in seen)
    # The server's knowledge of each client, as stated in the guide.
    assert all(u.samples and u.steps and "loss" in u.metrics for u in seen)
    # No client data remains where it could be read later.
    memories = [made.federation.clients[client] for client in range(5)]
    assert all("unmasked" not in memory for memory in memories)
    assert not list((tmp_path / "run").rglob("updates"))


def test_clients_that_drop_out_are_taken_off_the_sum() -> None:
    class Dropped(FederationCallback):
        def __init__(self) -> None:
            self.numbers: list[float] = []

        def on_round_recorded(self, run: Any, round: int, named: dict[str, float]) -> None:
            self.numbers.append(named["train/secure_sum_dropped"])

    schedule = partial(Synchronous, speeds=LogNormal(), availability=Bernoulli(0.15))
    plain, dropped = fitted(FedAvg(), 4, schedule=schedule()), Dropped()
    masked = fitted(
        FedAvg(), 4, schedule=schedule(), secure_sum=PairwiseMasks(), callbacks=[dropped]
    )
    assert distance(plain, masked) < 1e-5
    assert sum(dropped.numbers) > 0


def test_numbers_out_of_range_in_the_first_round_are_a_wrong_setting(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(FlsuiteError, match=r"^round 1: .* trainer\.secure_sum\.ranges$"):
        fitted(FedAvg(), secure_sum=PairwiseMasks(ranges={"": 1e-3}), run_dir=str(folder))
    assert not folder.exists()


@dataclass(frozen=True)
class Louder(Mean):
    """The mean, with terms that leave their range, from a round on and for some clients."""

    round: int = 1
    clients: tuple[int, ...] = (1, 3)

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        is_loud = update.round >= self.round and update.client in self.clients
        return scaled(super().terms(update, layout), 1e9 if is_loud else 1.0)


@pytest.mark.parametrize(
    ("loud", "message"),
    [
        (Louder(round=1, clients=(1, 2, 4)), "round 1: .* 3 of 5 clients .* client 1:"),
        (Louder(round=2, clients=(0, 1, 2, 3, 4)), "round 2: the contributions of 5 of 5"),
    ],
)
def test_a_sum_without_enough_usable_contributions_names_the_first_fault(
    loud: Rule, message: str
) -> None:
    with pytest.raises(FederationError, match=message):
        fitted(loud, secure_sum=PairwiseMasks(ranges={"": 1e4}))


class Told(FederationCallback):
    """Records the kind of every outcome."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self.arrived: list[int] = []

    def on_client_end(self, run: Any, result: Any) -> None:
        if isinstance(result, ClientFailure):
            self.failed.append(result.client)
        else:
            self.arrived.append(result.update.client)


def test_a_client_out_of_range_is_a_failed_one_in_every_record(tmp_path: Path) -> None:
    told = Told()
    masks = PairwiseMasks(ranges={"": 1e4})
    made = fitted(Louder(), secure_sum=masks, callbacks=[told], run_dir=str(tmp_path))
    assert told.failed == [1, 3] * 2 and told.arrived == [0, 2, 4] * 2
    clock = made.federation.clock
    assert clock.client_updates == 6
    table = pd.read_csv(tmp_path / "metrics.csv")
    shared = table[(table["scope"] == "global") & (table["split"] == "train")]
    totals = shared.groupby("metric")["value"].sum()
    assert totals["failed"] == 4 and totals["clients"] == 6
    assert totals["bytes_up"] + totals["bytes_down"] == clock.bytes
    outcomes = pd.read_csv(tmp_path / "timeline.csv").groupby("outcome")["client"].unique()
    assert sorted(outcomes["failed"]) == [1, 3] and sorted(outcomes["merged"]) == [0, 2, 4]


@pytest.mark.parametrize(
    ("make", "ranges"),
    [(FedAvg, "maxima"), (partial(FedFisher, "kfac", select=False, steps=5), {"": 1e4})],
)
def test_the_virtual_upload_is_that_of_masked_integers_and_shares(
    make: Callable[[], Aggregator], ranges: Any
) -> None:
    speeds = PerSample(seconds_per_sample=0.0, seconds_per_byte_up=1.0)
    schedule, masks = Synchronous(speeds=speeds), PairwiseMasks(ranges=ranges)
    federation = fitted(make(), 1, schedule=schedule, secure_sum=masks).federation
    parameters = sum(value.numel() for value in federation.state.values())
    for update in federation.log.updates:
        assert update.bytes_up == federation.clock.seconds
        assert make is not FedAvg or 0 < update.bytes_up - 4 * parameters < 2000
        assert update.metrics["secure_sum_seconds"] > 0


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (OTFusion, {}, "OTFusion needs each update, but PairwiseMasks"),
        (FedAvg, {"compression": TopK(0.1)}, "TopK needs each update, but PairwiseMasks"),
        (FedBuff, {"schedule": Asynchronous(2, 1)}, "PairwiseMasks needs current models"),
        (FedAvg, {"private": ["network"]}, "PairwiseMasks needs shared parameters"),
    ],
)
def test_what_cannot_be_summed_is_refused(
    make: Callable[[], Aggregator], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        fitted(make(), secure_sum=PairwiseMasks(), **settings)
