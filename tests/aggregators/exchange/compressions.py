"""Shared helpers of the codec tests: a model's shapes, and the path of a payload."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.common.state import State, mismatch, nbytes, template_of
from flsuite.models.backbones import CNN, LeNet5
from flsuite.models.backbones.base import Backbone

LENET = LeNet5(bias=False), (1, 28, 28)
NARROW_CNN = CNN(bias=False, hidden=(512, 128), padding=False), (3, 32, 32)


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


def payload_of(
    change: State, statistics: Mapping[str, Any] | None = None, psd: tuple[str, ...] = ()
) -> Payload:
    """Return what a client sends, with its change in float64 as in the chain."""
    wide = {name: value.double() for name, value in change.items()}
    return Payload(wide, dict(statistics or {}), frozenset(psd))


def template_for(payload: Payload) -> Payload:
    """Return shapes and dtypes of a payload, its change in float32."""
    change = {name: value.float() for name, value in payload.change.items()}
    return Payload(template_of(change), template_of(payload.statistics), payload.psd)


def packed(
    codec: Transform, payload: Payload, memory: dict[str, Any] | None = None
) -> tuple[Payload, dict[str, float]]:
    """Return a client's message, and the numbers in the log."""
    fit = FitView(client=0, round=1, seed=0, memory={} if memory is None else memory)
    return codec.encode(payload, fit), fit.metrics


def sent(
    codec: Transform, payload: Payload, memory: dict[str, Any] | None = None
) -> tuple[Payload, Payload, dict[str, float]]:
    """Return a message, what the server reads, and the log."""
    message, metrics = packed(codec, payload, memory)
    expected = template_for(payload)
    assert nbytes(message) <= nbytes(codec.template(expected))
    decoded = codec.decode(message, expected, {})
    assert mismatch(decoded.change, expected.change) is None
    assert mismatch(decoded.statistics, expected.statistics) is None
    return message, decoded, metrics


def assert_refused(codec: Transform, template: Payload, good: Payload, bad: Iterable[Any]) -> None:
    """Check that a codec reads the good message, and none of the bad ones."""
    for message in bad:
        with pytest.raises(ValueError, match=r"\w"):
            codec.decode(message, template, {})
    codec.decode(good, template, {})


def assert_same(got: Any, expected: Any) -> None:
    """Check that nested data is equal, bit for bit, in the same order."""
    if isinstance(expected, Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for name in expected:
            assert_same(got[name], expected[name])
    else:
        assert got == expected
