"""Secure sums in whole federations: what the aggregator sees, and what comes out."""

from collections.abc import Callable, Sequence
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
    FedAvgM,
    FedBuff,
    FedFisher,
    FedProx,
    OTFusion,
    RegMean,
)
from flsuite.callbacks import FederationCallback
from flsuite.data import Digits, Dirichlet
from flsuite.engines import Processes
from flsuite.exchange import PairwiseMasks, Quantize
from flsuite.messages import ClientFailure, ClientUpdate
from flsuite.models import MLP, Classifier
from flsuite.schedules import Asynchronous, Bernoulli, LogNormal, PerSample, Synchronous
from flsuite.state import State, nbytes


def fitted(aggregator: Aggregator, rounds: int | None = 2, **kwargs: Any) -> FederatedTrainer:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    private = kwargs.pop("private", ())
    model = Classifier(MLP(hidden=(16,)), optimizer=optimizer, private=private)
    trainer = FederatedTrainer(
        rounds, aggregator, accelerator="cpu", enable_progress_bar=False,
        **{"seed": 1, "enable_checkpointing": False, **kwargs},
    )  # fmt: skip
    data = Digits(clients=5, partition=Dirichlet(0.5), batch_size=32, server_samples=50)
    trainer.fit(model, data, ckpt_path="last" if kwargs.get("run_dir") else None)
    return trainer


def distance(a: FederatedTrainer, b: FederatedTrainer) -> float:
    return max(float((a.run.state[k] - b.run.state[k]).abs().max()) for k in a.run.state)


EVERY = [
    FedAvg,
    partial(FedAvg, "uniform"),
    partial(FedProx, mu=0.1),
    partial(FedFisher, "diag", select=False),
    partial(FedFisher, "kfac", select=False, steps=5),
]


@pytest.mark.parametrize("make", EVERY)
def test_the_masked_sum_leads_to_the_model_of_the_plain_one(make: Callable[[], Aggregator]) -> None:
    assert 0.0 <= distance(fitted(make()), fitted(make(), secure_sum=PairwiseMasks())) < 2e-4


def test_results_depend_on_neither_the_keys_nor_the_engine() -> None:
    once = fitted(FedAvg(), secure_sum=PairwiseMasks())
    again = fitted(FedAvg(), secure_sum=PairwiseMasks())
    there = fitted(FedAvg(), secure_sum=PairwiseMasks(), engine=Processes(workers=2))
    assert distance(once, again) == distance(once, there) == 0.0


