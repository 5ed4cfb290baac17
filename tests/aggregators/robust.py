"""Shared helpers for tests of robust rules: hand-made updates, and every rule."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite import aggregators as methods
from flsuite.aggregators.part import ServerTools
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State
from tests.aggregators.federations import ServerHalf, configured
from tests.aggregators.stale_updates import late

INF = float("inf")


def numbers(*values: float) -> Tensor:
    return torch.tensor(values)


def sent(rows: Sequence[Sequence[float]] | Tensor, samples: Sequence[int] = ()) -> list[Any]:
    """Return an update per row, whose model is one vector ``w``."""
    counts = samples or [1] * len(rows)
    vectors = torch.as_tensor(rows, dtype=torch.float32)
    return [late(k, {"w": row.clone()}, counts[k]) for k, row in enumerate(vectors)]


def half(
    rule: methods.Aggregator | methods.Rule, tools: ServerTools | None = None, **fields: Any
) -> ServerHalf:
    return configured(rule, "w", clients=9, tools=tools or ServerTools(seed=5), **fields)


def folded(
    rule: methods.Aggregator | methods.Rule,
    updates: Sequence[ClientUpdate],
    start: State | None = None,
    tools: ServerTools | None = None,
    **fields: Any,
) -> State:
    start = {"w": torch.zeros_like(updates[0].state["w"])} if start is None else start
    return half(rule, tools, **fields).aggregate(start, updates)


def cloud(clients: int, size: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed))


def models(clients: int = 9) -> tuple[State, list[ClientUpdate]]:
    """Return a global state with a BatchNorm-like buffer and a counter, and clients' updates."""
    generator = torch.Generator().manual_seed(1)

    def state(count: int) -> State:
        return {
            "w": torch.randn(4, 3, generator=generator),
            "variance": torch.rand(5, generator=generator) + 0.1,
            "count": torch.tensor(count),
        }

    return state(1), [late(k, state(10 + k), k % 4 + 1) for k in range(clients)]


def stale(dtype: torch.dtype, grid: float = 64.0) -> tuple[State, list[ClientUpdate]]:
    """Return the same with every other client late, on a grid, so that no change is rounded."""

    def coarse(state: State) -> State:
        return {
            k: (v * grid).round().to(dtype) / grid if v.is_floating_point() else v
            for k, v in state.items()
        }

    start, updates = models()
    bases = [coarse(each.state) for each in models(20)[1][9:]]
    updates = [replace(each, state=coarse(each.state)) for each in updates]
    for each in updates[::2]:
        each.staleness, each.base = each.client // 4 + 1, bases[each.client]
    return coarse(start), updates


def trusting(trained: State) -> ServerTools:
    return ServerTools(seed=5, train=lambda *_: trained)


RULES: dict[str, Callable[[], methods.Rule]] = {
    "median": methods.CoordinateMedian,
    "trimmed": lambda: methods.TrimmedMean(0.3),
    "krum": lambda: methods.Krum(2),
    "multi_krum": lambda: methods.MultiKrum(2),
    "geometric": methods.GeometricMedian,
    "norm": methods.NormClipping,
    "centered": lambda: methods.CenteredClipping(iterations=2),
    "bucketing": lambda: methods.Bucketing(methods.MultiKrum(1)),
    "fltrust": methods.FLTrust,
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)
