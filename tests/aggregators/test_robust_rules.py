"""Robust rules on hand-made updates: breakdown points, limits, order, and other implementations."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from flsuite.aggregators import (
    Aggregator,
    Bucketing,
    CenteredClipping,
    CoordinateMedian,
    FedAvg,
    FLTrust,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
    NormClipping,
    Rule,
    TrimmedMean,
)
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.rules.robust.vectors import Vectors
from flsuite.common.state import State, clone
from tests.aggregators.robust import (
    INF,
    RULES,
    cloud,
    every_rule,
    folded,
    half,
    models,
    numbers,
    sent,
    stale,
    trusting,
)
from tests.aggregators.stale_updates import assert_same_bits, late

# Breakdown points: eleven clients near 1 (or -1), and some that send a million


def worst(rule: Aggregator | Rule, bad: int, total: int = 11, size: float = 1e6) -> float:
    """Return the largest distance of the result from the honest clients' range.

    The attackers send the same large vector of either sign.
    """
    honest = 1 + 0.1 * cloud(total - bad)
    low, high = honest.amin(0), honest.amax(0)
    outside = []
    for sign in (1, -1):
        attack = torch.full((bad, honest.shape[1]), sign * size)
        new = folded(rule, sent(torch.cat([honest, attack])))["w"]
        outside.append(torch.maximum(low - new, new - high).clamp(min=0).max().item())
    return max(outside)


@pytest.mark.parametrize(
    ("make", "withstood"),
    [
        (CoordinateMedian, 5),
        (lambda: TrimmedMean(3), 3),
        (lambda: TrimmedMean(0.3), 3),
        (lambda: Krum(4), 4),
        (lambda: MultiKrum(4), 4),
    ],
    ids=["median", "trim_3", "trim_share", "krum", "multi_krum"],
)
def test_f_attackers_stay_within_the_honest_range(make: Callable[[], Rule], withstood: int) -> None:
    for bad in range(withstood + 1):
        assert worst(make(), bad) == 0


def test_huge_numbers_do_not_overflow() -> None:
    rows = cloud(9)
    rows[[1, 5]] = 3e38
    for make in (CoordinateMedian, lambda: Krum(2), GeometricMedian, NormClipping, TrimmedMean):
        rule = TrimmedMean(2) if make is TrimmedMean else make()
        assert folded(rule, sent(rows))["w"].abs().max() < 1e3


# Limits at which a rule is the plain mean


@pytest.mark.parametrize(
    ("make", "weighting"),
    [
        (lambda: TrimmedMean(0), "uniform"),
        (lambda: TrimmedMean(0.0), "uniform"),
        (lambda: MultiKrum(0, selected=9), "uniform"),
        (lambda: NormClipping(INF), "uniform"),
        (lambda: NormClipping(INF, "samples"), "samples"),
        (lambda: CenteredClipping(INF), "uniform"),
        (lambda: Bucketing(CoordinateMedian(), 9), "uniform"),
        (lambda: Bucketing(TrimmedMean(0), 1), "uniform"),
    ],
)
def test_it_is_fedavg_bit_for_bit(make: Callable[[], Rule], weighting: Any) -> None:
    start, updates = models()
    rule = make()
    new, mean = folded(rule, updates, start), folded(FedAvg(weighting), updates, start)
    assert_same_bits({"w": new["w"]}, {"w": mean["w"]})
    assert new["count"] == mean["count"] == 18
    if isinstance(rule, TrimmedMean | Bucketing):
        assert_same_bits(new, mean)


@every_rule
def test_clients_that_agree_are_the_result(make: Callable[[], Rule]) -> None:
    row = cloud(1)[0]
    new = folded(make(), sent([row.tolist()] * 9), tools=trusting({"w": row}))
    torch.testing.assert_close(new["w"], row, rtol=1e-6, atol=0)


@every_rule
def test_the_order_of_clients_changes_no_bit(make: Callable[[], Rule]) -> None:
    start, updates = models()
    results = []
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(updates)).tolist()
        fresh = [replace(updates[k], metrics={}) for k in order]
        tools = trusting({"w": start["w"] + 0.5})
        results.append((folded(make(), fresh, start, tools), {u.client: u.metrics for u in fresh}))
    for new, metrics in results[1:]:
        assert_same_bits(new, results[0][0])
        assert metrics == results[0][1]


@every_rule
def test_nothing_that_was_given_changes(make: Callable[[], Rule]) -> None:
    start, updates = models()
    before = clone(start), copy.deepcopy(updates)
    server = half(make(), trusting({"w": start["w"] + 0.5}))
    server.aggregate(server.aggregate(start, updates), updates)
    assert_same_bits(start, before[0])
    for now, then in zip(updates, before[1], strict=True):
        assert_same_bits(now.state, then.state)


# Rules against other implementations


def test_the_median_is_numpys() -> None:
    for clients in (1, 2, 7, 8):
        rows = cloud(clients, 9000, seed=clients)
        new = folded(CoordinateMedian(), sent(rows))["w"]
        expected = np.median(rows.double().numpy(), axis=0).astype(np.float32)
        assert np.array_equal(new.numpy(), expected)


def test_the_trimmed_mean_is_scipys() -> None:
    from scipy.stats import trim_mean

    for clients, share in itertools.product((5, 10, 30), (0.1, 0.2, 0.3)):
        rows = cloud(clients, 5000, seed=clients)
        new = folded(TrimmedMean(share), sent(rows))["w"]
        expected = trim_mean(rows.double().numpy(), share + 1e-12, axis=0)
        np.testing.assert_allclose(new.numpy(), expected, rtol=0, atol=1e-6)


def krum_by_hand(rows: Tensor, f: int) -> list[float]:
    """Return Krum's scores by their definition, one distance at a time."""
    n, scores = len(rows), []
    for i in range(n):
        squares = sorted(float((rows[i] - rows[j]).square().sum()) for j in range(n) if j != i)
        scores.append(sum(squares[: n - f - 2]))
    return scores


