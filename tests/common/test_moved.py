"""Names of 0.2, and names that a room exports."""

import subprocess
import sys
from importlib import import_module
from inspect import isclass
from pathlib import Path
from pydoc import locate
from zipfile import PyZipFile

import pytest
import torch

import flsuite
from flsuite.common.files import save_tensors
from flsuite.common.moved import _NOW, _Moved, moved, renewed
from tests.commands.command import QUICKSTART, cli

ROOMS = ["aggregators", "callbacks", "data", "federation", "models"]
NOW = {
    "flsuite.engines": "flsuite.federation",
    "flsuite.engines.Processes": "flsuite.federation.Processes",
    "flsuite.engines.processes.Processes": "flsuite.federation.engines.processes.Processes",
    "flsuite.client.CosineDecay": "flsuite.federation.CosineDecay",
    "flsuite.client": "flsuite.federation.client",
    "flsuite.attacks.sign_flip": "flsuite.aggregators",
    "flsuite.attacks.sign_flip.SignFlip": "flsuite.aggregators.SignFlip",
    "flsuite.exchange.secure.Parties": "flsuite.aggregators.exchange.secure.Parties",
    "flsuite.messages.ClientUpdate": "flsuite.common.messages.ClientUpdate",
    "flsuite.publish.page.page": "flsuite.analysis.publish.page.page",
}


@pytest.mark.parametrize("old", NOW)
def test_a_name_of_another_version_is_found(old: str) -> None:
    assert moved(old) == NOW[old] and moved(NOW[old]) == NOW[old]
    assert locate(NOW[old]) is not None


@pytest.mark.parametrize("name", ["torch", "flsuite", "flsuite.clients.X", "my.engines.Own", ""])
def test_other_names_stay(name: str) -> None:
    assert moved(name) == name


def test_a_description_of_another_version_is_renewed() -> None:
    inner = {"class_path": "flsuite.schedules.Stragglers", "init_args": {"text": "flsuite.client"}}
    new = {"class_path": "flsuite.federation.Stragglers", "init_args": {"text": "flsuite.client"}}
    assert renewed({"a": [inner, 1], "b": None}) == {"a": [new, 1], "b": None}


def test_every_row_names_a_file() -> None:
    assert all(locate(new) is not None for new in _NOW.values())
    root = Path(str(flsuite.__file__)).parents[1]
    assert not any(root.joinpath(*old.split(".")).with_suffix(".py").exists() for old in _NOW)


def test_every_class_that_0_2_exported_is_found() -> None:
    lines = Path(__file__).with_name("names_of_0_2.txt").read_text().splitlines()[1:]
    rows = dict(line.split(": ") for line in lines)
    old = [f"flsuite.{module}.{name}" for module, names in rows.items() for name in names.split()]
    assert len(old) > 180 and not [name for name in old if not isclass(locate(moved(name)))]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_an_old_import_gives_the_same_objects_and_says_the_new_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if moved(name) != name]:
        monkeypatch.delitem(sys.modules, name)
    exec(
        """
from flsuite.engines import Processes
from flsuite.engines.processes import Processes as Again
from flsuite.messages import ClientUpdate
import flsuite.federation, flsuite.common.messages
assert Processes is Again is flsuite.federation.Processes
assert ClientUpdate is flsuite.common.messages.ClientUpdate
""",
        {},
    )
    assert caplog.messages == [
        "flsuite.engines is now flsuite.federation: please change the name",
        "flsuite.messages is now flsuite.common.messages: please change the name",
    ]
    exec(
        """
from flsuite.attacks import sign_flip, with_attack
from flsuite.engines import base
from flsuite.aggregators.rules import Mean
from flsuite.aggregators.server_optimizers.adaptive import AdaptiveAdam
import flsuite.aggregators, flsuite.client
import flsuite.federation.engines.base as base_of_today
assert sign_flip is flsuite.aggregators
assert with_attack.__module__ == "flsuite.aggregators.attacks.updates"
assert base is flsuite.engines.base is base_of_today and "Processes" in dir(flsuite.engines)
assert flsuite.client.devices.__name__ == "flsuite.federation.client.devices"
""",
        {},
    )
    code = _Moved().get_code("flsuite.engines.base")  # for python -m
    assert code and code.co_filename.endswith("federation/engines/base.py")


@pytest.mark.parametrize("package", ["engines", "federation"])
def test_a_misspelled_name_is_refused_with_the_likeliest_one(package: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'Procesess' \\(did you mean Processes"):
        getattr(import_module(f"flsuite.{package}"), "Procesess")  # noqa: B009


def test_names_are_found_without_sources(tmp_path: Path) -> None:
    root = Path(str(flsuite.__file__)).parent
    kept = {root, root / "callbacks", root / "common"}
    with PyZipFile(str(tmp_path / "zip"), "w") as archive:  # of compiled files only
        archive.writepy(str(root), filterfunc=lambda path: {Path(path), Path(path).parent} & kept)
    done = python(f"""
import sys
sys.path.insert(0, {str(tmp_path / "zip")!r})
import flsuite, flsuite.callbacks
assert flsuite.FlsuiteError.__module__ == "flsuite.common.errors" and "zip" in flsuite.__file__
assert "StopAt" in dir(flsuite.callbacks)
""")
    assert done.returncode == 0, done.stderr


def test_a_run_of_another_version_is_verified_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.rounds", "2", "--data.clients", "3", "--run_dir", "run"]
    assert cli("fit", "--config", QUICKSTART, *short) == 0
    for name in ("config.yaml", "settings.yaml"):
        path = tmp_path / "run" / name
        text = path.read_text().replace("flsuite.federation.", "flsuite.schedules.")
        assert text.count("flsuite.schedules.Synchronous") == 1
        path.write_text(text)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    content["settings"]["schedule"]["class_path"] = "flsuite.schedules.Synchronous"
    last.unlink()  # it may be a link to another checkpoint
    save_tensors(content, last)

    assert cli("verify", "run") == 0
    assert cli("resume", "run", "--trainer.rounds", "3") == 0


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_exports_what_it_lists(room: str) -> None:
    package = import_module(f"flsuite.{room}")
    assert all(getattr(package, name).__name__ == name for name in package.__all__)
    assert {*package.__all__, "__doc__"} <= {*dir(package)}, "completion in a notebook"
    modules = {path.stem for path in Path(str(package.__file__)).parent.iterdir()}
    assert not modules & {*package.__all__}, "a module would hide the name"
    with pytest.raises(AttributeError, match=f"'flsuite.{room}' has no attribute 'Nothing'"):
        getattr(package, "Nothing")  # noqa: B009
