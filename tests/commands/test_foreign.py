"""Packs of others: ``flsuite verify`` runs no code of theirs, and writes only files of a run."""

import hashlib
import importlib
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flsuite.commands import fork
from flsuite.commands.foreign import _is_known
from flsuite.commands.known import find
from flsuite.commands.pack import unpack
from flsuite.commands.verify import _workplace
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import locked
from tests.commands.command import CONFIGS, cli, refused

TABLE = (
    "round,wall_s,virtual_s,client_updates,bytes,scope,split,metric,value\n"
    "1,1,1,1,1,global,test,loss,1\n"
)
SETTINGS = {
    **{name: {"class_path": "A", "init_args": {}} for name in ("data", "aggregator", "schedule")},
    "model": {"class_path": "A", "init_args": {}},
    "seed": 1,
    "rounds": 1,
}
CONFIG: dict[str, Any] = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())


def written(file: str, members: dict[str, bytes], manifest: Any = None) -> str:
    """Write a pack of these files, with a manifest of its own if it is given."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in members.items():
            target.writestr(f"content/{digests[name]}", content)
        target.writestr("manifest.json", json.dumps(digests if manifest is None else manifest))
    return file


def foreign(**changes: Any) -> str:
    """Write a pack with a changed config, of a run that could be replayed from its start."""
    texts = {
        "config.yaml": yaml.safe_dump(CONFIG | changes),
        "settings.yaml": yaml.safe_dump(SETTINGS),
        "metrics.csv": TABLE,
        "timeline.csv": "fit,round\n",
        "checkpoints/last.ckpt": "",
    }
    return written("a.zip", {name: text.encode() for name, text in texts.items()})


class Touch:
    """A pickle that leaves a trace when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("trace").absolute(),)


def pickled(loader: str) -> dict[str, Any]:
    """Return data whose samples are pickles, read by a function of the config."""
    Path("samples/0").mkdir(parents=True)
    Path("samples/0/x.pkl").write_bytes(pickle.dumps(Touch()))
    arguments = {"root": str(Path("samples").absolute()), "loader": loader, "extensions": [".pkl"]}
    dataset = {"class_path": "torchvision.datasets.DatasetFolder", "init_args": arguments}
    samples = {"train": dataset, "test": dict(dataset), "clients": 1}
    return {"class_path": "flsuite.data.FromDataset", "init_args": samples}


