"""The clients' memories stay on their nodes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import RecordDict

from flsuite.aggregators import SCAFFOLD, FedAvg
from flsuite.callbacks import GradientDissimilarity
from flsuite.common.errors import FlsuiteError
from flsuite.flower.records import to_state, unpack
from flsuite.flower.server import serve
from tests.conftest import classifier, equal_states, state, trainer
from tests.federation.server.test_federation import Breaks
from tests.flower.grid import Nodes, bits, both, node_app, personal, unscaled


def leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts."""
    if isinstance(tree, Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else ():
        yield from leaves(value)


def tensors_in(records: RecordDict) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every array in a message."""
    for record in records.array_records.values():
        yield from to_state(record).items()


@pytest.mark.parametrize("kind", ["model", "objective"])
def test_what_is_private_never_leaves_its_node(kind: str) -> None:
    model, algorithm = (personal, FedAvg) if kind == "model" else (classifier, SCAFFOLD)
    _, _, grid = both(model, algorithm)

    memories = {
        context.node_config["partition-id"]: unpack("flsuite", context.state)["memory"]
        for context in grid.contexts.values()
    }
    assert memories.keys() == set(range(5))
    assert all(set(memory) == {kind} for memory in memories.values())
    private = memories[0]["model"] if kind == "model" else memories[0]["objective"]["control"]
    names = set(private) if kind == "model" else set()
    assert private and all(name.startswith("network.3.") for name in names)

    # Constant tensors, such as zeros of BatchNorm, are not secret.
    values = (value for memory in memories.values() for value in leaves(memory))
    secrets = {bits(value) for value in values if len(value.unique()) > 1}
    assert secrets and len(grid.answers) == 10
    for _, answer in grid.answers:
        travelling = list(tensors_in(answer.content))
        assert travelling and not any(bits(value) in secrets for _, value in travelling)
        assert not names & {name for name, _ in travelling}
        texts = [json.dumps(dict(record)) for record in answer.content.config_records.values()]
        assert not any(name in text for name in names for text in texts)


def test_another_run_on_the_same_nodes_starts_afresh() -> None:
    grid = Nodes(5, node_app(personal, aggregator=FedAvg()))
    runs = []
    for run in (1, 2):
        grid.begin(run)
        made = trainer(rounds=2)
        serve(grid, made, personal(), unscaled())
        runs.append(state(made))
    assert equal_states(*runs)


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failed_fit_leaves_its_node_as_it_was(how: str) -> None:
    ours, theirs, _ = both(classifier, SCAFFOLD, rounds=3, callbacks=[Breaks(how)])
    assert equal_states(state(ours), state(theirs)) and ours.run.folder.table.rows
    failed = [row for row in theirs.run.folder.table.rows if row[7] == "failed" and row[8] > 0]
    assert [(row[0], row[8]) for row in failed] == [(2, 1.0)]


def test_callbacks_that_need_private_entries_are_repersonal() -> None:
    measuring = trainer(callbacks=[GradientDissimilarity(every=1)])
    with pytest.raises(FlsuiteError, match="the private part of client 0 is on its node"):
        serve(Nodes(5, node_app(personal)), measuring, personal(), unscaled())
