"""Top-k with error feedback: against its definition, over fits, and against bad messages."""

import copy
import pickle
from typing import Any

import pytest
import torch

from flsuite.aggregators import TopK
from flsuite.aggregators.transforms.base import Payload
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, nbytes
from tests.aggregators.exchange.compressions import (
    assert_refused,
    assert_same,
    packed,
    payload_of,
    sent,
    template_for,
)

STATISTICS = {"c": torch.tensor([5.0, 6.0])}


def change_of(w: list[list[float]], b: list[float]) -> State:
    return {"w": torch.tensor(w), "b": torch.tensor(b)}


NO_CHANGE = change_of([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
SOME = payload_of(change_of([[2.0, 2.0], [0.0, 0.0]], [1.0, 1.0]), STATISTICS)


def test_the_largest_changes_of_all_parameters_travel_and_the_rest_waits() -> None:
    top_k, memory = TopK(2 / 6), dict[str, Any]()
    payload = payload_of(change_of([[0.5, 0.0], [3.0, -0.25]], [0.0, -2.0]), STATISTICS)
    message, decoded, metrics = sent(top_k, payload, memory)

    assert_same(decoded.change, change_of([[0.0, 0.0], [3.0, 0.0]], [0.0, -2.0]))
    assert_same(decoded.statistics, STATISTICS)
    # Two entries of 8 bytes, and the statistics.
    size = nbytes(top_k.template(template_for(payload)))
    assert nbytes(message) == size == 2 * 8 + 8
    assert memory["residual"].tolist() == [0.5, 0.0, 0.0, -0.25, 0.0, 0.0]
    assert metrics["change_sent"] == pytest.approx(13 / 13.3125)

    # A change of zero lets the residual travel.
    _, decoded, _ = sent(top_k, payload_of(NO_CHANGE, STATISTICS), memory)
    assert_same(decoded.change, change_of([[0.5, 0.0], [0.0, -0.25]], [0.0, 0.0]))
    assert not memory["residual"].any()


def test_what_is_sent_and_what_waits_add_up_to_all_changes() -> None:
    torch.manual_seed(0)
    memory: dict[str, Any] = {}
    total, arrived = torch.zeros(6).double(), torch.zeros(6).double()
    for _ in range(20):
        change = {"w": torch.randn(2, 2).double(), "b": torch.randn(2).double()}
        _, decoded, _ = sent(TopK(1 / 6), payload_of(change), memory)
        total += torch.cat([value.flatten() for value in change.values()])
        arrived += torch.cat([value.flatten() for value in decoded.change.values()])
    # The changes have more digits than float32 has.
    assert torch.allclose(arrived + memory["residual"], total, atol=1e-6)


def test_what_rounding_leaves_out_waits() -> None:
    memory: dict[str, Any] = {}
    change = {"w": torch.tensor([1 + 2.0**-30, 0.0]).double() * (1 + 2.0**-30)}
    sent(TopK(0.5), payload_of(change), memory)
    assert memory["residual"].tolist() == [float(change["w"][0]) - 1.0, 0.0]
    assert memory["residual"].dtype == torch.float32


def test_with_fraction_1_the_very_payload_travels() -> None:
    top_k, memory = pickle.loads(pickle.dumps(TopK(1.0))), dict[str, Any]()
    message, metrics = packed(top_k, SOME, memory)
    assert message is SOME and memory == {}
    assert metrics == {"change_sent": 1.0}
    assert top_k.decode(SOME, template_for(SOME), {}) is SOME
    template = template_for(SOME)
    assert top_k.template(template) is template


def test_at_least_one_entry_is_sent_and_no_change_is_no_error() -> None:
    message, _, metrics = sent(TopK(1e-9), payload_of(NO_CHANGE))
    assert len(message.change["values"]) == 1
    assert metrics == {"change_sent": 1.0}


def test_its_arguments_are_left_as_they_are() -> None:
    top_k, memory, before = TopK(0.5), dict[str, Any](), copy.deepcopy(SOME)
    packed(top_k, SOME, memory)
    residual, kept = memory["residual"].clone(), dict(memory)
    sent(top_k, SOME, memory)
    assert_same(SOME.change, before.change)
    assert_same(SOME.statistics, before.statistics)
    # The notes of an earlier fit, which the server may still hold, do not change.
    assert torch.equal(kept["residual"], residual)


def test_a_message_of_another_form_is_refused() -> None:
    top_k, template = TopK(0.5), template_for(SOME)
    good, _ = packed(top_k, SOME)
    int32 = torch.int32
    entries = (
        ("indexes", torch.tensor([0, 1, 6], dtype=int32)),
        ("indexes", torch.tensor([-1, 1, 2], dtype=int32)),
        ("indexes", torch.tensor([1, 1, 2], dtype=int32)),
        ("indexes", torch.tensor([2, 1, 0], dtype=int32)),
        ("indexes", torch.tensor([0, 9, 2], dtype=int32)),
        ("indexes", torch.tensor([0, 1, 2])),
        ("indexes", torch.tensor([0, 1], dtype=int32)),
        ("indexes", [0, 1, 2]),
        ("values", torch.tensor([0.0, float("nan"), 0.0])),
        ("values", torch.zeros(3).double()),
        ("values", torch.zeros(2)),
        ("values", torch.zeros(3).to_sparse()),
        ("indexes", torch.tensor([0, 1, 2], dtype=int32).to_sparse()),
        ("more", 1),
    )
    statistics: tuple[Any, ...] = ({}, None, {"c": torch.ones(2) / 0.0}, {"c": torch.ones(3)})
    changes: list[Any] = [{**good.change, entry: bad} for entry, bad in entries]
    changes += [None, [], {}, {"values": good.change["values"]}]
    messages = [Payload(None, None), *(good._replace(change=bad) for bad in changes)]
    messages += [good._replace(statistics=bad) for bad in statistics]
    assert_refused(top_k, template, good, messages)


def test_a_change_that_is_not_finite_cannot_be_sent() -> None:
    bad = change_of([[float("nan"), 0.0], [0.0, 0.0]], [0.0, 0.0])
    with pytest.raises(ValueError, match=r"change\.w is not finite"):
        packed(TopK(0.5), payload_of(bad))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(FlsuiteError, match="TopK: fraction must be"):
        TopK(fraction)


def test_a_model_without_parameters_to_choose_from_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="send no parameters"):
        TopK().template(Payload({}, STATISTICS))
