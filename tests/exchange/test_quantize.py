"""Quantization: its error, its bytes, and messages that are not its own."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from compressions import LENET, NARROW_CNN, assert_same, configured, state_of
from torch import Tensor

from flsuite.aggregators import SCAFFOLD, Centralized, LocalOnly
from flsuite.errors import FlsuiteError
from flsuite.exchange import Quantize
from flsuite.exchange.packing import pack, packed_size, unpack
from flsuite.state import StateLayout, nbytes


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers * 5)  # large enough to be worth codes


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 8 * 2**15 + 3])
def test_packing_is_undone_and_leaves_no_gap(bits: int, count: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 2**bits, count)
    packed = pack(numbers, bits)
    assert len(packed) == packed_size(count, bits) == -(-count * bits // 8)
    assert np.array_equal(unpack(packed, count, bits), numbers)


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_error_is_at_most_half_a_step(bits: int, sign: int) -> None:
    torch.manual_seed(bits)
    x = torch.randn(30, 11) if sign < 0 else torch.randn(30, 11).square()
    quantize = configured(Quantize(bits), {"w": x})
    message, _ = quantize.encode({"w": x}, {}, {}, {})
    decoded, _ = quantize.decode(message, {})

    step = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    assert (decoded["w"] - x).abs().max() <= step / 2 * (1 + 1e-5)
    # A number is an exact multiple of the step, and the largest one is exact.
    codes = decoded["w"].double() / step
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert decoded["w"].abs().max() == x.abs().max()


@pytest.mark.parametrize("bits", [2, 5, 8, 9, 16])
def test_a_tensor_without_negative_values_has_the_same_values_and_one_bit_less(bits: int) -> None:
    x = torch.rand(1001)
    quantize = configured(Quantize(bits), {"w": x})
    unsigned, _ = quantize.encode({"w": x}, {}, {}, {})
    with_sign = torch.cat([x[:-1], -x[-1:]])
    signed, _ = quantize.encode({"w": with_sign}, {}, {}, {})

    assert nbytes(unsigned) == 4 + -(-1001 * (bits - 1) // 8)
    assert nbytes(signed) == quantize.size() == 4 + -(-1001 * bits // 8)
    a, b = quantize.decode(unsigned, {})[0]["w"], quantize.decode(signed, {})[0]["w"]
    assert torch.equal(a[:-1], b[:-1])


@pytest.mark.parametrize(("backbone", "shape"), [LENET, NARROW_CNN])
def test_a_state_and_its_fisher_diagonal_take_less_than_the_state_in_float32(
    backbone: Any, shape: tuple[int, ...]
) -> None:
    state = state_of(backbone, shape)
    fisher = {name: value.square() for name, value in state.items()}
    quantize = configured(Quantize(16), state, {"fisher": fisher})
    message, metrics = quantize.encode(state, {"fisher": fisher}, state, {})

    assert nbytes(message) < 0.97 * nbytes(state)
    share = sum(int((f < f.max() / 65534).sum()) for f in fisher.values())
    share /= sum(f.numel() for f in fisher.values())
    assert metrics["quantized_to_zero/fisher"] == pytest.approx(share, abs=1e-4)


def test_zeros_tiny_numbers_integers_and_other_dtypes() -> None:
    state = {
        "zeros": torch.zeros(5, 5),
        "tiny": torch.full((25,), 1e-44),
        "counter": torch.tensor(7),
        "empty": torch.zeros(0),
        "number": torch.tensor(0.1),
        "half": values(0.5, -1.0, 3.0).bfloat16(),
        "double": values(0.5, -1.0, 3.0).double(),
    }
    extras = {"many": {"steps": 3, "rate": 0.1, "c": values(2.0, -2.0)}}
    quantize = configured(Quantize(8), state, extras)
    message, metrics = quantize.encode(state, extras, state, {})
    decoded, decoded_extras = quantize.decode(message, state)

    for name in ("zeros", "tiny", "counter", "empty", "number"):
        assert torch.equal(decoded[name], state[name])
    assert {k: v.dtype for k, v in decoded.items()} == {k: v.dtype for k, v in state.items()}
    assert_same(decoded_extras, extras)
    assert metrics == {"quantized_to_zero/state": 0.0, "quantized_to_zero/many": 0.0}


def test_the_log_has_the_share_of_numbers_that_became_zero() -> None:
    state = {"w": values(1.0, 0.001, 0.0, -0.001)}
    quantize = configured(Quantize(8), state)
    _, metrics = quantize.encode(state, {}, state, {})
    assert metrics == {"quantized_to_zero/state": pytest.approx(2 / 3)}


def test_it_travels_to_workers_and_changes_nothing_that_it_is_given() -> None:
    state = state_of(*LENET)
    before = copy.deepcopy(state)
    quantize = pickle.loads(pickle.dumps(configured(Quantize(8), state)))
    memory: dict[str, Any] = {}
    message, _ = quantize.encode(state, {}, state, memory)
    quantize.decode(message, state)
    assert_same(state, before)
    assert memory == {}
    assert len(pickle.dumps(quantize)) < 5000  # shapes, no numbers


def test_it_rounds_the_extras_of_scaffold() -> None:
    state = {"w": values(1.0, -2.0)}
    scaffold = SCAFFOLD()
    scaffold.configure(StateLayout(("w",), 2))
    quantize = Quantize()
    quantize.configure(scaffold, state, scaffold.expected_extras(state))
    extras = {"control_change": {"w": values(0.5, -0.25)}}
    message, _ = quantize.encode(state, extras, state, {})
    _, decoded = quantize.decode(message, state)
    assert torch.allclose(
        decoded["control_change"]["w"], extras["control_change"]["w"], atol=0.5 / 65534
    )


def changed(message: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    message = copy.deepcopy(message)
    entry = message
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = to
    return message


@pytest.mark.parametrize("bits", [5, 8, 16])
def test_a_message_of_another_form_is_refused(bits: int) -> None:
    state = {"w": values(1.0, -2.0), "f": values(1.0, 2.0), "n": torch.tensor(1)}
    quantize = configured(Quantize(bits), state, {"number": 1.0})
    good, _ = quantize.encode(state, {"number": 1.0}, state, {})
    codes, magnitudes = good["state"]["w"]["codes"], good["state"]["f"]["magnitudes"]
    outside = torch.full_like(codes, torch.iinfo(codes.dtype).max if bits == 5 else -(2**7))
    for bad in (
        None,
        [],
        {},
        {**good, "more": 1},
        {**good, "state": {"w": good["state"]["w"]}},
        changed(good, "state", "w", to=codes),
        changed(good, "state", "w", "codes", to=codes[:-1]),
        changed(good, "state", "w", "codes", to=codes.float()),
        changed(good, "state", "w", "codes", to=[1, 2]),
        changed(good, "state", "f", "magnitudes", to=magnitudes[:-1]),
        changed(good, "state", "f", "magnitudes", to=magnitudes.to(torch.int8)),
        changed(good, "state", "f", "codes", to=codes),
        changed(good, "state", "w", "largest", to=torch.tensor(float("nan"))),
        changed(good, "state", "w", "largest", to=torch.tensor(float("inf"))),
        changed(good, "state", "w", "largest", to=torch.tensor(-1.0)),
        changed(good, "state", "w", "largest", to=torch.tensor(1.0).double()),
        changed(good, "state", "w", "largest", to=1.0),
        changed(good, "state", "w", "largest", to=torch.tensor(1.0).to_sparse()),
        changed(good, "state", "w", "codes", to=codes.to_sparse()),
        changed(good, "state", "f", "magnitudes", to=magnitudes.to_sparse()),
        changed(good, "state", "n", to=torch.tensor(1.0)),
        changed(good, "extras", "number", to=float("nan")),
        changed(good, "extras", "number", to="1"),
        *([changed(good, "state", "w", "codes", to=outside)] if bits < 16 else []),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            quantize.decode(bad, state)
    quantize.decode(good, state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_cannot_be_sent(bad: float) -> None:
    quantize = configured(Quantize(), {"w": values(1.0, -2.0)}, {"c": values(1.0)})
    with pytest.raises(ValueError, match=r"state\.w is not finite; lower"):
        quantize.encode({"w": values(1.0, bad)}, {"c": values(1.0)}, {}, {})
    with pytest.raises(ValueError, match=r"extras\.c is not finite"):
        quantize.encode({"w": values(1.0, 2.0)}, {"c": values(bad)}, {}, {})


@pytest.mark.parametrize("bits", [1, 17, 0, -3, 8.5, 8.0, float("nan"), True])
def test_bits_outside_2_to_16_are_refused(bits: int) -> None:
    with pytest.raises(FlsuiteError, match="bits must be a whole number from 2 to 16"):
        Quantize(bits)


def test_algorithms_that_send_nothing_to_compress_are_refused() -> None:
    for aggregator, state, match in (
        (Centralized(), {"w": torch.ones(3)}, "Centralized trains on pooled data"),
        (LocalOnly(), {}, "LocalOnly send nothing"),
    ):
        aggregator.configure(StateLayout(tuple(state), 2))
        with pytest.raises(FlsuiteError, match=match):
            Quantize().configure(aggregator, state, {})


def test_matrices_that_must_stay_psd_are_refused() -> None:
    extras = {"gram": {"0": torch.eye(3)}}
    with pytest.raises(FlsuiteError, match=r"\(gram\) would not .* LowRank"):
        configured(Quantize(), {"w": torch.ones(3)}, extras, psd_extras=("gram",))
