"""Tensors of kept checkpoints are stored once, and every reader gets them back bit for bit."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from flsuite.aggregators import IFCA
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import save_tensors
from flsuite.data import Dirichlet
from flsuite.federation import Synchronous
from flsuite.models import MLP, Classifier
from flsuite.runs.checkpoint import KeptTensors, load_checkpoint, with_shared
from flsuite.runs.fork import Fork
from flsuite.runs.record import kept_on_disk
from tests.aggregators.federations import assert_same_models
from tests.conftest import digits, trainer


def fit(folder: Path, rounds: int = 6, **settings: Any) -> Any:
    """Train three models, of which each round changes one: that of the only client drawn."""
    ckpt_path = settings.pop("ckpt_path", None)
    settings |= {"aggregator": IFCA(clusters=3), "schedule": Synchronous(participation=1)}
    made = trainer(rounds=rounds, run_dir=folder, keep_rounds=1, **settings)
    made.fit(model(), digits(clients=6, partition=Dirichlet(0.5)), ckpt_path=ckpt_path)
    return made


def model() -> Classifier:
    return Classifier(MLP(hidden=(200,)), optimizer=partial(SGD, lr=0.1))


def sizes(run: Path) -> list[int]:
    return [path.stat().st_size for path in sorted((run / "checkpoints").glob("round-*.ckpt"))]


def equal(a: Any, b: Any) -> bool:
    """Return whether two contents are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or a != a)


def stored(run: Path, round: int) -> Path:
    return run / "checkpoints" / f"round-{round:06d}.ckpt"


def big(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((40, 80), value).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_what_was_there_before_becomes_a_reference(dtype: torch.dtype, tmp_path: Path) -> None:
    kept = KeptTensors()
    first = {"state": {"a": big(1, dtype), "small": torch.ones(3)}, "round": 1}
    second = {"state": {"a": big(2, dtype), "small": torch.ones(3)}, "list": [big(1, dtype), None]}
    assert kept.shared(first, "round-1.ckpt") is first
    content = kept.shared(second, "round-2.ckpt")
    assert content["state"]["a"] is second["state"]["a"]
    place = {name: content["list"][0][name] for name in ("shared_with", "keys")}
    assert place == {"shared_with": "round-1.ckpt", "keys": ["state", "a"]}
    save_tensors({"federation": first}, tmp_path / "round-1.ckpt")
    back = with_shared(content, tmp_path / "round-2.ckpt")
    assert back["list"][1] is None
    torch.testing.assert_close(back["list"][0], big(1, dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    "other",
    [lambda: -big(0), lambda: big(0).T, lambda: big(0, torch.int32), lambda: big(1e-45)],
    ids=["sign", "shape", "type", "last bit"],
)
def test_only_equal_bits_are_shared(other: Callable[[], torch.Tensor]) -> None:
    kept = KeptTensors()
    kept.shared({"a": big(0)}, "round-1.ckpt")
    content = {"a": other()}
    assert kept.shared(content, "round-2.ckpt") is content
    assert kept.shared({"a": big(0)}, "round-2.ckpt") != {"a": big(0)}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fit(tmp_path_factory.mktemp("parent") / "run", monitor="val/accuracy")


def test_models_that_a_round_leaves_alone_are_stored_once(parent: Any, tmp_path: Path) -> None:
    run = parent.run.folder.path
    first, *later = sizes(run)
    assert max(later) < 0.6 * first
    memories = sum(path.stat().st_size for path in run.glob("clients/*.pt"))
    assert kept_on_disk(run) == (6, first + sum(later) + memories)
    last = run / "checkpoints" / "last.ckpt"
    assert equal(load_checkpoint(stored(run, 6)), load_checkpoint(last))
    assert torch.load(last, weights_only=True)["federation"]["aggregator"]  # nothing is missing
    made = fit(tmp_path / "fork", fork=Fork(str(run), 4), monitor="val/accuracy")
    assert_same_models(made, parent)


def test_entries_with_equal_bits_are_changed_each_for_itself(tmp_path: Path) -> None:
    """Momenta of layers that are not trained are equal, and a server optimizer steps in place."""
    kept = KeptTensors()
    content = {"a": big(0), "b": big(0)}
    assert kept.shared(content, "round-1.ckpt") is content
    save_tensors({"federation": content}, tmp_path / "round-1.ckpt")
    again = kept.shared({"a": big(0), "b": big(0)}, "round-2.ckpt")
    back = with_shared(again, tmp_path / "round-2.ckpt")
    back["a"].add_(1)
    assert equal(back["b"], big(0))


def test_a_resume_goes_on_sharing(parent: Any, tmp_path: Path) -> None:
    fit(tmp_path, rounds=3, monitor="val/accuracy")
    fit(tmp_path, ckpt_path="last", monitor="val/accuracy")
    whole = parent.run.folder.path
    assert sizes(tmp_path) == pytest.approx(sizes(whole), abs=500)
    for round in range(1, 7):
        ours, theirs = (load_checkpoint(stored(run, round)) for run in (tmp_path, whole))
        for name in ("state", "initial", "aggregator"):
            assert equal(ours["federation"][name], theirs["federation"][name])


def test_a_fork_has_the_picked_round_without_its_parent(parent: Any, tmp_path: Path) -> None:
    shutil.copytree(parent.run.folder.path, tmp_path / "parent")
    fit(tmp_path / "fork", fork=Fork(str(tmp_path / "parent"), 5), monitor="val/accuracy")
    (tmp_path / "parent").rename(tmp_path / "moved")
    for name in ("best", "last"):
        assert load_checkpoint(tmp_path / "fork" / "checkpoints" / f"{name}.ckpt")


def test_without_equal_tensors_a_kept_round_is_a_link(tmp_path: Path) -> None:
    made = trainer(rounds=2, run_dir=tmp_path, keep_rounds=1)
    made.fit(model(), digits(clients=3))
    assert stored(tmp_path, 2).samefile(tmp_path / "checkpoints" / "last.ckpt")
    raw = [torch.load(stored(tmp_path, n), weights_only=True)["federation"] for n in (1, 2)]
    assert all(isinstance(v, torch.Tensor) for content in raw for v in content["state"].values())


def test_a_missing_or_other_file_is_named(parent: Any, tmp_path: Path) -> None:
    shutil.copytree(parent.run.folder.path, tmp_path, dirs_exist_ok=True)
    first = stored(tmp_path, 1)
    content = first.read_bytes()
    first.unlink()
    with pytest.raises(FlsuiteError, match=r"000001.ckpt is missing; round-000004.ckpt shares"):
        load_checkpoint(stored(tmp_path, 4))
    first.write_bytes(content[:-2000])
    with pytest.raises(FlsuiteError, match=r"damaged.*; round-000004.ckpt shares tensors with it"):
        load_checkpoint(stored(tmp_path, 4))
    first.write_bytes(content)
    other = torch.load(first, weights_only=True)
    for state in other["federation"]["aggregator"]["rule"]["models"].values():
        state["network.1.weight"] += 1
    save_tensors(other, first)
    with pytest.raises(FlsuiteError, match="which does not hold it; restore both files"):
        load_checkpoint(stored(tmp_path, 4))
    save_tensors({"federation": {}}, first)
    with pytest.raises(FlsuiteError, match="which does not hold it; restore both files"):
        load_checkpoint(stored(tmp_path, 4))