@pytest.mark.parametrize(("n", "f"), [(3, 0), (5, 1), (9, 2), (9, 3), (12, 4)])
def test_krum_is_its_definition(n: int, f: int) -> None:
    for seed in range(5):
        rows = cloud(n, seed=seed).double()
        updates = [late(k, {"w": row.clone()}) for k, row in enumerate(rows)]
        scores = krum_by_hand(rows, f)
        new = folded(Krum(f), updates)["w"]
        assert torch.equal(new, rows[int(np.argmin(scores))])
        assert [u.metrics["krum_score"] for u in updates] == pytest.approx(scores, rel=1e-9)

        best = np.argsort(scores, kind="stable")[:3].tolist()
        mean = rows[sorted(best)].sum(0) / 3
        torch.testing.assert_close(folded(MultiKrum(f, 3), updates)["w"], mean, rtol=0, atol=1e-15)
        weights = [u.metrics["weight"] for u in updates]
        assert weights == [1 / 3 if k in best else 0.0 for k in range(n)]


def test_equal_scores_go_to_the_lower_client() -> None:
    """With one neighbour each, the two closest have the same score."""
    new = folded(Krum(0), sent([[5.0], [1.0], [1.5]]))
    assert new["w"].item() == 1.0


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_geometric_median_is_the_minimum_that_scipy_finds(weighting: Any) -> None:
    rows, samples = cloud(7, 4, seed=3).double(), [1, 2, 3, 1, 2, 3, 1]
    updates = [late(k, {"w": row.clone()}, samples[k]) for k, row in enumerate(rows)]
    alpha = np.array(samples if weighting == "samples" else [1] * 7, dtype=float)

    def objective(z: np.ndarray) -> float:
        return float((alpha * np.linalg.norm(rows.numpy() - z, axis=1)).sum())

    expected = minimize(objective, rows.mean(0).numpy(), tol=1e-12).x
    rule = GeometricMedian(iterations=1000, tolerance=1e-13, weighting=weighting)
    np.testing.assert_allclose(folded(rule, updates)["w"].numpy(), expected, atol=1e-6)


def test_known_geometric_medians() -> None:
    corners = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    torch.testing.assert_close(folded(GeometricMedian(), sent(corners))["w"], numbers(0.5, 0.5))
    # Three of five clients at one point are the median, which is met.
    rows = [[2.0, 1.0]] * 3 + [[9.0, 9.0], [-50.0, 3.0]]
    new = folded(GeometricMedian(1000), sent(rows))["w"]
    torch.testing.assert_close(new, numbers(2.0, 1.0), rtol=0, atol=1e-4)


