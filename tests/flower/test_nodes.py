"""Which node is which client, and which of them are connected."""

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import Context, Error, Message

from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FlsuiteError
from flsuite.flower.app import client_app
from flsuite.flower.server import serve
from tests.conftest import classifier, digits, trainer
from tests.flower.grid import Nodes, check_round_without_client_1, node_app, unscaled


class Leaves(FederationCallback):
    """Takes the node of client 1 away in round 2, and brings it back under another number."""

    def __init__(self, grid: Nodes) -> None:
        self.grid = grid

    def on_round_end(self, run: Any, round: int) -> None:
        contexts = self.grid.contexts
        if round == 1:
            (node,) = (n for n, c in contexts.items() if c.node_config["partition-id"] == 1)
            self.gone = contexts.pop(node)
        elif round == 2:
            self.grid.contexts = {5: self.gone, **contexts}


def test_a_node_may_leave_and_come_back() -> None:
    grid = Nodes(5, node_app(classifier))
    check_round_without_client_1(grid, "its node is not connected", 3, [Leaves(grid)])
    assert 5 in grid.contexts and len(grid.answers) == 14


def test_the_first_round_waits_for_every_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Nodes(5, node_app(classifier))
    late = {node: grid.contexts.pop(node) for node in list(grid.contexts)[:2]}
    monkeypatch.setattr(
        "flsuite.flower.nodes.time.sleep", lambda seconds: grid.contexts.update([late.popitem()])
    )
    made = trainer(rounds=1)
    with caplog.at_level("INFO", logger="flsuite"):
        serve(grid, made, classifier(), unscaled())
    assert not late and made.run.folder.table.rows and "(3 of 5 are here)" in caplog.text
    assert len(grid.answers) == 5


def raising(app: Any) -> Any:
    """Convert an exception of an app into an error message, as Flower does."""

    def answer(message: Message, context: Context) -> Message:
        try:
            return app(message, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    return answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num-partitions": 2}, r"was told of 2 clients \(num-partitions\)"),
        ({"partition-id": 5}, r"is client 5 \(its partition-id\)"),
        ({"partition-id": "0"}, "partition-id must be the number of a client"),
    ],
)
def test_nodes_that_are_no_client_are_named(change: dict[str, Any], reason: str) -> None:
    grid = Nodes(5)
    grid.contexts[1000].node_config.update(change)
    grid.app = raising(client_app)
    with pytest.raises(FlsuiteError, match=reason):
        serve(grid, trainer(), classifier(), digits())
