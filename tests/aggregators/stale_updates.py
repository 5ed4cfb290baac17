"""Shared helpers for tests of late updates: stale updates, and an asynchronous federation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from flsuite.aggregators import Aggregator
from flsuite.messages import ClientUpdate
from flsuite.state import State
from tests.aggregators.federations import configured, update


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


def settle(
    aggregator: Aggregator,
    curvatures: Sequence[float],
    minima: Sequence[float],
    buffer: int,
    aggregations: int,
    lr: float = 0.05,
    steps: int = 4,
) -> list[float]:
    """Return the global number after each aggregation of an asynchronous federation.

    Client i minimizes ``a_i / 2 (w - m_i)^2`` with ``steps`` steps, whose end is known in closed
    form. All clients train at any time. Each arrives once per cycle, in an order drawn anew, and
    starts again at once from the current version.
    """
    server = configured(aggregator, "w", clients=len(minima))
    state, version, path = numbers(w=0.0), 0, []
    started = dict.fromkeys(range(len(minima)), (state, 0))

    arrivals = _cycles(len(minima))
    waiting: list[ClientUpdate] = []
    while version < aggregations:
        client = next(arrivals)
        base, base_version = started[client]
        kept = (1 - lr * curvatures[client]) ** steps
        trained = {"w": minima[client] + kept * (base["w"] - minima[client])}
        waiting.append(late(client, trained, 1, version - base_version, base))

        if len(waiting) == buffer:
            state, version = server.aggregate(state, iter(waiting)), version + 1
            path.append(float(state["w"]))
            waiting = []
        started[client] = (state, version)
    return path


def _cycles(clients: int) -> Iterator[int]:
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(clients).tolist()