class Watched(FedAvg):
    """FedAvg that keeps all that its server half is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ClientUpdate] = []

    def aggregate(self, *args: Any) -> State:
        raise AssertionError("the server half must not see single updates")

    def summands(self, update: ClientUpdate) -> State:
        return super().summands(update)

    def from_sums(self, global_state: State, sums: State, updates: Sequence[ClientUpdate]) -> State:
        self.seen += updates
        # The resident model, on which clients train in this process, is no client's any more.
        module = self.tools.module({})
        assert all(torch.equal(module.state_dict()[k], v) for k, v in global_state.items())
        return super().from_sums(global_state, sums, updates)


def test_the_aggregator_sees_sums_and_no_client(tmp_path: Path) -> None:
    aggregator = Watched()
    trainer = fitted(aggregator, secure_sum=PairwiseMasks(), run_dir=str(tmp_path / "run"),
                     enable_checkpointing=True)  # fmt: skip
    assert len(aggregator.seen) == 10
    assert all(not update.state and not update.extras for update in aggregator.seen)
    assert all(len(update.class_counts) == 0 for update in aggregator.seen)
    # What the guide says that the server knows of each client.
    assert all(u.samples and u.steps and "loss" in u.metrics for u in aggregator.seen)
    # Nothing of a client is kept where it could be read later.
    memories = [trainer.federation.clients[client] for client in range(5)]
    assert all("summands" not in memory for memory in memories)
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


def test_too_few_clients_fail_in_words() -> None:
    schedule = Synchronous(speeds=LogNormal(), availability=Bernoulli(0.7))
    with pytest.raises(FederationError, match=r"secure sum: .* are needed"):
        fitted(FedAvg(), 6, schedule=schedule, secure_sum=PairwiseMasks(threshold=4))


def test_numbers_out_of_range_in_the_first_round_are_a_wrong_setting(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    message = (
        r"round 1: the summands of 5 of 5 clients cannot be masked, client \d: summand .* "
        r"outside its range of 0\.001; raise it in trainer\.secure_sum\.ranges$"
    )
    with pytest.raises(FlsuiteError, match=message):
        fitted(FedAvg(), secure_sum=PairwiseMasks(ranges={"": 1e-3}), run_dir=str(folder),
               enable_checkpointing=True)  # fmt: skip
    assert not folder.exists()


class Louder(FedAvg):
    """FedAvg whose summands leave their range, from a round on and for some of the clients."""

    def __init__(self, round: int, clients: tuple[int, ...]) -> None:
        super().__init__()
        self.round, self.clients = round, clients

    def summands(self, update: ClientUpdate) -> State:
        is_loud = update.round >= self.round and update.client in self.clients
        scale = 1e9 if is_loud else 1.0
        return {name: value * scale for name, value in super().summands(update).items()}

    def from_sums(self, *args: Any) -> State:
        return super().from_sums(*args)


@pytest.mark.parametrize(
    ("loud", "message"),
    [
        (
            Louder(1, (1, 2, 4)),
            "round 1: .* 3 of 5 clients .* client 1: .* round 0 is kept",
        ),
        (Louder(2, (0, 1, 2, 3, 4)), "round 2: the summands of 5 of 5 .* of round 1 is kept"),
    ],
)
def test_a_sum_without_enough_usable_summands_names_the_first_fault(
    loud: FedAvg, message: str
) -> None:
    with pytest.raises(FederationError, match=message):
        fitted(loud, secure_sum=PairwiseMasks(ranges={"": 1e4}))


def test_a_number_out_of_range_costs_the_round_its_client() -> None:
    trainer = fitted(Louder(1, (1,)), secure_sum=PairwiseMasks(ranges={"": 1e4}))
    assert [failure.client for failure in trainer.federation.log.failures] == [1]


class Told(FederationCallback):
    """Notes the kind of every outcome."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self.arrived: list[int] = []

    def on_client_end(self, run: Any, result: Any) -> None:
        if isinstance(result, ClientFailure):
            self.failed.append(result.client)
        else:
            self.arrived.append(result.update.client)


class LouderFisher(Louder, FedFisher):
    """FedFisher whose curvature travels in the clear, beside summands that leave their range."""

    def __init__(self) -> None:
        Louder.__init__(self, 1, (1, 3))
        FedFisher.__init__(self, "kfac", select=False, steps=5)


def test_a_client_out_of_range_is_a_failed_one_in_every_record(tmp_path: Path) -> None:
    told = Told()
    trainer = fitted(
        Louder(1, (1, 3)), 2, secure_sum=PairwiseMasks(ranges={"": 1e4}), callbacks=[told],
        run_dir=str(tmp_path), enable_checkpointing=True,
    )  # fmt: skip
    assert told.failed == [1, 3] * 2 and told.arrived == [0, 2, 4] * 2
    clock = trainer.run.clock
    assert clock.client_updates == 6
    table = pd.read_csv(tmp_path / "metrics.csv")
    shared = table[(table["scope"] == "global") & (table["split"] == "train")]
    totals = shared.groupby("metric")["value"].sum()
    assert totals["failed"] == 4 and totals["clients"] == 6
    assert totals["bytes_up"] + totals["bytes_down"] == clock.bytes
    outcomes = pd.read_csv(tmp_path / "timeline.csv").groupby("outcome")["client"].unique()
    assert sorted(outcomes["failed"]) == [1, 3] and sorted(outcomes["merged"]) == [0, 2, 4]


