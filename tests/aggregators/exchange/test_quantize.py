"""Quantization: its error, its bytes, and foreign messages."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsuite.aggregators import Quantize, TopK
from flsuite.aggregators.transforms.base import Payload
from flsuite.aggregators.transforms.quantize import pack, packed_size, unpack
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import nbytes
from tests.aggregators.exchange.compressions import (
    LENET,
    assert_refused,
    assert_same,
    packed,
    payload_of,
    sent,
    state_of,
    template_for,
)


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers * 5)  # large enough to be worth codes


@pytest.mark.parametrize("bits", range(1, 17))
def test_packing_is_undone_and_leaves_no_gap(bits: int) -> None:
    for count in (0, 1, 7, 8, 1000, 8 * 2**15 + 3):
        numbers = np.random.default_rng(bits).integers(0, 2**bits, count)
        packed = pack(numbers, bits)
        assert len(packed) == packed_size(count, bits) == -(-count * bits // 8)
        assert np.array_equal(unpack(packed, count, bits), numbers)


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_error_is_at_most_half_a_step(bits: int, sign: int) -> None:
    torch.manual_seed(bits)
    x = torch.randn(30, 11) if sign < 0 else torch.randn(30, 11).square()
    _, decoded, _ = sent(Quantize(bits), payload_of({"w": x}))
    got = decoded.change["w"]

    step = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    assert (got - x).abs().max() <= step / 2 * (1 + 1e-5)
    # A number is an exact multiple of the step, and the largest one is exact.
    codes = got.double() / step
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert got.abs().max() == x.abs().max()


@pytest.mark.parametrize("bits", [2, 5, 8, 9, 16])
def test_a_tensor_without_negative_values_has_the_same_values_and_one_bit_less(bits: int) -> None:
    x = torch.rand(1001)
    unsigned, a, _ = sent(Quantize(bits), payload_of({"w": x}))
    payload = payload_of({"w": torch.cat([x[:-1], -x.max()[None]])})
    signed, b, _ = sent(Quantize(bits), payload)

    size = nbytes(Quantize(bits).template(template_for(payload)))
    assert nbytes(unsigned) == 4 + -(-1001 * (bits - 1) // 8)
    assert nbytes(signed) == size == 4 + -(-1001 * bits // 8)
    assert torch.equal(a.change["w"][:-1], b.change["w"][:-1])


def test_zeros_tiny_numbers_integers_and_other_dtypes() -> None:
    change = {
        "zeros": torch.zeros(5, 5),
        "tiny": torch.full((25,), 1e-44),
        "empty": torch.zeros(0),
        "number": torch.tensor(0.1),
    }
    half, double = values(0.5, -1.0, 3.0).bfloat16(), values(0.5, -1.0, 3.0).double()
    many = {"steps": 3, "rate": 0.1, "c": values(2.0, -2.0), "half": half, "double": double}
    statistics = {"many": many, "counter": torch.tensor(7)}
    _, decoded, metrics = sent(Quantize(8), payload_of(change, statistics))

    assert_same(decoded.change, change)
    assert_same(decoded.statistics["many"]["c"], many["c"])
    assert_same(decoded.statistics["counter"], torch.tensor(7))
    assert (decoded.statistics["many"]["steps"], decoded.statistics["many"]["rate"]) == (3, 0.1)
    assert metrics == {"quantized_to_zero/change": 0.0, "quantized_to_zero/many": 0.0}


def test_the_log_has_the_share_of_numbers_that_became_zero() -> None:
    *_, metrics = sent(Quantize(8), payload_of({"w": values(1.0, 0.001, 0.0, -0.001)}))
    assert metrics == {"quantized_to_zero/change": pytest.approx(2 / 3)}


def test_it_travels_to_workers_and_changes_nothing_that_it_is_given() -> None:
    payload = payload_of(state_of(*LENET), {"c": values(1.0)})
    before, memory = copy.deepcopy(payload), dict[str, Any]()
    sent(pickle.loads(pickle.dumps(Quantize(8))), payload, memory)
    assert_same(payload.change, before.change)
    assert_same(payload.statistics, before.statistics)
    assert memory == {}


@pytest.mark.parametrize("bits", [2, 8])
def test_it_codes_what_top_k_has_chosen(bits: int) -> None:
    torch.manual_seed(0)
    payload = payload_of({"w": torch.randn(400), "b": torch.randn(7, 3)})
    top_k, quantize, memory = TopK(0.25), Quantize(bits), dict[str, Any]()
    sparse, _ = packed(top_k, payload, memory)
    message, _ = packed(quantize, sparse)
    template = template_for(payload)
    between = top_k.template(template)
    size = nbytes(quantize.template(between))
    assert nbytes(message) == size == 105 * 4 + 4 + -(-105 * bits // 8)

    decoded = top_k.decode(quantize.decode(message, between, {}), template, {})
    exact = top_k.decode(sparse, template, {})
    step = float(sparse.change["values"].abs().max()) / (2 ** (bits - 1) - 1)
    for name, value in exact.change.items():
        assert float((decoded.change[name] - value).abs().max()) <= step / 2 * (1 + 1e-5)


def changed(message: Payload, *path: str, to: Any) -> Payload:
    message = copy.deepcopy(message)
    entry = message.change if path[0] == "change" else message.statistics
    for key in path[1:-1]:
        entry = entry[key]
    entry[path[-1]] = to
    return message


@pytest.mark.parametrize("bits", [5, 8, 16])
def test_a_message_of_another_form_is_refused(bits: int) -> None:
    change = {"w": values(1.0, -2.0), "f": values(1.0, 2.0)}
    payload = payload_of(change, {"number": 1.0, "n": torch.tensor(1)})
    quantize, template = Quantize(bits), template_for(payload)
    good, _ = packed(quantize, payload)
    codes, magnitudes = good.change["w"]["codes"], good.change["f"]["magnitudes"]
    outside = torch.full_like(codes, torch.iinfo(codes.dtype).max if bits == 5 else -(2**7))
    bad = (
        Payload(None, None),
        Payload([], {}),
        Payload({}, good.statistics),
        good._replace(change={"w": good.change["w"]}),
        good._replace(statistics=None),
        changed(good, "change", "more", to=1),
        changed(good, "change", "w", to=codes),
        changed(good, "change", "w", "codes", to=codes[:-1]),
        changed(good, "change", "w", "codes", to=codes.float()),
        changed(good, "change", "w", "codes", to=[1, 2]),
        changed(good, "change", "f", "magnitudes", to=magnitudes[:-1]),
        changed(good, "change", "f", "magnitudes", to=magnitudes.to(torch.int8)),
        changed(good, "change", "f", "codes", to=codes),
        changed(good, "change", "w", "largest", to=torch.tensor(float("nan"))),
        changed(good, "change", "w", "largest", to=torch.tensor(float("inf"))),
        changed(good, "change", "w", "largest", to=torch.tensor(-1.0)),
        changed(good, "change", "w", "largest", to=torch.tensor(1.0).double()),
        changed(good, "change", "w", "largest", to=1.0),
        changed(good, "change", "w", "largest", to=torch.tensor(1.0).to_sparse()),
        changed(good, "change", "w", "codes", to=codes.to_sparse()),
        changed(good, "change", "f", "magnitudes", to=magnitudes.to_sparse()),
        changed(good, "statistics", "n", to=torch.tensor(1.0)),
        changed(good, "statistics", "number", to=float("nan")),
        changed(good, "statistics", "number", to="1"),
        *([changed(good, "change", "w", "codes", to=outside)] if bits < 16 else []),
    )
    assert_refused(quantize, template, good, bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_change_that_is_not_finite_cannot_be_sent(bad: float) -> None:
    for payload, match in (
        (payload_of({"w": values(1.0, bad)}), r"change\.w is not finite; lower"),
        (payload_of({"w": values(1.0, 2.0)}, {"c": values(bad)}), r"statistics\.c is not finite"),
        (payload_of({"w": values(1.0).double() * 1e39}), r"change\.w is not finite"),  # in float32
    ):
        with pytest.raises(ValueError, match=match):
            packed(Quantize(), payload)


@pytest.mark.parametrize("bits", [1, 17, 0, -3, 8.5, 8.0, float("nan"), True])
def test_bits_outside_2_to_16_are_refused(bits: int) -> None:
    with pytest.raises(FlsuiteError, match=r"Quantize: bits must be"):
        Quantize(bits)


def test_nothing_to_send_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="Quantize: clients send nothing"):
        Quantize().template(Payload({}, {}))
