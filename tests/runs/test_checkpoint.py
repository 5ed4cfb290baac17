"""A checkpoint is readable again, and on disk before it takes the place of the one before."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import replace_file
from flsuite.runs.checkpoint import load_checkpoint
from tests.conftest import classifier, digits, trainer


class Keeps(FederationCallback):
    """Has any state one likes, from a round on."""

    affects = "nothing"

    def __init__(self, state: Any, since: int = 1) -> None:
        self.state, self.since, self.round = state, since, 0
        self.loaded: Any = None

    def on_round_end(self, run: Any, round: int) -> None:
        self.round = round

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.state} if self.round >= self.since else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["best"]


def test_numpy_numbers_in_a_callbacks_state_are_read_again(tmp_path: Path) -> None:
    deep = {"deep": [np.float32(0.5), np.bool_(True)]}
    state = {"float": np.float64(0.25), "int": np.int64(3), **deep, "tuple": (1, None, "text")}
    plain = {"float": 0.25, "int": 3, "deep": [0.5, True], "tuple": (1, None, "text")}
    trainer(rounds=1, run_dir=tmp_path, callbacks=[Keeps(state)]).fit(classifier(), digits(2))
    callback = Keeps(None)
    resumed = trainer(rounds=2, run_dir=tmp_path, callbacks=[callback])
    resumed.fit(classifier(), digits(2), ckpt_path="last")
    assert resumed.round == 2
    assert repr(callback.loaded) == repr(plain), "of the same types, too"


@pytest.mark.parametrize("state", [np.zeros(2), {"deep": [lambda: None]}])
def test_what_cannot_be_read_again_is_refused_before_the_last_checkpoint_is_replaced(
    state: Any, tmp_path: Path
) -> None:
    made = trainer(rounds=3, run_dir=tmp_path, callbacks=[Keeps(state, since=2)])
    with pytest.raises(FlsuiteError, match=r"callbacks\.Keeps.*\.best.* is a"):
        made.fit(classifier(), digits(2))
    content = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert content["federation"]["clock"]["round"] == 1
    again = trainer(rounds=2, run_dir=tmp_path)
    again.fit(classifier(), digits(2), ckpt_path="last")
    assert again.round == 2


def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def note_replace(source: Any, target: Any) -> None:
        events.append(("rename", os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    replace_file(lambda path: path.write_text("content"), tmp_path / "file", flush=True)
    assert events == [("flush", ".file.tmp"), ("rename", "file"), ("flush", tmp_path.name)]
    assert (tmp_path / "file").read_text() == "content"

    events.clear()
    made = trainer(rounds=1, run_dir=tmp_path / "run")
    made.fit(classifier(), digits(2))
    renamed = events.index(("rename", "last.ckpt"))
    assert ("flush", "metrics.csv") in events[:renamed], "the checkpoint says how long it is"
    assert ("flush", ".last.ckpt.tmp") in events[:renamed]
    assert ("flush", "checkpoints") in events[renamed:]


def test_a_failed_write_leaves_the_file_before_it(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        replace_file(fail, tmp_path / "file", flush=True)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_checkpoint_of_an_earlier_version_is_refused_with_one_line(tmp_path: Path) -> None:
    torch.save({"format": 1}, tmp_path / "last.ckpt")
    with pytest.raises(FlsuiteError, match=r"another version.*format 1, this one"):
        load_checkpoint(tmp_path / "last.ckpt")
