"""``flsuite new``: what it writes runs as it is."""

import sys
from pathlib import Path

import pytest

from tests.commands.command import Capture, cli, refused

FILES = ["exp.yaml", "my_data.py", "my_model.py"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for a project, and forget modules of its names from other tests."""
    for name in ("my_model", "my_data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "project"


def test_what_it_writes_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert cli("new", "project") == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in project.iterdir()) == FILES
    commands = [line.split("flsuite ")[1] for line in printed.splitlines() if "flsuite " in line]
    assert "cd project && flsuite fit --config exp.yaml" in printed and len(commands) == 3

    monkeypatch.chdir(project)
    short = ("--trainer.rounds", "1", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu")
    for command in commands:
        is_fit = command.startswith("fit")
        assert cli(*command.split(), *(short if is_fit else ())) == 0
    listed = capsys.readouterr().out
    assert "FedAvg" in listed and "FedAdam" in listed and "1/1" in listed
    assert "test accuracy" in listed, "the monitor is what the model logs"


def test_it_overwrites_nothing(project: Path, capsys: Capture) -> None:
    assert cli("new", "project") == 0
    (project / "exp.yaml").unlink()
    assert "already has my_model.py, my_data.py" in refused(capsys, "new", "project")


def test_a_folder_with_other_files_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert cli("new", ".") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "notes.txt"])


@pytest.mark.parametrize("name", ["", ".."])
def test_a_name_that_is_none_is_refused(name: str, capsys: Capture) -> None:
    assert "is not the name of a new folder" in refused(capsys, "new", name)


def test_the_next_command_names_the_folder_as_a_shell_reads_it(capsys: Capture) -> None:
    assert cli("new", "my project") == 0
    assert "cd 'my project' && flsuite fit" in capsys.readouterr().out


def test_it_wants_a_name(capsys: Capture) -> None:
    assert "required: NAME" in refused(capsys, "new")