def in_a_file(loader: str) -> str:
    Path("data.yaml").write_text(yaml.safe_dump(pickled(loader)))
    return str(Path("data.yaml").absolute())


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pack whose checkpoint is empty come as far as the replay."""
    for name in ("ends", "kept_rounds"):
        monkeypatch.setattr(fork, name, lambda run: {})
    monkeypatch.setattr("flsuite.commands.verify.kept_rounds", lambda run: {})


@pytest.mark.parametrize("data", [pickled, in_a_file], ids=["in the config", "in another file"])
def test_a_pack_runs_no_function_that_it_names(
    data: Callable[[str], Any], checked: None, capsys: Any
) -> None:
    file = foreign(data=data("pandas.read_pickle"))
    assert cli("verify", file) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "loader: pandas.read_pickle could run code" in line and "--trust" in line
    assert not Path("trace").exists()


def test_a_pack_imports_no_plugins(checked: None, capsys: Any) -> None:
    Path("evil.py").write_text("raise ImportError('it ran')")
    file = foreign(plugins=["evil"])
    assert "names plugins" in refused(capsys, "verify", file)
    cli("verify", file, "--trust")
    assert "it ran" in capsys.readouterr().err


UNKNOWN = [
    *("os.system", "torch.os.system", "torch.load", "torch.hub.load", "builtins.eval"),
    *("torch.nn.modules.module.torch.load", "torch.nn.functional.relu", "torch.optim"),
    *("torchvision.datasets.LSUN", "torchvision.datasets.folder.default_loader"),
    *("lightning.pytorch.loggers.wandb.os.system", "lightning.pytorch.cli.instantiate_class"),
    *("flsuite.models.Classifier.load_from_checkpoint", "flsuite.federation.Ray"),
    *("flsuite.federation.engines.ray_worker.RayWorker", "flsuite.commands.sweep.sweep"),
    *("torch.distributed.elastic.multiprocessing.SubprocessContext"),
    *(
        "torch.utils.data.datapipes.iter.RoutedDecoder",
        "flsuite.federation.engines.processes._Process",
    ),
    *("torch.package.PackageImporter", "flsuite.data.module.Path"),
    # The same, under names of 0.2.
    *("flsuite.engines.Ray", "flsuite.engines.ray_worker.RayWorker", "flsuite.sweeps.queue.Queue"),
    *("flsuite.client.runner.ClientRunner", "flsuite.files.save_tensors"),
    *("flsuite.engines.processes.subprocess.Popen", "flsuite.attacks.os.system"),
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_could_run_code_is_no_known_class(name: str) -> None:
    assert not _is_known(name)


PARTS = ("aggregators", "callbacks", "data", "federation", "metrics", "models")


def test_what_a_shipped_config_may_name_is_known() -> None:
    modules = [importlib.import_module(f"flsuite.{part}") for part in PARTS]
    named = {f"{module.__name__}.{name}" for module in modules for name in dir(module)}
    classes = {name for name in named if find(name)}
    text = "".join(path.read_text() for path in CONFIGS.rglob("*.yaml"))
    dotted = re.findall(r"(?:flsuite|torch|lightning)(?:\.\w+)+", text)
    classes |= {name for name in dotted if find(name)}
    assert len(classes) > 100 and "torch.optim.SGD" in classes
    unknown = {name for name in classes if not _is_known(name)}
    assert unknown == {"flsuite.federation.Ray"}


MANIFESTS: dict[str, Any] = {
    "a list": [1],
    "a number as digest": {"config.yaml": 3},
    "a digest that is not there": {"config.yaml": "0" * 64},
    "a file above": {"../config.yaml": None},
    "a file at the root": {"/tmp/config.yaml": None},
    "a module": {"torch.py": None},
    "a file of another folder": {"data/labels.csv": None},
    "a script": {"checkpoints/../run.sh": None},
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_of_another_kind_is_one_line(manifest: Any, capsys: Any) -> None:
    if isinstance(manifest, dict):
        known = hashlib.sha256(b"x").hexdigest()
        manifest = {name: content or known for name, content in manifest.items()}
    file = written("a.zip", {"config.yaml": b"x"}, manifest)
    assert "is not a run packed by flsuite pack" in refused(capsys, "verify", file)


def flag_as_encrypted(data: bytearray) -> None:
    for start, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = data.find(start)
        while at >= 0:
            data[at + flags] |= 1
            at = data.find(start, at + 1)


def damage_deflate(data: bytearray) -> None:
    at = data.find(b"content/") + len("content/") + 64
    data[at : at + 8] = b"\xff" * 8


@pytest.mark.parametrize("damage", [flag_as_encrypted, damage_deflate])
def test_a_damaged_member_is_one_line(damage: Callable[[bytearray], None], capsys: Any) -> None:
    file = written("a.zip", {"config.yaml": b"a b c d e f" * 99})
    data = bytearray(Path(file).read_bytes())
    damage(data)
    Path(file).write_bytes(data)
    assert "is not a run packed by flsuite pack" in refused(capsys, "verify", file)


def test_a_link_in_a_pack_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("content/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile("a.zip", "w") as target:
        target.writestr(link, "/etc/passwd")
        target.writestr("manifest.json", "{}")
    with pytest.raises(FlsuiteError, match="is a link"):
        unpack(Path("a.zip"), tmp_path / "run")


def test_a_pack_that_grows_without_bound_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flsuite.commands.pack._SMALL", 1 << 16)
    file = written("a.zip", {"metrics.csv": bytes(1 << 20)})
    with pytest.raises(FlsuiteError, match="100 times its size"):
        unpack(Path(file), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_with_one_content_take_their_room_once(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    names = {f"checkpoints/round-{n:06d}.ckpt": digest for n in range(3)}
    run = unpack(Path(written("a.zip", {"config.yaml": b"x"}, names)), tmp_path / "run")
    assert len({path.stat().st_ino for path in run.rglob("*.ckpt")}) == 1


def test_folders_of_killed_processes_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("tmp").absolute()))
    left, used, new = (Path("tmp", f"flsuite-verify-{name}") for name in ("left", "used", "new"))
    for folder in (left, used, new):
        (folder / "run").mkdir(parents=True)
        if folder != new:
            os.utime(folder, (0, 0))
    with locked(used), _workplace() as own:
        assert {*Path("tmp").iterdir()} == {used, new, Path("tmp", own.name)}
    assert not own.exists()
