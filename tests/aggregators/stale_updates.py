"""Shared helpers for tests of late updates."""

from dataclasses import replace

import torch

from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State
from tests.aggregators.federations import update


def late(
    client: int, state: State, samples: int = 1, staleness: int = 0, base: State | None = None
) -> ClientUpdate:
    """Return the update of a client that started from ``base``, ``staleness`` versions ago."""
    return replace(update(client, state, samples), staleness=staleness, base=base or {})


def numbers(**values: float) -> State:
    """Return a state of one number per entry, in float64."""
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}


def random_states(count: int, entries: int = 1000, seed: int = 0) -> list[State]:
    """Return states with a parameter, a BatchNorm-like buffer and a counter, float32 and int64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "w": torch.randn(entries, 3, generator=generator),
            "mean": torch.randn(entries, generator=generator) * 1e3,
            "count": torch.tensor(10 + i),
        }
        for i in range(count)
    ]


def assert_same_bits(a: State, b: State) -> None:
    """Compare bit for bit, including the signs of zeros."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].numpy().tobytes() == b[name].numpy().tobytes(), name