def test_norm_clipping_by_hand() -> None:
    updates = sent([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    new = folded(NormClipping(2.0), updates)
    torch.testing.assert_close(new["w"], numbers(1.2, 2.6) / 3)
    assert [u.metrics["clipped"] for u in updates] == [1.0, 0.0, 0.0]
    assert [u.metrics["update_norm"] for u in updates] == pytest.approx([5.0, 1.0, 0.0])
    assert [u.metrics["weight"] for u in updates] == pytest.approx([0.4 / 3, 1 / 3, 1 / 3])
    # Without a radius it is the median of the norms, here 1.
    server = half(NormClipping())
    new = server.aggregate({"w": numbers(0.0, 0.0)}, updates)
    torch.testing.assert_close(new["w"], numbers(0.6, 1.8) / 3)
    assert server.metrics["clip_radius"] == 1.0


def centered_by_hand(v: Tensor, changes: Tensor, radius: float, iterations: int) -> Tensor:
    for _ in range(iterations):
        away = changes - v
        v = v + (away * (radius / away.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
    return v


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("centre", ["previous", "zero"])
def test_centered_clipping_is_its_algorithm_round_after_round(iterations: int, centre: Any) -> None:
    server = half(CenteredClipping(0.7, iterations, centre))
    state = {"w": cloud(1, seed=8)[0].double()}
    v = torch.zeros_like(state["w"])
    for round in range(3):
        changes = cloud(6, seed=round).double()
        updates = [late(k, {"w": state["w"] + change}) for k, change in enumerate(changes)]
        new = server.aggregate(state, updates)
        expected = centered_by_hand(v, changes, 0.7, iterations)
        torch.testing.assert_close(new["w"], state["w"] + expected, rtol=0, atol=1e-12)
        state, v = new, expected if centre == "previous" else v
    assert server.memory["rule"].keys() == ({"centre"} if centre == "previous" else set())


def test_fltrust_by_hand() -> None:
    start = {"w": numbers(1.0, 1.0)}
    changes = [[4.0, 0.0], [0.0, 2.0], [3.0, 3.0], [-1.0, 0.0], [0.0, 0.0]]
    updates = [late(k, {"w": start["w"] + numbers(*c)}) for k, c in enumerate(changes)]
    server = half(FLTrust(), trusting({"w": start["w"] + numbers(2.0, 0.0)}))
    new = server.aggregate(start, updates)["w"]

    # Trust: the cosines with (2, 0), none for the others. Each change is scaled to norm 2.
    diagonal = math.sqrt(0.5)
    expected = numbers(2.0, 0.0) + diagonal * 2 * numbers(diagonal, diagonal)
    expected /= 1 + diagonal
    torch.testing.assert_close(new, start["w"] + expected)
    assert [u.metrics["trust"] for u in updates] == pytest.approx([1.0, 0.0, diagonal, 0.0, 0.0])
    assert updates[0].metrics["weight"] == pytest.approx(0.5 / (1 + diagonal))
    assert server.metrics["server_norm"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1e-3, torch.float32),
        (1e-20, torch.float32),
        (1e-40, torch.float32),
        (1e-200, torch.float64),
    ],
)
def test_a_tiny_change_moves_no_more_than_the_servers_own(size: float, dtype: torch.dtype) -> None:
    start = {"w": torch.tensor([1.0, 1.0, 0.0], dtype=dtype)}
    own = torch.tensor([1.0, 0.0, 0.1], dtype=dtype)
    changes = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, size]], dtype=dtype)
    updates = [late(k, {"w": start["w"] + change}) for k, change in enumerate(changes)]
    new = folded(FLTrust(), updates, start, trusting({"w": start["w"] + own}))["w"]

    # Trust 1 in the direction of (1, 0, 0), and 0.1 in that of (0, 0, 1), each scaled to one norm.
    norm = own.norm()
    trust = [1 / norm, 0.1 / norm if size > 1e-100 else torch.zeros(())]  # below, its norm is 0
    expected = torch.stack([trust[0], torch.zeros(()), trust[1]]) * norm / sum(trust)
    torch.testing.assert_close(new - start["w"], expected.to(dtype))


