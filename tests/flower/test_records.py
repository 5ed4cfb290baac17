"""Conversion of data to Flower records and back, bit for bit."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.flower.records import pack, read_update, to_arrays, to_state, unpack, write_update
from tests.conftest import equal_states
from tests.federation.engines import test_wire
from tests.flower.grid import bits, travelled

TENSORS = {
    **test_wire.TENSORS,
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "no_dimension_bfloat16": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty_bfloat16": torch.zeros(0, 3, dtype=torch.bfloat16),
    "parameter": nn.Parameter(torch.randn(2)),
}


def sent(content: RecordDict) -> RecordDict:
    """Return the content of a message after serialization."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    return travelled(Message(content, 1, "train")).content


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_survive(name: str) -> None:
    before = bits(TENSORS[name])
    records = sent(RecordDict({"arrays": to_arrays({name: TENSORS[name]})}))
    got = to_state(records.array_records["arrays"])[name]
    assert type(got) is Tensor and bits(got) == before
    got.zero_()  # a copy of its own, and writable
    assert bits(TENSORS[name]) == before


def test_nested_data_survives() -> None:
    tree = {
        "control": {"fc.weight": torch.randn(2), "fc.bias": torch.tensor(1)},
        "optimizers": [
            {
                "state": {0: {"step": 3}},
                "param_groups": [{"betas": (0.9, 0.999), "fused": None, "lr": 1 / 3}],
            }
        ],
        "numbers": [1, 2**70, -0.0, float("inf"), True, "text", None],
        "empty": [{}, [], ()],
    }
    got = unpack("extras", sent(RecordDict(pack("extras", tree))))
    assert torch.equal(got["control"].pop("fc.weight"), tree["control"].pop("fc.weight"))
    assert torch.equal(got["control"].pop("fc.bias"), tree["control"].pop("fc.bias"))
    assert repr(got) == repr(tree)


def test_an_update_survives() -> None:
    counts, state = torch.tensor([3, 4]), {"w": torch.randn(2), "n": torch.tensor(5)}
    update = ClientUpdate(
        2, 3, 7, 10, counts, state, {"c": {"w": torch.ones(2)}}, {"loss": 1 / 3}, 12, 20, 0.25
    )
    got = read_update(sent(write_update(update)))
    assert equal_states(got.state, update.state) and torch.equal(got.class_counts, counts)
    assert equal_states(got.extras["c"], update.extras["c"]) and got.metrics == update.metrics
    numbers = ("client", "round", "samples", "steps", "bytes_up", "bytes_down", "seconds")
    assert [getattr(got, name) for name in numbers] == [2, 3, 7, 10, 12, 20, 0.25]


def test_what_is_not_plain_data_is_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"extras\.deep\[0\] is a Linear: only tensors"):
        pack("extras", {"deep": [nn.Linear(1, 1)]})


def test_nothing_that_is_read_is_executed() -> None:
    import io
    import pickle

    import numpy as np

    class Bomb:
        def __reduce__(self) -> Any:
            return os.abort, ()

    file = io.BytesIO()
    np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)
    for array in (
        Array("object", (1,), "numpy.ndarray", file.getvalue()),
        Array("x", (1,), "pickle", pickle.dumps(Bomb())),
    ):
        with pytest.raises((TypeError, ValueError)):
            to_state(ArrayRecord({"w": array}))
    with pytest.raises(ValueError):
        unpack(
            "x",
            RecordDict({"x": ConfigRecord({"tree": '{"object": 1}'}), "x.tensors": ArrayRecord()}),
        )
