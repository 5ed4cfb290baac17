"""Compression between clients and server, in whole federations."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import SCAFFOLD, Aggregator, Centralized, FedAvg, FedBuff, LocalOnly
from flsuite.data import Dirichlet, Synthetic
from flsuite.engines import InProcess, Processes
from flsuite.exchange import Compression, Quantize, TopK
from flsuite.models import MLP, Classifier
from flsuite.schedules import Asynchronous, Schedule, Stragglers
from flsuite.state import nbytes


def federation(
    aggregator: Aggregator, compression: Compression | None, rounds: int = 3, **kwargs: object
) -> FederatedTrainer:
    trainer = FederatedTrainer(
        rounds,
        aggregator,
        compression=compression,
        accelerator="cpu",
        enable_progress_bar=False,
        **{"seed": 3, "enable_checkpointing": False, **kwargs},
    )
    data = Synthetic(features=6, classes=3, clients=4, partition=Dirichlet(0.5), batch_size=16)
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer.fit(Classifier(MLP(hidden=(8,)), optimizer=sgd), data, ckpt_path=None)
    return trainer


def distance(a: FederatedTrainer, b: FederatedTrainer) -> float:
    return max(float((a.run.state[k] - b.run.state[k]).abs().max()) for k in a.run.state)


@pytest.mark.parametrize("make", [FedAvg, SCAFFOLD, FedBuff])
def test_a_compression_without_loss_changes_nothing(make: Callable[[], Aggregator]) -> None:
    assert distance(federation(make(), TopK(1.0)), federation(make(), None)) == 0.0


@pytest.mark.parametrize("make", [FedAvg, SCAFFOLD, FedBuff])
def test_sixteen_bits_come_close_with_half_the_bytes(make: Callable[[], Aggregator]) -> None:
    whole, packed = federation(make(), None), federation(make(), Quantize(16))
    assert 0.0 < distance(whole, packed) < 1e-3
    sent, of_packed = (sum(u.bytes_up for u in t.federation.log.updates) for t in (whole, packed))
    assert 0.45 * sent < of_packed < 0.65 * sent


def test_error_feedback_carries_on_over_a_resume(tmp_path: Path) -> None:
    whole = federation(FedAvg(), TopK(0.1), 4)
    folder = {"run_dir": str(tmp_path / "run"), "enable_checkpointing": True}
    federation(FedAvg(), TopK(0.1), 2, **folder)
    resumed = FederatedTrainer(
        4,
        FedAvg(),
        compression=TopK(0.1),
        accelerator="cpu",
        seed=3,
        **folder,
        enable_progress_bar=False,
    )
    data = Synthetic(features=6, classes=3, clients=4, partition=Dirichlet(0.5), batch_size=16)
    sgd = partial(torch.optim.SGD, lr=0.1)
    resumed.fit(Classifier(MLP(hidden=(8,)), optimizer=sgd), data, ckpt_path="last")
    assert distance(whole, resumed) == 0.0


def test_workers_give_the_same_weights() -> None:
    here = federation(FedAvg(), TopK(0.2), engine=InProcess())
    there = federation(FedAvg(), TopK(0.2), engine=Processes(workers=2))
    assert distance(here, there) == 0.0


def test_stale_updates_are_changes_of_the_version_that_they_started_from() -> None:
    schedule: Callable[[], Schedule] = partial(
        Asynchronous, concurrency=3, buffer_size=1, speeds=Stragglers(0.5)
    )
    whole = federation(FedBuff(), None, 8, schedule=schedule())
    packed = federation(FedBuff(), TopK(1.0), 8, schedule=schedule())
    assert distance(whole, packed) == 0.0


def test_the_bytes_are_those_of_the_message() -> None:
    trainer = federation(FedAvg(), Quantize(8), 1)
    parameters = sum(v.numel() for v in trainer.run.state.values())
    (sent,) = {u.bytes_up for u in trainer.federation.log.updates}
    # One byte per parameter, and a scale per tensor.
    assert sent == parameters + 4 * len(trainer.run.state)
    assert sent < nbytes(trainer.run.state) / 3


def test_a_message_that_cannot_be_read_costs_the_round_its_client() -> None:
    class Garbled(Quantize):
        def encode(self, *args: object) -> object:  # type: ignore[override]
            message, numbers = super().encode(*args)  # type: ignore[arg-type]
            message["state"].pop(next(iter(message["state"])))
            return message, numbers

    with pytest.raises(Exception, match="state lacks network"):
        federation(FedAvg(), Garbled(), 1)


@pytest.mark.parametrize(("make", "message"), [
    (Centralized, "trains on pooled data"),
    (LocalOnly, "send nothing"),
])  # fmt: skip
def test_algorithms_that_send_nothing_are_refused(
    make: Callable[[], Aggregator], message: str
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        federation(make(), Quantize())


def test_models_are_not_kept_where_the_server_sees_others(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=r"set trainer.keep_updates to false"):
        federation(FedAvg(), Quantize(), keep_updates=True, run_dir=str(tmp_path / "run"),
                   enable_checkpointing=True)  # fmt: skip
