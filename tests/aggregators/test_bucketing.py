"""Rules on buckets of clients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from flsuite import FlsuiteError, aggregators as methods
from flsuite.aggregators.part import ClientHalf
from flsuite.aggregators.rules.base import RuleAround
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, divided
from tests.aggregators.federations import run, server_of
from tests.aggregators.robust import RULES, cloud, folded, half, models, sent, stale, trusting
from tests.aggregators.stale_updates import assert_same_bits, late


class Averaging(methods.LinearRule):
    """The mean of a statistic, as the model."""

    def statistics(self, layout: StateLayout, state: State) -> dict[str, methods.Statistic]:
        return {"own": methods.Statistic({"w": state["w"], "number": 0.0})}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        return {"n": update.samples, "own": update.extras["own"]["w"].double() * update.samples}

    def result(self, server: methods.Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        return {**server.state, "w": divided(sums, sums["n"])["own"]}


class Choosing(methods.CohortRule):
    """Takes the model of the client with the largest statistic, which no mean has."""

    def statistics(self, layout: StateLayout, state: State) -> dict[str, methods.Statistic]:
        return {"own": methods.Statistic({"w": state["w"], "number": 0.0}, is_sum=False)}

    def combine(self, server: methods.Server, updates: Iterator[ClientUpdate]) -> State:
        return max(updates, key=lambda update: float(update.extras["own"]["number"])).state


INNER: dict[str, Callable[[], methods.Rule]] = {
    **RULES,
    "mean": methods.Mean,
    "buffer": lambda: methods.Mean("uniform", normalize="weights", rate=0.5),
    "mixing": lambda: methods.Mixing(0.4),
    "mixed_mean": methods.MixedMean,
    "statistics": Averaging,
    "no_sums": Choosing,
}


def with_statistics(updates: Sequence[ClientUpdate]) -> list[ClientUpdate]:
    """Return new updates that send a statistic."""
    rows = cloud(len(updates), 12, seed=4).view(-1, 4, 3)
    extras = [{"own": {"w": row, "number": float(row[0, 0])}} for row in rows]
    return [
        replace(each, extras=own, metrics={}) for each, own in zip(updates, extras, strict=True)
    ]


@pytest.mark.parametrize("name", INNER)
def test_buckets_of_one_client_change_nothing(name: str) -> None:
    start, updates = stale(torch.float32, 1e6)
    results = []
    for rule in (INNER[name](), methods.Bucketing(INNER[name](), 1)):
        sent, tools = with_statistics(updates), trusting({"w": start["w"] + 0.5})
        server = half(rule, tools)
        new = server.aggregate(start, sent)
        metrics = [dict(each.metrics) for each in sent]
        results.append((new, metrics, server.metrics, server.memory["rule"]))
    (new, metrics, of_round, kept), (other, others, of_other, other_kept) = results
    assert_same_bits(new, other)
    assert of_round == of_other and kept.keys() == other_kept.keys()
    for client, (one, two) in enumerate(zip(metrics, others, strict=True)):
        assert two == (one if name == "bucketing" else {**one, "bucket": float(client)})


def test_all_that_a_rule_says_is_said_around_it() -> None:
    """IFCA's clusters under a colluding attack were not sent."""
    said = {name for name in dir(methods.Rule) if not name.startswith("_")} - {"begin", "described"}
    said -= {*vars(ClientHalf)}  # of the rule's half
    assert said <= {*vars(RuleAround)}
    attack = methods.ALittleIsEnough(fraction=0.3)
    assert run(methods.IFCA(2), 1, attack=attack).round == 1


def test_a_mean_of_even_buckets_is_the_mean() -> None:
    updates = sent(cloud(8), samples=[1, 2, 3, 4, 5, 6, 7, 8])
    mean = folded(methods.Mean("uniform"), updates)
    torch.testing.assert_close(folded(methods.Bucketing(methods.Mean("uniform")), updates), mean)
    buckets = folded(methods.Bucketing(methods.Mean(), 2), updates)
    assert not torch.equal(buckets["w"], mean["w"]), "a bucket has the samples of its members"


def test_the_statistics_of_a_bucket_are_the_mean_by_samples() -> None:
    start, updates = models(7)
    updates = with_statistics(updates)
    expected = folded(Averaging(), updates, start)
    for size in (2, 3, 7):
        new = folded(methods.Bucketing(Averaging(), size), updates, start)
        torch.testing.assert_close(new["w"], expected["w"])


def test_a_rule_that_needs_statistics_of_every_client_is_refused_in_buckets() -> None:
    start, _ = models()
    server = server_of(start, StateLayout(("w",), 9))
    methods.Bucketing(Choosing(), 1).prepare(server)
    with pytest.raises(FlsuiteError, match=r"^Bucketing: Choosing needs every client's own"):
        methods.Bucketing(Choosing(), 2).prepare(server)


def test_a_late_bucket_is_as_late_as_its_latest_member() -> None:
    """One bucket of all: its change counts by that staleness."""
    start, updates = stale(torch.float64)
    mean = folded(methods.Mean("uniform", "constant"), updates, start)["w"]
    new = folded(methods.Bucketing(methods.Mean("uniform", "hyperbolic"), 9), updates, start)["w"]
    damped = folded(
        methods.Mean("uniform", "hyperbolic"), [late(0, {**start, "w": mean}, staleness=3)], start
    )["w"]
    torch.testing.assert_close(new, damped, rtol=0, atol=1e-14)


def test_an_attacker_may_claim_any_number_of_classes() -> None:
    updates = sent(cloud(4))
    honest = folded(methods.Bucketing(methods.CoordinateMedian()), updates)
    updates[2].class_counts = torch.arange(7)
    assert_same_bits(folded(methods.Bucketing(methods.CoordinateMedian()), updates), honest)


def test_the_members_of_a_bucket_share_its_numbers() -> None:
    updates = sent(cloud(9))
    folded(methods.Bucketing(methods.MultiKrum(1), 2), updates)
    buckets: dict[float, list[dict[str, float]]] = {}
    for each in updates:
        buckets.setdefault(each.metrics["bucket"], []).append(each.metrics)
    assert sorted(map(len, buckets.values())) == [1, 2, 2, 2, 2]
    assert all(one == other for group in buckets.values() for one in group for other in group)
    assert sum(u.metrics["weight"] for u in updates) == pytest.approx(1.0)
    first = [u.metrics["bucket"] for u in updates]
    again = [replace(u, metrics={}) for u in updates]
    folded(methods.Bucketing(methods.MultiKrum(1), 2), again, round=2)
    assert [u.metrics["bucket"] for u in again] != first, "drawn anew in each round"
