"""Messages with altered, cut or foreign content are taken or refused, and raise nothing else."""

import contextlib
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from flsuite.aggregators import LowRank, PairwiseMasks, Quantize, TopK
from flsuite.aggregators.transforms.base import Payload, Transform
from flsuite.common.errors import FederationError
from flsuite.common.messages import ClientFailure, ClientResult, ClientUpdate
from flsuite.federation import Fit, Synchronous
from flsuite.federation.engines.processes import _require_answer
from flsuite.federation.engines.wire import dumps
from tests.aggregators.exchange.compressions import (
    LENET,
    factors_of,
    packed,
    payload_of,
    state_of,
    template_for,
)
from tests.conftest import classifier, digits, trainer
from tests.fuzz.settings import fuzzed

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2**70, -0.5, float("nan"), float("inf"), "", "x", b"", b"x" * 9]),
    st.sampled_from([(), [], {}, [1], {"a": 1}, {1: {}}, ((),)]),
    st.sampled_from(["zeros", "scalar", "wide", "int8", "nan", "bool", "sparse", "complex"]).map(
        lambda kind: _TENSORS[kind]
    ),
)
_TENSORS = {
    "zeros": torch.zeros(0),
    "scalar": torch.tensor(2.0),
    "wide": torch.ones(3, 5),
    "int8": torch.full((4,), -1, dtype=torch.int8),
    "nan": torch.full((2, 2), float("nan")),
    "bool": torch.tensor([True]),
    "sparse": torch.eye(3).to_sparse(),
    "complex": torch.zeros(2, dtype=torch.complex64),
}


