"""Whole runs with compressed updates, for algorithms that use them in different ways."""

from typing import Any

import pytest
import torch

from flsuite.aggregators import SCAFFOLD, FedAvg, FedBuff
from flsuite.exchange import Compression, Quantize, TopK
from flsuite.schedules import Asynchronous
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits

RUNS = {
    "FedAvg": (FedAvg, None),
    "SCAFFOLD": (SCAFFOLD, None),
    "FedBuff": (FedBuff, lambda: Asynchronous(concurrency=3, buffer_size=2)),
}


def run(name: str, compression: Compression | None, **arguments: Any) -> FederatedTrainer:
    aggregator, schedule = RUNS[name]
    if schedule is not None:
        arguments["schedule"] = schedule()
    trainer = FederatedTrainer(
        3,
        aggregator(),
        compression=compression,
        accelerator="cpu",
        seed=3,
        evaluate_every=1000,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **arguments,
    )
    trainer.fit(classifier(), digits())
    return trainer


@pytest.mark.parametrize("name", RUNS)
def test_all_entries_of_top_k_are_no_compression_bit_for_bit(name: str) -> None:
    state, whole = (run(name, c).federation.state for c in (None, TopK(1.0)))
    assert all(torch.equal(state[entry], whole[entry]) for entry in state)


@pytest.mark.parametrize("name", RUNS)
def test_sixteen_bits_stay_close_and_take_half_the_bytes_up(name: str) -> None:
    plain, short = run(name, None), run(name, Quantize(16))
    for entry, value in plain.federation.state.items():
        assert torch.allclose(value, short.federation.state[entry], atol=2e-3)

    up = [t.federation.log.updates[0].bytes_up for t in (plain, short)]
    assert 0.5 < up[1] / up[0] < 0.52


def test_what_a_client_left_out_travels_in_a_later_round() -> None:
    """With a residual, a hundredth of the entries per round moves other entries every time."""
    trainer = run("FedAvg", TopK(0.01))
    assert trainer.federation is not None
    notes = [dict(trainer.federation.clients[client]) for client in range(trainer.run.clients)]
    residuals = [torch.cat([v.flatten() for v in _tensors(note)]) for note in notes]
    assert all(residual.abs().sum() > 0 for residual in residuals)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else ()
    return [tensor for value in values for tensor in _tensors(value)]
