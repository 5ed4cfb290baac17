"""The command ends at once, and what a user relies on at an exit happens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flsuite.commands.process import open_streams

BEFORE = """
import atexit, sys, threading, time
left_open = open("file.txt", "w")
left_open.write("kept")
both = open("both.bin", "w+b")
both.write(b"kept too")
atexit.register(print, "at exit")
sys.argv = ["flsuite", "report", "nowhere"]
"""
END = "from flsuite.commands.main import console; console()"


def ended(folder: Path, code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", BEFORE + code], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("command", "status", "out", "err"),
    [
        ("unknown 2>&-", 2, "", ""),  # print writes to the output if there is no stderr
        ("unknown >&- <&-", 2, "", "flsuite: error: unknown command 'unknown'"),
        ("--help > /dev/full", 2, "", "flsuite: error: cannot write the output (No space left"),
        ("--help | true", 0, "", ""),
    ],
)
def test_closed_and_full_streams(command: str, status: int, out: str, err: str) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    shell = ["sh", "-c", f'"$0" -m flsuite {command}', sys.executable]
    done = subprocess.run(shell, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.startswith(err) and len(done.stderr.splitlines()) == bool(err)


def test_a_closed_stream_is_the_null_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, f"__{name}__", None)
        monkeypatch.setattr(sys, name, None)
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        assert stream.name == os.devnull and os.get_inheritable(stream.fileno())
        print("nowhere", file=stream)


@pytest.mark.parametrize("thread", [pytest.param(False, marks=pytest.mark.long), True])
def test_nothing_is_lost_at_the_end(thread: bool, tmp_path: Path) -> None:
    work = "threading.Thread(target=lambda: time.sleep(0.2) or print('thread')).start()\n"
    done = ended(tmp_path, (work if thread else "") + END)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("flsuite: error:")
    assert done.stdout.split("\n") == (["thread"] if thread else []) + ["at exit", ""]
    assert (tmp_path / "file.txt").read_text() == "kept"
    assert (tmp_path / "both.bin").read_bytes() == b"kept too"


@pytest.mark.long
def test_who_watches_the_process_sees_it_end(tmp_path: Path) -> None:
    done = ended(tmp_path, f"import cProfile; cProfile.run({END!r})")
    assert "function calls" in done.stdout


@pytest.mark.long
def test_the_command_does_not_take_modules_apart(tmp_path: Path) -> None:
    late = "class Late:\n    def __del__(self): print('apart')\nlate = Late()\n"
    assert "apart" not in ended(tmp_path, late + END).stdout
    assert "apart" in ended(tmp_path, late).stdout
