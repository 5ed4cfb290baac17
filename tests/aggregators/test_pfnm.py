"""PFNM against its closed forms, OTFusion's matching, and all assignments of small layers."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flsuite import FlsuiteError
from flsuite.aggregators import PFNM, Aggregator, OTFusion
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.rules.pfnm import (
    _Prior,
    class_weighted_mean,
    gains_of_members,
    gains_of_new_neurons,
    match_neurons,
    posterior_mean,
)
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import Layer, State, StateLayout, clone
from tests.aggregators.chains import (
    CHAINS,
    OUTPUTS,
    chain_layout,
    federate,
    image_batch,
    permuted,
    random_net,
)
from tests.aggregators.federations import ServerHalf, fold, server_of
from tests.conftest import equal_states

PRIOR = _Prior(1.0, 1.0, 7.0)


def update(client: int, state: State, counts: tuple[int, ...] = (1,) * OUTPUTS) -> ClientUpdate:
    return ClientUpdate(client, 1, max(1, sum(counts)), 1, torch.tensor(counts), state)


def fuse(
    net: nn.Module, *updates: ClientUpdate, tools: ServerTools | None = None, **settings: Any
) -> tuple[State, ServerHalf]:
    layout, tools = chain_layout(net, clients=len(updates)), tools or ServerTools()
    made = ServerHalf(PFNM(**settings), layout, tools=tools, artifacts={})
    return made.aggregate(clone(net.state_dict()), iter(updates)), made


def shrunk(state: State, chain: tuple[Layer, ...], factor: Callable[[Tensor], Tensor]) -> State:
    """Return a state with a function applied to all hidden layers."""
    last = (chain[-1].weight_name, chain[-1].bias_name)
    return {k: v if k in last else factor(v.double()).to(v.dtype) for k, v in state.items()}


@pytest.mark.parametrize(("sigma", "sigma0"), [(1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CHAINS)
def test_permuted_copies_give_the_shrunk_first_client(
    kind: str, bias: bool, sigma: float, sigma0: float
) -> None:
    """``M s / (s0 + M s) W`` in the order of the first client, with its outputs unchanged."""
    net = random_net(kind, bias)
    chain, start = chain_layout(net).chain, clone(net.state_dict())
    states = [start, permuted(start, chain, 1), permuted(start, chain, 2)]
    s, s0 = sigma**-2, sigma0**-2

    new, made = fuse(net, *map(update, range(3), states), sigma=sigma, sigma0=sigma0)
    expected = shrunk(start, chain, lambda w: 3 * s * w / (s0 + 3 * s))
    assert equal_states(new, expected)
    assert made.metrics["server_seconds"] > 0 and not made.fields["artifacts"]


@pytest.mark.parametrize("kind", CHAINS)
def test_without_a_prior_two_clients_are_matched_and_averaged_as_by_otfusion(kind: str) -> None:
    """s0 near 0, and the same class counts."""
    nets = [random_net(kind, dtype=torch.float64, seed=seed) for seed in (0, 1)]
    updates = [update(i, clone(net.state_dict()), (2, 1, 3)) for i, net in enumerate(nets)]
    new, _ = fuse(nets[0], *updates, sigma0=1e6)

    layout = chain_layout(nets[0])
    expected = fold(OTFusion(pivot=0), updates[0].state, updates, layout)
    for name, value in expected.items():
        torch.testing.assert_close(new[name], value, rtol=0, atol=1e-9)


def test_outputs_count_by_the_samples_of_their_class() -> None:
    """Class 0 by 3 to 1, class 1 only from the second client, class 2 from none: the plain mean."""
    rows = [torch.tensor([[4.0], [4.0], [4.0]]).double(), torch.tensor([[8.0]] * 3).double()]
    counts = [torch.tensor([3, 0, 0]), torch.tensor([1, 9, 0])]
    assert class_weighted_mean(rows, counts).flatten().tolist() == [5.0, 8.0, 6.0]

    with pytest.raises(FlsuiteError, match="the model has 3 outputs for 2 classes"):
        class_weighted_mean(rows, [torch.ones(2), torch.ones(2)])


def test_the_gains_are_the_expanded_formulas() -> None:
    torch.manual_seed(0)
    rows, sums = torch.randn(3, 5).double(), torch.randn(4, 5).double()
    members, prior = torch.tensor([1.0, 2.0, 10.0, 12.0]).double(), _Prior(2.0, 0.5, 3.0)
    gains = gains_of_members(rows, sums, members, 20, prior)
    new = gains_of_new_neurons(rows, 20, prior)
    for i, v in enumerate(rows):
        for k, g in enumerate(sums):
            q, m = 0.5 + 2.0 * members[k], min(float(members[k]), 10.0)
            by_hand = (2 * v + g).square().sum() / (q + 2) - g.square().sum() / q
            assert gains[i, k] == pytest.approx(float(by_hand) + math.log(m / (20 - m)))
        for t in (1, 2, 3):
            by_hand = (2 * v).square().sum() / 2.5
            expected = float(by_hand) + 2 * math.log(3 / 20) - 2 * math.log(t)
            assert new[i, t - 1] == pytest.approx(expected)


def test_the_matching_of_two_clients_is_the_best_of_all_partial_ones() -> None:
    """Each of three neurons joins one of the first client's or becomes the t-th new one."""
    torch.manual_seed(1)
    rows = [2 * torch.randn(3, 4).double() for _ in range(2)]
    prior = _Prior(1.0, 1.0, 2.0)
    first, second = match_neurons(rows, prior, 0, True, np.random.default_rng(0))

    joined = gains_of_members(rows[1], rows[0], torch.ones(3).double(), 2, prior)
    gains = torch.cat([joined, gains_of_new_neurons(rows[1], 2, prior)], 1)
    best = max(
        permutations(range(6), 3), key=lambda p: sum(float(gains[i, k]) for i, k in enumerate(p))
    )
    assert first.at.tolist() == [0, 1, 2] and second.at.tolist() == list(best)
    assert first.size == second.size == max(2, *best) + 1