@st.composite
def altered(draw: Any, tree: Any) -> Any:
    """Draw nested data that differs from this tree in one place."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(list(tree)))
        how = draw(st.sampled_from(["into", "into", "into", "drop", "add"]))
        if how == "into":
            return {**tree, key: draw(altered(tree[key]))}
        return {k: v for k, v in tree.items() if k != key} if how == "drop" else {**tree, "new": 1}
    if isinstance(tree, torch.Tensor) and tree.numel() and draw(st.booleans()):
        return _altered_tensor(tree.clone(), draw(st.integers(0, 5)))
    return draw(junk)


def _altered_tensor(tensor: torch.Tensor, how: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if how == 0:
        return flat[:-1]
    if how == 1:
        return tensor.unsqueeze(0)
    if how == 2:
        return tensor.double() if tensor.dtype != torch.float64 else tensor.float()
    # The largest and smallest value that the type has, as an index or a length might be altered.
    limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    flat[: 1 + how] = limits.max if how % 2 else limits.min
    return tensor


@pytest.fixture(scope="module")
def federation() -> Any:
    """Return a federation before its first round."""
    made = trainer(rounds=1, schedule=Synchronous())
    return made.prepare(classifier(), digits(clients=3)).federation


def good_update(federation: Any) -> dict[str, Any]:
    counts = torch.ones(10, dtype=torch.int64)
    state = {name: value.clone() for name, value in federation.state.items()}
    return dict(vars(ClientUpdate(1, 1, 10, 4, counts, state, metrics={"loss": 1.0}, number=1)))


def check(federation: Any, outcome: Any) -> str:
    """Check that the server takes an outcome for the record, or refuses it by name.

    Returns the error of a round without an update, or an empty text.
    """
    federation.open_round()
    federation.send([Fit(number=1, client=1, version=0, repeat=0, started=0.0)])
    record = federation.log
    checked = federation.check(outcome)
    assert checked is None or isinstance(checked, ClientResult | ClientFailure)
    dict(record.metrics())
    if record.updates:
        return ""
    with pytest.raises(FederationError) as error:
        federation.aggregate()
    return str(error.value)


def test_an_update_without_a_round_is_refused(federation: Any) -> None:
    fields = good_update(federation) | {"round": None}
    said = check(federation, ClientResult(ClientUpdate(**fields), None))  # type: ignore[arg-type]
    assert "round None: client 1 failed" in said


@fuzzed(300)
@given(st.data())
def test_an_altered_update_is_recorded_or_refused(federation: Any, data: Any) -> None:
    fields = good_update(federation)
    name = data.draw(st.sampled_from([name for name in fields if name not in ("base", "partial")]))
    fields[name] = data.draw(altered(fields[name]))
    check(federation, ClientResult(ClientUpdate(**fields), data.draw(altered({"model": {}}))))


@fuzzed(150)
@given(
    place=st.floats(0, 1, exclude_max=True), how=st.integers(1, 255) | st.just("cut") | st.binary()
)
def test_bytes_from_a_worker_are_an_answer_or_refused(
    federation: Any, place: float, how: Any
) -> None:
    from tests.fuzz.test_files_fuzzed import damaged

    outcome = ClientResult(ClientUpdate(**good_update(federation)), {})
    answer: Any = None
    with contextlib.suppress(Exception):  # what a worker has sent then counts as its death
        received = pickle.loads(damaged(bytes(dumps([[outcome]])), place, how))
        _require_answer(received, [[None]])  # type: ignore[list-item]
        answer = received
    if isinstance(answer, list) and isinstance(answer[0][0], ClientResult):
        check(federation, answer[0][0])


@pytest.mark.parametrize("codec", [Quantize(bits=4), TopK(0.1), LowRank(rank=2)])
def test_an_altered_compressed_message_is_read_or_refused(codec: Transform) -> None:
    state = state_of(*LENET)
    statistics = {"fisher": factors_of(state)} if isinstance(codec, LowRank) else {}
    payload = payload_of(state, statistics, psd=(*statistics,))
    message, _ = packed(codec, payload)

    @fuzzed(60)
    @given(altered({"change": message.change, "statistics": message.statistics}))
    def run(altered_message: Any) -> None:
        if not isinstance(altered_message, dict) or len(altered_message) != 2:
            return  # the pipeline has refused it
        with contextlib.suppress(ValueError):
            decoded = codec.decode(Payload(*altered_message.values()), template_for(payload), {})
            assert decoded.change.keys() == state.keys()

    run()


def test_an_altered_message_of_a_secure_sum_is_taken_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flsuite.aggregators.exchange.pairwise_server import PairwiseServer
    from tests.aggregators.exchange.test_pairwise import CLIENTS, contribution

    received: list[Any] = []
    original = PairwiseServer.receive
    monkeypatch.setattr(
        PairwiseServer, "receive", lambda self, m: (received.append(m), original(self, m))[1]
    )
    masks = PairwiseMasks()
    masks.configure(contribution(0), len(CLIENTS))
    parties = masks.begin(list(CLIENTS))
    for client in CLIENTS:
        parties.hold(client, contribution(client))
    parties.finish(set(CLIENTS))
    sizes = [value.numel() for value in contribution(0).values()]

    @fuzzed(400)
    @given(st.integers(0, len(received) - 1), st.data())
    def run(place: int, data: Any) -> None:
        server = PairwiseServer(CLIENTS, 3, sizes)
        for message in received[:place]:
            original(server, message)
        message = received[place]
        fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
        name = data.draw(st.sampled_from(list(fields)))
        arrays = st.sampled_from([np.zeros(3), np.zeros(0, np.uint32), np.zeros((2, 2), np.uint32)])
        fields[name] = data.draw(altered(fields[name]) | arrays)
        with contextlib.suppress(ValueError):
            original(server, type(message)(**fields))

    run()


def test_an_altered_answer_of_a_flower_node_is_an_update_or_a_failure(federation: Any) -> None:
    pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    from flsuite.flower.records import read_update, to_arrays, write_update

    whole = write_update(ClientUpdate(**good_update(federation)))
    names = [*whole]
    records = st.one_of(
        st.just(ArrayRecord()),
        st.just(to_arrays({"0": torch.zeros(2)})),
        st.just(MetricRecord({"num-examples": 0})),
        st.text(max_size=20).map(lambda text: ConfigRecord({"tree": text})),
        st.sampled_from(
            ['{"dict": []}', '{"dict": [["client", 1]]}', "[]", "1", '{"tensor": "9"}', "{}"]
        ).map(lambda text: ConfigRecord({"tree": text})),
    )

    @fuzzed(150)
    @given(st.sampled_from(names), st.none() | records)
    def run(name: str, record: Any) -> None:
        content = RecordDict({key: value for key, value in whole.items() if key != name})
        if record is not None:
            content[name] = record
        try:
            update = read_update(content)
        except Exception:  # the engine of the nodes makes any of them a failure with a name
            return
        update.number = 1
        check(federation, ClientResult(update, {}))

    run()
