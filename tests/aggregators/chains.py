"""Small chains of Conv2d and Linear layers, permuted copies, and federations that train one."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from flsuite import FederatedTrainer
from flsuite.aggregators import Aggregator
from flsuite.common.state import Layer, State, StateLayout
from flsuite.models import Classifier
from flsuite.models.backbones import CNN
from tests.aggregators.federations import federation
from tests.conftest import digits

CHAINS = ("linear", "conv")
OUTPUTS = 3
SHAPE = (2, 8, 8)


def random_net(
    kind: str, bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Module:
    """Return a network for tables (``linear``) or images (``conv``) with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = (
            nn.Sequential(
                nn.Linear(5, 7, bias),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(7, 6, bias),
                nn.ReLU(),
                nn.Linear(6, OUTPUTS, bias),
            )
            if kind == "linear"
            else nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1, bias=bias),
                nn.MaxPool2d(2),
                nn.ReLU(),
                nn.Conv2d(4, 5, 3, stride=1, bias=bias),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(5 * 4, 6, bias),
                nn.ReLU(),
                nn.Linear(6, OUTPUTS, bias),
            )
        )
        return net.to(dtype).eval()


def image_batch(kind: str, samples: int, seed: int = 0) -> Tensor:
    """Return inputs of such a network."""
    shape = SHAPE if kind == "conv" else (5,)
    return torch.rand(samples, *shape, generator=torch.Generator().manual_seed(seed))


def chain_layout(net: nn.Module, clients: int = 2) -> StateLayout:
    """Return the layout of such a network whose entries are all shared."""
    layers, positions, channels = [], 1, 0
    for name, part in net.named_children():
        if isinstance(part, nn.Conv2d):
            layers.append(Layer(name, "conv2d", part.bias is not None))
            channels = part.out_channels
        elif isinstance(part, nn.Flatten):
            positions = 0
        elif isinstance(part, nn.Linear):
            own = part.in_features // channels if positions == 0 else 1
            layers.append(Layer(name, "linear", part.bias is not None, own))
            positions = 1
    parameters = tuple(name for name, _ in net.named_parameters())
    return StateLayout(parameters, clients, layers=tuple(layers), chain=tuple(layers))


def permuted(state: State, chain: Sequence[Layer], seed: int) -> State:
    """Return the same function with the neurons of each hidden layer in a random order.

    It permutes each column separately, to share no code with the aggregators.
    """
    generator = torch.Generator().manual_seed(seed)
    copy = dict(state)
    for layer, following in pairwise(chain):
        order = torch.randperm(len(copy[layer.weight_name]), generator=generator)
        copy[layer.weight_name] = copy[layer.weight_name][order]
        if layer.bias:
            copy[layer.bias_name] = copy[layer.bias_name][order]
        columns = [c * following.positions + p for c in order for p in range(following.positions)]
        copy[following.weight_name] = copy[following.weight_name][:, columns]
    return copy


def federate(aggregator: Aggregator, rounds: int = 1, **settings: Any) -> FederatedTrainer:
    """Return a federation of three clients that has trained a small CNN on digits."""
    made = federation(aggregator, rounds, max_epochs=1, **settings)
    model = Classifier(CNN(hidden=(16,)), optimizer=partial(SGD, lr=0.05))
    data = digits(3, train_samples=150, server_samples=50)
    made.fit(model, data)
    return made
