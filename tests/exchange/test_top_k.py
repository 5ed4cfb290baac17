"""Top-k with error feedback: against its definition, over fits, and against bad messages."""

import copy
import pickle
from typing import Any

import pytest
import torch
from compressions import LENET, assert_same, configured, state_of

from flsuite.errors import FlsuiteError
from flsuite.exchange import TopK
from flsuite.state import nbytes

BASE = {"w": torch.tensor([[1.0, 1.0], [1.0, 1.0]]), "n": torch.tensor(3), "b": torch.zeros(2)}
PARAMETERS = ("w", "b")


def top_k(fraction: float) -> TopK:
    compression = TopK(fraction)
    configured(compression, BASE, {"c": torch.ones(2)}, parameters=PARAMETERS)
    return compression


def trained(w: list[list[float]], b: list[float]) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(w), "n": torch.tensor(4), "b": torch.tensor(b)}


def test_the_largest_changes_of_all_parameters_travel_and_the_rest_waits() -> None:
    compression, memory = top_k(2 / 6), {}
    extras = {"c": torch.tensor([5.0, 6.0])}
    state = trained([[1.5, 1.0], [4.0, 0.75]], [0.0, -2.0])
    message, metrics = compression.encode(state, extras, BASE, memory)
    decoded, decoded_extras = compression.decode(message, BASE)

    assert_same(decoded, trained([[1.0, 1.0], [4.0, 1.0]], [0.0, -2.0]))
    assert_same(decoded_extras, extras)
    # Two entries of 8 bytes, the counter and the extras.
    assert nbytes(message) == compression.size() == 2 * 8 + 8 + 8
    assert memory["residual"].tolist() == [0.5, 0.0, 0.0, -0.25, 0.0, 0.0]
    assert metrics["change_sent"] == pytest.approx(13 / 13.3125)

    # The next fit starts from another model. A change of zero lets the residual travel.
    message, _ = compression.encode(BASE, extras, BASE, memory)
    decoded, _ = compression.decode(message, BASE)
    assert_same(decoded["w"], torch.tensor([[1.5, 1.0], [1.0, 0.75]]))
    assert not memory["residual"].any()


def test_what_is_sent_and_what_waits_add_up_to_all_changes() -> None:
    torch.manual_seed(0)
    compression, memory = top_k(1 / 6), {}
    changes, sent = torch.zeros(6), torch.zeros(6)
    for _ in range(20):
        base = {"w": torch.randn(2, 2), "n": torch.tensor(3), "b": torch.randn(2)}
        state = {**base, "w": base["w"] + torch.randn(2, 2), "b": base["b"] + torch.randn(2)}
        message, _ = compression.encode(state, {"c": torch.ones(2)}, base, memory)
        decoded, _ = compression.decode(message, base)
        for total, model in ((changes, state), (sent, decoded)):
            total += torch.cat([(model[name] - base[name]).flatten() for name in PARAMETERS])
    assert torch.allclose(sent + memory["residual"], changes, atol=1e-5)


def test_error_feedback_reaches_an_optimum_that_plain_top_1_cannot() -> None:
    """Gradient descent on two coordinates, the second one far flatter than the first.

    The first coordinate oscillates, so that its step is always the larger one.
    """

    def distance(keeps_residual: bool) -> float:
        compression = TopK(0.5)
        configured(compression, {"w": torch.zeros(2)})
        state, memory = {"w": torch.tensor([10.0, 1.0])}, {}
        for step in range(100):
            push = torch.tensor([(-1.0) ** step, -0.05 * float(state["w"][1])])
            trained = {"w": state["w"] + push}
            message, _ = compression.encode(trained, {}, state, memory if keeps_residual else {})
            state, _ = compression.decode(message, state)
        return abs(float(state["w"][1]))

    assert distance(keeps_residual=False) == 1.0
    assert distance(keeps_residual=True) < 0.1


def test_with_fraction_1_the_server_has_the_clients_model_bit_for_bit() -> None:
    base, state = state_of(*LENET), state_of(*LENET)
    for value in state.values():
        value += torch.randn_like(value)
    compression = configured(TopK(1.0), base)
    compression = pickle.loads(pickle.dumps(compression))
    memory: dict[str, Any] = {}
    for _ in range(2):
        message, metrics = compression.encode(state, {}, base, memory)
        assert_same(compression.decode(message, base)[0], state)
        assert not memory["residual"].any()
        assert metrics == {"change_sent": 1.0}


def test_at_least_one_entry_is_sent_and_no_change_is_no_error() -> None:
    message, metrics = top_k(1e-9).encode(BASE, {"c": torch.ones(2)}, BASE, {})
    assert len(message["values"]) == 1
    assert metrics == {"change_sent": 1.0}


def test_its_arguments_are_left_as_they_are() -> None:
    state, extras, memory = trained([[2.0, 2.0], [0.0, 0.0]], [1.0, 1.0]), {"c": torch.ones(2)}, {}
    compression = top_k(0.5)
    before = copy.deepcopy((state, extras, BASE))
    message, _ = compression.encode(state, extras, BASE, memory)
    residual = memory["residual"].clone()
    kept = dict(memory)
    compression.encode(state, extras, BASE, memory)
    compression.decode(message, BASE)
    assert_same(state, before[0])
    assert_same(extras, before[1])
    assert_same(BASE, before[2])
    # The notes of an earlier fit, which the server may still hold, do not change.
    assert torch.equal(kept["residual"], residual)


def test_a_message_of_another_form_is_refused() -> None:
    compression, extras = top_k(0.5), {"c": torch.ones(2)}
    good, _ = compression.encode(trained([[2.0, 2.0], [0.0, 0.0]], [1.0, 1.0]), extras, BASE, {})
    int32 = torch.int32
    for entry, bad in (
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
        ("others", {}),
        ("others", {"n": torch.tensor(4.0)}),
        ("others", {"n": torch.tensor(4), "w": BASE["w"]}),
        ("extras", {}),
        ("extras", {"c": torch.ones(2) / 0.0}),
        ("more", 1),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            compression.decode({**good, entry: bad}, BASE)
    for bad in (None, {}, {name: good[name] for name in ("indexes", "values")}):
        with pytest.raises(ValueError, match=r"\w"):
            compression.decode(bad, BASE)


def test_a_state_that_is_not_finite_cannot_be_sent() -> None:
    bad = trained([[float("nan"), 0.0], [0.0, 0.0]], [0.0, 0.0])
    with pytest.raises(ValueError, match=r"state\.w is not finite"):
        top_k(0.5).encode(bad, {"c": torch.ones(2)}, BASE, {})


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(FlsuiteError, match="TopK: fraction must be"):
        TopK(fraction)


def test_a_model_without_parameters_to_choose_from_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="send no parameters"):
        configured(TopK(), {"n": torch.tensor(1)}, parameters=())
    mixed = {"a": torch.ones(2), "b": torch.ones(2).double()}
    with pytest.raises(FlsuiteError, match="several dtypes"):
        configured(TopK(), mixed)
