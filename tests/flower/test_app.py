"""A Flower app from a config of flsuite."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import Context, Message, RecordDict

from flsuite.common.errors import FlsuiteError
from flsuite.flower.app import client_app, server_app
from flsuite.flower.nodes import REFUSED
from tests.conftest import equal_states
from tests.flower.example import EXAMPLE, left_in, our_own
from tests.flower.grid import Nodes


def test_the_app_is_made_from_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))  # as Flower does
    aggregator = "--trainer.aggregator FedAdam --trainer.aggregator.lr 0.05"
    arguments = f"{aggregator} --trainer.rounds 2 --seed_everything 5 --trainer.max_epochs 1"
    grid = Nodes(2)
    for context in grid.contexts.values():
        context.run_config = {"flsuite-config": "digits.yaml", "flsuite-args": arguments}
    config = {
        "flsuite-config": "digits.yaml",
        "flsuite-args": f"{arguments} --run_dir {tmp_path / 'run'}",
    }
    server_app(grid, Context(1, 0, {}, RecordDict(), config))

    theirs, their_table = left_in(tmp_path / "run")
    ours, our_table = our_own(arguments, tmp_path)
    assert equal_states(ours, theirs) and our_table == their_table


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "the run config names no config: set"),
        ({"flsuite-config": "nowhere.yaml"}, "nowhere.yaml is neither in the folder"),
        (
            {"flsuite-config": str(EXAMPLE / "digits.yaml"), "flsuite-args": "--trainer.rundes 3"},
            "unknown key --trainer.rundes",
        ),
    ],
)
def test_a_run_config_that_cannot_be_met_is_one_line(config: dict[str, str], reason: str) -> None:
    with pytest.raises(FlsuiteError, match=reason):
        server_app(Nodes(2), Context(1, 0, {}, RecordDict(), config))
    node = Nodes.context(1, 0, 2)
    node.run_config = config
    answer = client_app(Message(RecordDict(), 1, "train"), node)
    assert reason in answer.error.reason and answer.error.code == REFUSED


def test_without_flower_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "flwr" or name.startswith("flsuite.flower"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(FlsuiteError, match=r"pip install 'flsuite\[flower\]'"):
        import flsuite.flower  # noqa: F401