def test_the_server_trains_from_the_whole_global_model() -> None:
    start, updates = models()
    asked = []

    def train(state: State, round: int) -> State:
        asked.append((clone(state), round))
        return {name: value + 1 for name, value in state.items()}

    folded(FLTrust(), updates, start, ServerTools(train=train), round=5)
    ((state, round),) = asked
    assert_same_bits(state, start)
    assert round == 5


def test_fltrust_without_any_trust_keeps_the_model(caplog: pytest.LogCaptureFixture) -> None:
    start = {"w": numbers(1.0, 1.0)}
    updates = [late(k, {"w": start["w"] - 1.0}) for k in range(3)]
    tools = trusting({"w": start["w"] + 1.0})
    assert_same_bits(folded(FLTrust(), updates, start, tools), start)
    assert "round 1: FLTrust trusts no client" in caplog.text
    # An update whose weights are rounded in another way points nowhere.
    rounded = [late(0, {"w": start["w"] * (1 + torch.finfo(start["w"].dtype).eps)})]
    ahead = trusting({"w": start["w"] + start["w"]})
    assert_same_bits(folded(FLTrust(), rounded, start, ahead), start)
    # A server that has not moved has no direction.
    assert_same_bits(folded(FLTrust(), updates, start, trusting(start)), start)


# Buffers


def test_buffers_take_the_median_and_counters_the_maximum() -> None:
    start, updates = models(5)
    updates[4].state["variance"] = torch.full((5,), 1e6)
    for name in ("krum", "geometric", "norm", "centered", "median"):
        rule = Krum(1) if name == "krum" else RULES[name]()
        new = folded(rule, updates, start)
        rows = torch.stack([u.state["variance"] for u in updates])
        torch.testing.assert_close(new["variance"], rows.median(0).values)
        assert new["count"].item() == 14 and new["count"].dtype == torch.int64


@every_rule
def test_dtypes_and_shapes_are_kept(make: Callable[[], Rule]) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        start, updates = models()
        start["w"] = start["w"].to(dtype)
        for each in updates:
            each.state["w"] = each.state["w"].to(dtype)
        new = folded(make(), updates, start, trusting({"w": start["w"] + 0.5}))
        assert list(new) == list(start)
        assert all(new[k].dtype == v.dtype and new[k].shape == v.shape for k, v in start.items())


def test_a_layer_as_large_as_many_blocks() -> None:
    """A rule on a long vector is the rule on its parts."""
    rows = cloud(5, 10_000)
    whole = Vectors(torch.zeros(10_000), list(rows))
    torch.testing.assert_close(
        whole.gram(), rows.double() @ rows.double().T, rtol=1e-12, atol=1e-10
    )
    torch.testing.assert_close(whole.squared_norms(), rows.double().square().sum(1))
    assert torch.equal(whole.gram(), whole.gram().T)


# Stale updates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_late", [False, True])
def test_without_trimming_it_is_the_mean_bit_for_bit(dtype: torch.dtype, is_late: bool) -> None:
    """Buffers too, and all updates whole: the mean does not damp them."""
    start, updates = stale(dtype)
    if not is_late:
        updates = [replace(each, staleness=0, base={}) for each in updates]
    mean = folded(Mean("uniform", "constant"), updates, start)
    assert_same_bits(folded(TrimmedMean(0), updates, start), mean)
    assert_same_bits(folded(Bucketing(Mean("uniform", "constant"), 9), updates, start), mean)


@every_rule
def test_every_rule_takes_late_clients_as_if_they_had_just_started(
    make: Callable[[], Rule],
) -> None:
    start, updates = stale(torch.float32)
    fresh = []
    for each in updates:
        base, old = each.base or start, each.state
        moved = {name: value + (start[name] - base[name]) for name, value in old.items()}
        least = torch.minimum(old["variance"], start["variance"])
        moved["variance"] = torch.where(moved["variance"] > 0, moved["variance"], least)
        fresh.append(replace(each, state={**moved, "count": old["count"]}, staleness=0, base={}))
    tools = trusting({"w": start["w"] + 0.5})
    assert_same_bits(folded(make(), updates, start, tools), folded(make(), fresh, start, tools))
