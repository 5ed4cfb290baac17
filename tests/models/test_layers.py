"""The layers and the chain that are extracted from a model."""

import pytest
import torch
from torch import nn

from flsuite.common.state import Layer
from flsuite.models.backbones import CNN, MLP, LeNet5, ResNet20
from flsuite.models.layers import read_chain, read_layers


def test_the_layers_of_lenet() -> None:
    network = nn.Module()
    network.net = LeNet5(bias=False).build((1, 28, 28), 10)
    chain, reason = read_chain(network, (1, 28, 28))
    layers, others = read_layers(network, network.state_dict())
    assert chain == (
        Layer("net.0", "conv2d", False),
        Layer("net.3", "conv2d", False),
        Layer("net.7", "linear", False, positions=16),
        Layer("net.9", "linear", False),
        Layer("net.11", "linear", False),
    )
    assert [layer.name for layer in layers] == [layer.name for layer in chain]
    assert (reason, others) == ("", {})


def test_a_flattened_sample_has_no_channels() -> None:
    chain, _ = read_chain(MLP(hidden=(8,)).build((3, 4, 4), 2), (3, 4, 4))
    assert [layer.positions for layer in chain] == [1, 1]
    assert all(layer.bias for layer in chain)


def test_positions_are_those_before_the_flattening() -> None:
    network = CNN(hidden=(16,)).build((3, 12, 16), 5)
    chain, _ = read_chain(network, (3, 12, 16))
    assert [layer.positions for layer in chain] == [1, 1, 3 * 4, 1]
    assert network[7].in_features == 64 * 12


def test_a_nested_sequence_is_one_chain() -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2))
    chain, _ = read_chain(network, (3,))
    assert [layer.name for layer in chain] == ["0.0", "1"]


def test_a_norm_a_branch_and_a_strange_module_are_no_chain() -> None:
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert read_chain(norm, (3,)) == ((), "1 is a BatchNorm1d")
    chain, reason = read_chain(ResNet20().build((3, 32, 32), 10), (3, 32, 32))
    assert chain == ()
    assert "is not one nn.Sequential of layers" in reason
    chain, reason = read_chain(nn.Sequential(nn.Linear(3, 4), nn.Softmax(1)), (3,))
    assert reason == "1 is a Softmax"


def test_reading_a_chain_changes_nothing() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    before, state = network.state_dict(), torch.get_rng_state()
    read_chain(network, (3,))
    assert network.training and network[1].training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize(("module", "what"), [
    (nn.Conv2d(4, 4, 3, groups=2), "Conv2d with groups or another padding"),
    (nn.Conv2d(4, 4, 3, padding="same"), "Conv2d with groups or another padding"),
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), "another padding than zeros"),
    (nn.BatchNorm2d(4), "BatchNorm2d"),
    (nn.Embedding(3, 4), "Embedding"),
])  # fmt: skip
def test_modules_that_are_no_layers_are_named(module: nn.Module, what: str) -> None:
    network = nn.Sequential(module, nn.Linear(3, 2))
    layers, others = read_layers(network, network.state_dict())
    assert [layer.name for layer in layers] == ["1"]
    assert what in others["0"]


def test_shared_weights_and_private_parts_are_no_layers() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    network[1].weight = network[0].weight
    shared = [name for name in network.state_dict() if name != "2.bias"]
    layers, others = read_layers(network, shared)
    assert layers == ()
    assert others == {
        "0": "Linear with shared weights",
        "1": "Linear with shared weights",
        "2": "Linear with a private part",
    }
    assert read_layers(network, ["2.weight", "2.bias"])[0] == (Layer("2", "linear", True),)
