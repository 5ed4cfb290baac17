"""Algorithms that would silently change, or fail without a reason, are refused in one line."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from flsuite import FlsuiteError, aggregators as methods
from flsuite.aggregators import FitView, PairwiseMasks, Payload, Quantize, TopK
from flsuite.aggregators.part import Statistic
from flsuite.common.errors import FederationError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout
from flsuite.federation import Synchronous
from tests.aggregators.federations import run


class Tenfold(methods.Transform):
    """The server multiplies what it reads by ten."""

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        return payload._replace(change={k: v / 10 for k, v in payload.change.items()})

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        return payload._replace(change={k: v * 10 for k, v in payload.change.items()})


class Shortens(methods.Transform):
    """Clients change a bias to one number, or forget it."""

    def __init__(self, forgets: bool) -> None:
        self.forgets = forgets

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        change = dict(payload.change)
        own = change.pop("network.0.bias")
        return payload._replace(
            change=change if self.forgets else {**change, "network.0.bias": own[:1]}
        )


class Measures(methods.Transform):
    """Clients send the size of their change."""

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        size = torch.stack([v.norm() for v in payload.change.values()]).norm()
        return payload._replace(statistics={**payload.statistics, "size": size})

    def template(self, template: Payload) -> Payload:
        return template._replace(
            statistics={**template.statistics, "size": torch.zeros(()).double()}
        )


class Sends(methods.Objective):
    """Clients send a number that they measure."""

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return {"measured": Statistic(torch.zeros(()))}


class Incomplete(methods.CohortRule):
    """A rule that forgets an entry, or everything."""

    def __init__(self, returns_none: bool) -> None:
        self.returns_none = returns_none

    def combine(self, server: methods.Server, updates: Iterator[ClientUpdate]) -> Any:
        state = dict(next(updates).state)
        del state[next(iter(state))]
        return None if self.returns_none else state


class Matrices(SGD):
    """Like torch.optim.Muon, which accepts only matrices."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("only 2D parameters")


private = partial(methods.DPFedAvg, noise_multiplier=1.0, delta=1e-5)


def test_a_change_must_not_grow_after_a_mechanism_has_clipped_it() -> None:
    with pytest.raises(FlsuiteError, match=r"GaussianMechanism needs dense changes"):
        run(private(transforms=[Tenfold()]), batchnorm="local")
    run(private(transforms=[methods.ClipUpdates(2.0)]), rounds=1, batchnorm="local")


def test_a_mechanism_refuses_what_no_noise_covers() -> None:
    with pytest.raises(FlsuiteError, match="send measured with their change"):
        run(private(objective=Sends()), batchnorm="local")
    with pytest.raises(FlsuiteError, match=r"needs only changes, but Measures sends more"):
        run(private(transforms=[Measures()]), batchnorm="local")
    run(methods.FedAvg(transforms=[Measures()]), rounds=1)


def test_a_private_entry_that_is_nowhere_is_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"trainer\.aggregator\.private: 'head'"):
        run(methods.FedAvg(private=["head"]))


def test_pooled_data_has_nobody_to_mask() -> None:
    with pytest.raises(FlsuiteError, match="PairwiseMasks needs clients"):
        run(methods.Centralized(), secure_sum=PairwiseMasks())


@pytest.mark.parametrize(
    ("optimizer", "reason"), [(Matrices, "only 2D parameters"), (partial(SGD, lr=-1.0), "-1.0")]
)
def test_a_server_optimizer_that_refuses_the_model(optimizer: type[Optimizer], reason: str) -> None:
    with pytest.raises(FlsuiteError, match=rf"server_optimizer refuses .*{reason}"):
        run(methods.FedAvg(server_optimizer=optimizer))


@pytest.mark.parametrize(("returns_none", "fault"), [(True, "a NoneType"), (False, "it has no")])
def test_a_rule_that_returns_no_whole_model(returns_none: bool, fault: str) -> None:
    with pytest.raises(FederationError, match=f"round 1: Incomplete returned .*{fault}"):
        run(methods.Aggregator(Incomplete(returns_none)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: methods.FedAvg("uniform", rule=methods.Krum(1)),
        lambda: methods.FedAvg(staleness="constant", rule=methods.CoordinateMedian()),
        lambda: methods.SCAFFOLD(weighting="samples", rule=methods.CoordinateMedian()),
        lambda: methods.SCAFFOLD(lr=0.5, server_optimizer=partial(SGD, lr=1.0)),
        lambda: methods.FedBuff("mix", eta=2.0),
    ],
)
def test_an_argument_that_would_do_nothing_is_refused(make: Any) -> None:
    with pytest.raises(FlsuiteError, match=r"^\w+: .*(weighting|lr|eta)"):
        make()
    methods.SCAFFOLD(rule=methods.CoordinateMedian())


def test_a_second_mechanism_is_refused() -> None:
    mechanism = methods.GaussianMechanism(1.0, noise_multiplier=1.0, delta=1e-5)
    with pytest.raises(FlsuiteError, match=r"GaussianMechanism adds noise .*; change \S+$"):
        run(private(transforms=[mechanism]), batchnorm="local", schedule=Synchronous(3))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), None])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    class Weighs(methods.Mean):
        def weight(self, update: ClientUpdate) -> float:
            return weight

    with pytest.raises(FlsuiteError, match="Weighs: the weight of client 0"):
        run(methods.Aggregator(Weighs()))


def test_a_change_that_cannot_be_decoded_is_a_failure_of_the_client() -> None:
    class Forgets(Tenfold):
        def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
            raise KeyError("scale")

    with pytest.raises(FederationError, match=r"cannot be read .*scale"):
        run(methods.Aggregator(transforms=[Forgets()]))


def test_a_conflict_names_the_key_that_was_set() -> None:
    with pytest.raises(FlsuiteError, match=r"TopK .*trainer\.compression"):
        run(methods.Aggregator(transforms=[Quantize(8)]), compression=TopK(0.5))


@pytest.mark.parametrize(
    "make",
    [
        methods.FedAvg,
        methods.FedNova,
        methods.IFCA,
        methods.FedProto,
        lambda: methods.Aggregator(methods.Bucketing(methods.Mean())),
    ],
    ids=["FedAvg", "FedNova", "IFCA", "FedProto", "a rule in a rule"],
)
def test_cohorts_and_weights_by_size_count_size_twice(make: Any) -> None:
    with pytest.raises(FlsuiteError, match=r"needs equal chances, .* size twice; .*weighting or"):
        run(make(), schedule=Synchronous(2, sampling="size"))


@pytest.mark.parametrize(
    ("aggregator", "number"),
    [(methods.FedAvg("uniform"), 2), (methods.FedAvg(), 4), (methods.LocalOnly(), 2)],
)
def test_size_counts_once(aggregator: methods.Aggregator, number: int) -> None:
    """A cohort of all four clients does not depend on sizes, and LocalOnly averages nothing."""
    assert run(aggregator, 1, schedule=Synchronous(number, sampling="size")).round == 1


@pytest.mark.parametrize("forgets", [False, True])
def test_a_transform_that_returns_another_shape_is_refused(forgets: bool) -> None:
    """A single number would be added to every weight."""
    with pytest.raises(FlsuiteError, match=r"wrong change of network\.0\.bias.*return every entry"):
        run(methods.FedAvg(transforms=[Shortens(forgets)]), 1)