@pytest.mark.parametrize(("norm", "width"), [(6.1, 5), (6.3, 1)])
def test_small_rows_of_equal_clients_become_new_neurons(norm: float, width: int) -> None:
    """With five clients, a second match pays from ``|v|^2 = 6.2`` on: the trap of this prior."""
    rows = [torch.tensor([[math.sqrt(norm)]]).double()] * 5
    grown = match_neurons(rows, PRIOR, 0, True, np.random.default_rng(0))
    assert grown[0].size == width
    usual = match_neurons(rows, PRIOR, 5, False, np.random.default_rng(0))
    assert all(place.at.tolist() == [0] and place.size == 1 for place in usual)


def test_sweeps_drop_neurons_without_members_and_keep_the_numbers_dense() -> None:
    torch.manual_seed(0)
    rows = [3 * torch.randn(6, 4).double() for _ in range(4)]
    places = match_neurons(rows, PRIOR, 5, True, np.random.default_rng(0))
    size = places[0].size
    used = torch.cat([place.at for place in places])
    assert 6 <= size <= 24 and sorted(set(used.tolist())) == list(range(size))
    assert all(len(set(place.at.tolist())) == 6 and place.size == size for place in places)

    mean = posterior_mean(rows, places, PRIOR)
    k = int(places[2].at[3])
    members = [
        r[i] for r, place in zip(rows, places, strict=True) for i in range(6) if place.at[i] == k
    ]
    torch.testing.assert_close(mean[k], torch.stack(members).sum(0) / (1 + len(members)))


# The grown network


def holding(net: nn.Module, score: Callable[[nn.Module], float] | None = None) -> ServerTools:
    def module(state: State) -> nn.Module:
        made = copy.deepcopy(net)
        made.load_state_dict(state)
        return made

    return ServerTools(module=module, rounds=1, score_module=score)


