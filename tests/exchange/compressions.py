"""What the tests of compressions share: an algorithm, a model's shapes and their messages."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators import Aggregator
from flsuite.messages import ClientUpdate
from flsuite.models.backbones import CNN, LeNet5
from flsuite.models.backbones.base import Backbone
from flsuite.state import State, StateLayout

LENET = LeNet5(bias=False), (1, 28, 28)
NARROW_CNN = CNN(bias=False, hidden=(512, 128), padding=False), (3, 32, 32)


class Sends(Aggregator):
    """An algorithm that sends extras. Those in ``psd_extras`` are matrices."""

    def __init__(self, psd_extras: tuple[str, ...] = ()) -> None:
        self.psd_extras = psd_extras

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        return global_state


def state_of(backbone: Backbone, shape: tuple[int, ...]) -> State:
    """Return the initial weights of a network with ten outputs."""
    torch.manual_seed(0)
    return {name: value.clone() for name, value in backbone.build(shape, 10).state_dict().items()}


def factors_of(state: State) -> dict[str, dict[str, Tensor]]:
    """Return K-FAC factors of a network without biases, of full rank."""
    generator = torch.Generator().manual_seed(1)
    factors: dict[str, dict[str, Tensor]] = {}
    for name, weight in state.items():
        rows, columns = weight.flatten(1).shape
        factors[name.removesuffix(".weight")] = {
            "a": psd(columns, generator),
            "g": psd(rows, generator),
        }
    return factors


def psd(side: int, generator: torch.Generator) -> Tensor:
    """Return a random covariance matrix, float32."""
    rows = torch.randn(side + 5, side, generator=generator) * torch.linspace(0.1, 2, side)
    return rows.T @ rows / len(rows)


def configured(
    compression: Any,
    state: State,
    extras: dict[str, Any] | None = None,
    psd_extras: tuple[str, ...] = (),
    parameters: tuple[str, ...] | None = None,
) -> Any:
    """Return the compression, prepared for an algorithm that sends these extras."""
    aggregator = Sends(psd_extras)
    aggregator.configure(StateLayout(tuple(state) if parameters is None else parameters, 5))
    compression.configure(aggregator, state, extras or {})
    return compression


def assert_same(got: Any, expected: Any) -> None:
    """Check that nested data is the same, bit for bit, in the same order."""
    if isinstance(expected, Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for name in expected:
            assert_same(got[name], expected[name])
    else:
        assert got == expected