def test_what_a_client_out_of_range_has_sent_in_the_clear_counts() -> None:
    trainer = fitted(LouderFisher(), 1, secure_sum=PairwiseMasks(ranges={"": 1e4}))
    federation = trainer.run.federation
    factors = nbytes(federation.aggregator.expected_extras(federation.state)["fisher"])
    # Of the two clients, and the rest are keys and shares.
    assert 2 * factors < federation.log.lost_up < 2 * factors + 2000


def test_the_budget_of_updates_counts_those_that_are_used() -> None:
    trainer = fitted(
        Louder(1, (1, 3)), None, max_client_updates=7,
        secure_sum=PairwiseMasks(ranges={"": 1e4}),
    )  # fmt: skip
    assert trainer.round == 3


def test_the_bytes_are_those_of_masked_integers_and_shares() -> None:
    trainer = fitted(FedAvg(), 1, secure_sum=PairwiseMasks())
    parameters = sum(value.numel() for value in trainer.run.state.values())
    for update in trainer.federation.log.updates:
        assert 4 * parameters < update.bytes_up < 4 * parameters + 2000
        assert update.metrics["secure_sum_seconds"] > 0
    sent = sum(u.bytes_up + u.bytes_down for u in trainer.federation.log.updates)
    assert trainer.run.clock.bytes == sent


@pytest.mark.parametrize("ranges", ["maxima", {"": 1e4}])
@pytest.mark.parametrize("make", [FedAvg, partial(FedFisher, "kfac", select=False, steps=5)])
def test_the_virtual_upload_is_that_of_the_protocol(
    make: Callable[[], Aggregator], ranges: Any
) -> None:
    speeds = PerSample(seconds_per_sample=0.0, seconds_per_byte_up=1.0)
    schedule, masks = Synchronous(speeds=speeds), PairwiseMasks(ranges=ranges)
    trainer = fitted(make(), 1, schedule=schedule, secure_sum=masks)
    for update in trainer.federation.log.updates:
        assert update.bytes_up == trainer.run.clock.seconds


@pytest.mark.parametrize("make", [SCAFFOLD, FedAvgM, OTFusion, partial(FedFisher, "full")])
def test_algorithms_that_need_single_updates_are_refused(make: Callable[[], Aggregator]) -> None:
    if isinstance(made := make(), FedFisher):
        assert distance(fitted(made), fitted(make(), secure_sum=PairwiseMasks())) < 1e-2
        return
    with pytest.raises(FlsuiteError, match="needs every client's own update"):
        fitted(made, secure_sum=PairwiseMasks())


@pytest.mark.parametrize("make", [FedAvg, FedFisher, partial(RegMean, alpha=0.5)])
def test_clients_with_nothing_to_sum_are_refused(make: Callable[[], Aggregator]) -> None:
    with pytest.raises(FlsuiteError, match=r"send nothing to sum; leave out trainer.secure_sum"):
        fitted(make(), secure_sum=PairwiseMasks(), private=("network",))


def test_compression_and_asynchronous_schedules_are_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"leave out trainer.compression or"):
        fitted(FedAvg(), secure_sum=PairwiseMasks(), compression=Quantize(16))
    with pytest.raises(FlsuiteError, match=r"need a cohort that trains together|own update"):
        fitted(FedBuff(), secure_sum=PairwiseMasks(), schedule=Asynchronous(2, 1))


def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path: Path) -> None:
    folder = {"run_dir": str(tmp_path / "run"), "enable_checkpointing": True}
    whole = fitted(FedAvg(), 3, secure_sum=PairwiseMasks())
    fitted(FedAvg(), 1, secure_sum=PairwiseMasks(), **folder)
    assert distance(whole, fitted(FedAvg(), 3, secure_sum=PairwiseMasks(), **folder)) == 0.0