@pytest.mark.parametrize("kind", CHAINS)
def test_the_grown_network_stands_beside_the_usual_one(kind: str) -> None:
    net = random_net(kind)
    chain = chain_layout(net).chain
    updates = [update(i, clone(random_net(kind, seed=i).state_dict())) for i in range(3)]
    scored: list[nn.Module] = []

    def score(module: nn.Module) -> float:
        scored.append(module)
        return 0.5

    new, made = fuse(net, *updates, tools=holding(net, score), grow=True)
    usual, _ = fuse(net, *updates)
    assert equal_states(new, usual)

    grown, own = made.fields["artifacts"]["expanded_model"], updates[0].state
    assert scored == [grown] and made.metrics["expanded_model_accuracy"] == 0.5
    assert not grown.training and grown(image_batch(kind, 4)).shape == (4, OUTPUTS)
    for layer in chain[:-1]:
        width = len(grown.get_submodule(layer.name).weight)  # type: ignore[arg-type]
        assert made.metrics[f"width/{layer.name}"] == width
        assert len(own[layer.weight_name]) < width <= 3 * len(own[layer.weight_name])


def test_a_grown_network_of_one_client_is_its_shrunk_network() -> None:
    net = random_net("conv")
    start = clone(net.state_dict())
    new, made = fuse(net, update(0, start), tools=holding(net), grow=True)
    grown = made.fields["artifacts"]["expanded_model"]
    assert equal_states(clone(grown.state_dict()), new)
    assert "expanded_model_accuracy" not in made.metrics


def test_inputs_of_foreign_neurons_are_zero() -> None:
    """Two clients whose neurons have nothing in common: each class reads the owner's neurons."""
    nets = [nn.Sequential(nn.Linear(2, 1, False), nn.ReLU(), nn.Linear(1, 2, False)) for _ in "ab"]
    states = [clone(net.state_dict()) for net in nets]
    states[0]["0.weight"], states[1]["0.weight"] = (
        torch.tensor([[9.0, 0]]),
        torch.tensor([[0, 9.0]]),
    )
    updates = [update(0, states[0], (1, 0)), update(1, states[1], (0, 1))]

    _, made = fuse(nets[0], *updates, tools=holding(nets[0]), grow=True)
    weights = made.fields["artifacts"]["expanded_model"].state_dict()
    assert sorted(weights["0.weight"].tolist()) == [[0.0, 4.5], [4.5, 0.0]]
    foreign = weights["0.weight"][:, 0] == 0
    assert torch.equal(weights["2.weight"][0, foreign], torch.zeros(1))
    assert torch.equal(weights["2.weight"][0, ~foreign], states[0]["2.weight"][0])


def test_in_a_federation_the_grown_network_is_scored() -> None:
    federation = federate(PFNM(grow=True)).federation
    assert federation.server.artifacts["expanded_model"](torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert 0 <= federation.log.server["expanded_model_accuracy"] <= 1
    with pytest.raises(FlsuiteError, match=r"set trainer\.rounds to 1, got 2"):
        federate(PFNM(grow=True), 2)


def test_growing_needs_one_round_and_a_module() -> None:
    net = random_net("linear")
    layout, tools = chain_layout(net), holding(net)
    for rounds, said in [(3, "3"), (None, "null")]:
        server = server_of({}, layout, tools=replace(tools, rounds=rounds))
        with pytest.raises(FlsuiteError, match=f"set trainer.rounds to 1, got {said}"):
            PFNM(grow=True).prepare(server)

    tools = ServerTools(rounds=1, missing={"module": "clients keep the head"})
    with pytest.raises(FlsuiteError, match="rebuilds the network with grow"):
        PFNM(grow=True).prepare(server_of({}, layout, tools=tools))
    PFNM().prepare(server_of({}, layout, tools=ServerTools(rounds=3)))


def test_it_needs_a_chain() -> None:
    reason = "Block is not one nn.Sequential of layers"
    needed = "PFNM needs a chain of Conv2d and Linear, but the model has none"
    server = server_of({}, StateLayout((), 3, no_chain=reason))
    with pytest.raises(FlsuiteError, match=f"{needed}: {reason}"):
        Aggregator(PFNM()).prepare(server)
