"""``precision: auto`` on nodes of Flower."""

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flsuite.client import precision
from flsuite.flower.server import serve
from tests.conftest import classifier, equal_states, state, table, trainer
from tests.flower.grid import Nodes, autoencoder, node_app, unscaled


@pytest.mark.parametrize("model", [classifier, autoencoder])
def test_nodes_follow_the_server(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and score in the server's precision, also where a node would take another one."""

    def on_cpu(has_bf16: bool) -> None:
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda: has_bf16)

    kwargs = {"precision": "auto", "rounds": 1}
    on_cpu(True)
    ours, theirs = trainer(**kwargs), trainer(**kwargs)
    ours.fit(model(), unscaled())
    on_cpu(False)
    nodes = Nodes(5, node_app(model, **kwargs))
    on_cpu(True)
    serve(nodes, theirs, model(), unscaled())
    assert equal_states(state(ours), state(theirs)) and table(ours) == table(theirs)
