"""OTFusion against permuted copies, whose alignment is known, and FedAvg."""

import re
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsuite import FlsuiteError
from flsuite.aggregators import Aggregator, FedAvg, OTFusion
from flsuite.aggregators.rules.matching import assign, move_inputs
from flsuite.aggregators.rules.otfusion import transport_plan
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import Layer, State, StateLayout, clone
from tests.aggregators.chains import CHAINS, OUTPUTS, chain_layout, permuted, random_net
from tests.aggregators.federations import ServerHalf, fold, server_of, update
from tests.conftest import equal_states


def fuse(net: nn.Module, *updates: ClientUpdate, **settings: Any) -> tuple[State, ServerHalf]:
    made = ServerHalf(OTFusion(**settings), chain_layout(net, clients=len(updates)))
    return made.aggregate(clone(net.state_dict()), iter(updates)), made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CHAINS)
def test_permuted_copies_are_undone_exactly(kind: str, bias: bool) -> None:
    """Convolutions, a Flatten with several positions per channel, and biases move along."""
    net = random_net(kind, bias)
    start = clone(net.state_dict())
    copies = [permuted(start, chain_layout(net).chain, seed) for seed in (1, 2)]
    assert not any(equal_states(start, other) for other in copies)

    updates = [update(0, start, 5), update(1, copies[0], 2), update(2, copies[1], 3)]
    new, made = fuse(net, *updates)
    assert equal_states(new, start)
    assert made.metrics["pivot"] == 0 and made.metrics["server_seconds"] > 0
    assert made.metrics[f"moved/{chain_layout(net).chain[0].name}"] > 0.3


def test_the_last_layer_is_not_permuted() -> None:
    """The classes of a client with shuffled outputs stay where they are."""
    net = random_net("conv")
    start = clone(net.state_dict())
    last = chain_layout(net).chain[-1]
    order = torch.arange(OUTPUTS).roll(1)
    shuffled = start | {name: start[name][order] for name in (last.weight_name, last.bias_name)}
    new, _ = fuse(net, update(0, start, 1), update(1, shuffled, 1))
    assert torch.equal(
        new[last.weight_name], (start[last.weight_name] + shuffled[last.weight_name]) / 2
    )


@pytest.mark.parametrize("kind", CHAINS)
def test_equal_models_and_those_of_one_common_start_give_fedavg(kind: str) -> None:
    net = random_net(kind)
    start = clone(net.state_dict())
    same, _ = fuse(net, *(update(i, start, i + 1) for i in range(3)))
    assert equal_states(same, start)

    torch.manual_seed(5)
    near = [
        update(i, {k: v + 1e-3 * torch.randn_like(v) for k, v in start.items()}, i + 1)
        for i in range(3)
    ]
    new, made = fuse(net, *near)
    assert equal_states(new, fold(FedAvg(), start, near))
    assert all(value == 0 for name, value in made.metrics.items() if name.startswith("moved/"))


def test_the_pivot_is_the_largest_client_or_the_named_one() -> None:
    net = random_net("linear")
    chain = chain_layout(net).chain
    start = clone(net.state_dict())
    states = [start, permuted(start, chain, 1), permuted(start, chain, 2)]
    updates = [
        update(i, state, n) for i, (state, n) in enumerate(zip(states, (2, 5, 5), strict=True))
    ]

    for settings, client in [({}, 1), ({"pivot": 2}, 2), ({"pivot": 0}, 0)]:
        new, made = fuse(net, *updates, **settings)
        assert equal_states(new, states[client]) and made.metrics["pivot"] == client

    # A client that misses the round cannot be its pivot.
    new = fold(OTFusion(pivot=0), start, updates[1:], chain_layout(net, clients=3))
    assert equal_states(new, states[1])


def test_the_plan_of_a_layer_is_the_best_permutation_by_squared_distance() -> None:
    """Compare with all permutations of six neurons with biases."""
    torch.manual_seed(0)
    chain = (Layer("0", "linear", True), Layer("2", "linear", True))
    nets = [nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2)]
    state, pivot = (clone(net.state_dict()) for net in nets)
    own, target = (torch.cat([s["0.weight"], s["0.bias"][:, None]], 1) for s in (state, pivot))

    def cost(places: Tensor) -> float:
        return float((own - target[places]).square().sum())

    best = min((torch.tensor(p) for p in permutations(range(6))), key=cost)
    assert torch.equal(transport_plan(state, pivot, chain)["0"].at, best)


def test_equal_neurons_keep_their_place() -> None:
    """Dead neurons and twins leave the assignment open, and FedAvg has no reason to lose."""
    gains = torch.zeros(5, 5, dtype=torch.float64)
    gains[1, 1] = gains[1, 2] = gains[2, 1] = gains[2, 2] = 3.0
    assert assign(gains).at.tolist() == [0, 1, 2, 3, 4]
    assert gains.diagonal().tolist() == [0, 3, 3, 0, 0]  # the argument is as it was


def test_it_refuses_models_without_a_chain_and_clients_that_do_not_exist() -> None:
    reason = "Block has a skip connection (network.1)"
    layout = StateLayout((), 3, no_chain=reason)
    with pytest.raises(FlsuiteError, match=re.escape(f"but the model has none: {reason}")):
        Aggregator(OTFusion()).prepare(server_of({}, layout))

    layout = replace(chain_layout(random_net("linear")), clients=3)
    with pytest.raises(FlsuiteError, match="below the number of clients, 3, got 3"):
        OTFusion(pivot=3).prepare(server_of({}, layout))


def test_a_layer_that_reads_a_part_of_the_layer_before_is_named() -> None:
    layer = Layer("network.3", "conv2d", False)
    with pytest.raises(FlsuiteError, match=r"network\.3 reads 2 columns"):
        move_inputs(torch.zeros(4, 2, 3, 3), layer, assign(torch.eye(4, dtype=torch.float64)))
