"""The command in this process, and the line that a refused request prints."""

import logging
from pathlib import Path

import pytest

from flsuite.commands.main import main

__all__ = ["CONFIGS", "QUICKSTART", "Capture", "cli", "files", "refused"]

Capture = pytest.CaptureFixture[str]

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


def cli(*args: str) -> int:
    """Run the command, and return its exit status."""
    with pytest.raises(SystemExit) as exit:
        main(args)
    return int(exit.value.code or 0)


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file with its time and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(capsys: Capture, *args: str) -> str:
    """Return the one line that a refused request prints; it must leave no trace on disk.

    What the federation says of itself on the way there, such as a default that it takes, is left
    out.
    """
    capsys.readouterr()
    before = files(Path.cwd())
    folders = sorted(Path.cwd().rglob("*"))
    logger = logging.getLogger("flsuite")
    handlers, logger.handlers = logger.handlers, [logging.NullHandler()]
    try:
        assert cli(*args) == 2
    finally:
        logger.handlers = handlers
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("flsuite: error: ")
    assert files(Path.cwd()) == before and sorted(Path.cwd().rglob("*")) == folders
    return line
