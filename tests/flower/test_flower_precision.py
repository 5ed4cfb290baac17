"""``precision: auto`` on nodes of Flower."""

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flsuite.federation.client import devices as precision
from flsuite.flower.server import serve
from tests.conftest import classifier, equal_states, state, table, trainer
from tests.flower.grid import Nodes, node_app, unscaled


def test_nodes_follow_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and score in the server's precision, also where a node would take another one."""

    def on_cpu(has_bf16: bool) -> None:
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda: has_bf16)

    kwargs = {"precision": "auto", "rounds": 1}
    on_cpu(True)
    ours, theirs = trainer(**kwargs), trainer(**kwargs)
    ours.fit(classifier(), unscaled())
    on_cpu(False)
    nodes = Nodes(5, node_app(classifier, **kwargs))
    on_cpu(True)
    serve(nodes, theirs, classifier(), unscaled())
    assert equal_states(state(ours), state(theirs)) and table(ours) == table(theirs)
