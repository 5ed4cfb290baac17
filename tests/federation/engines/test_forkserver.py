"""The server process that workers are forked from, itself a fork if that is safe."""

import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import forkserver as server, util
from tempfile import TemporaryDirectory
from types import ModuleType

import psutil
import pytest
import torch

from flsuite.federation.engines import forkserver
from flsuite.federation.engines.forkserver import (
    _can_fork,
    _run_in_fork,
    prepare_workers,
    prepare_workers_early,
)
from flsuite.federation.engines.processes import Processes

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test process look like one that can be forked."""
    monkeypatch.setattr(forkserver, "can_fork_later", lambda: True)
    monkeypatch.setattr(forkserver, "_has_only_own_threads", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@LINUX
def test_a_fork_is_like_a_new_process() -> None:
    prepare_workers()
    address = server._forkserver._forkserver_address  # type: ignore[attr-defined]
    read, write = os.pipe()
    other, kept_open = os.pipe()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    code = f"""
import os, signal, sys, threading
from multiprocessing import forkserver
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
assert sys.stdout.fileno() == 1 and sys.gettrace() is None
assert not forkserver._forkserver._lock.locked()
os.write({write}, b'done')
"""
    try:
        with server._forkserver._lock:  # type: ignore[attr-defined]
            child = _run_in_fork(None, ["-c", code], (write,))
        os.close(kept_open)
        assert os.read(other, 1) == b"", "the fork keeps no file open but those that it is given"
        assert os.read(read, 4) == b"done"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.path.exists(address), "the socket of this process's own server stays"
    finally:
        signal.signal(signal.SIGUSR1, before)
        for number in (read, write, other):
            os.close(number)


@LINUX
def test_a_fork_is_refused_where_it_may_hang(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _can_fork()
    with torch.no_grad():
        assert not _can_fork()
    refusals = (
        (torch.accelerator, "is_available", lambda: True),  # cannot be used in a fork
        (forkserver, "can_fork_later", lambda: False),
        (forkserver, "_has_only_own_threads", lambda: False),  # a pool of OpenMP
        (sys, "ps1", ">>> "),  # modules may be reloaded
    )
    for owner, name, value in refusals:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            assert not _can_fork(), name


@LINUX
def test_threads_of_python_are_no_obstacle_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    before = forkserver._has_only_own_threads()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert forkserver._has_only_own_threads() == before
        monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
        assert not forkserver._has_only_own_threads()
    finally:
        end.set()
        thread.join()


def test_no_server_is_started_by_a_module_in_the_middle_of_its_import(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fork would have the module without its end.
    started: list[int] = []
    monkeypatch.setattr(forkserver, "prepare_workers", lambda: started.append(1))
    module = ModuleType("half_made")
    module.__spec__ = type("Spec", (), {"_initializing": True})()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "half_made", module)
    prepare_workers_early()
    assert not started and not _can_fork()

    monkeypatch.delitem(sys.modules, "half_made")
    prepare_workers_early()
    Processes(1)
    assert len(started) >= 1


def test_threads_that_start_a_server_at_once_leave_no_patch_behind() -> None:
    main, inside, end = sys.modules["__main__"], threading.Event(), threading.Event()

    def patch() -> None:
        with forkserver.without_main(), forkserver._forking():
            inside.set()
            end.wait(10)

    before = util.spawnv_passfds, main.__spec__, getattr(main, "__file__", None)
    thread = threading.Thread(target=patch)
    with forkserver.without_main(), forkserver._forking():
        thread.start()
        assert not inside.wait(0.1), "the second thread waits"
    end.set()
    thread.join(10)
    assert inside.is_set()
    assert before == (util.spawnv_passfds, main.__spec__, getattr(main, "__file__", None))


KILLED = """
import os, signal, sys
from multiprocessing import forkserver as server
from flsuite.federation.engines import forkserver

forkserver._WORKER, forkserver._can_fork = "json", lambda: sys.argv[1] == "True"
forkserver.prepare_workers()
status, message = server.connect_to_new_process([])
os.write(message, b"\\x80\\x05\\x95\\x10")  # the first bytes of a worker's arguments
print(*os.listdir(os.environ["TMPDIR"]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@LINUX
@pytest.mark.parametrize("forks", [True, False])
def test_a_killed_process_leaves_no_folder_and_no_traceback(forks: bool) -> None:
    command = [sys.executable, "-c", KILLED, str(forks)]
    with TemporaryDirectory() as folder:  # tmp_path may be too long for the path of a socket
        environment = {**os.environ, "TMPDIR": folder}
        # Returns once the server and the worker have closed the pipes.
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == -signal.SIGKILL and done.stdout.startswith("pymp-")
        assert not os.listdir(folder) and done.stderr == ""


SCRIPT = """
import json, multiprocessing.forkserver, os, sys, tempfile
import psutil, torch
from flsuite import FederatedTrainer
from flsuite.aggregators import FedAvg
from flsuite.data import Synthetic
from flsuite.federation import InProcess, Processes
from flsuite.federation.engines import forkserver
from flsuite.models import Classifier, MLP

print("once", end=" ")  # not flushed before the fork
if not int(sys.argv[1]):
    forkserver._can_fork = lambda: False

class Mine(Classifier):
    pass

def fit(engine):
    trainer = FederatedTrainer(rounds=2, aggregator=FedAvg(), engine=engine, seed=0,
        run_dir=tempfile.mkdtemp(), enable_progress_bar=False, accelerator="cpu")
    model = Mine(MLP(hidden=[8]), lambda p: torch.optim.SGD(p, lr=0.1))
    trainer.fit(model, Synthetic(clients=3))
    return {k: v.double().sum().item() for k, v in trainer.federation.state.items()}

engine = Processes(2)
pid = multiprocessing.forkserver._forkserver._forkserver_pid
is_fork = psutil.Process(pid).cmdline() == psutil.Process().cmdline()
print(json.dumps([is_fork, fit(engine) == fit(InProcess())]))
"""


@pytest.mark.long
@LINUX
@pytest.mark.parametrize("forks", [True, False])
def test_both_ways_give_the_weights_of_one_process_in_a_script_without_a_guard(
    forks: bool, tmp_path: os.PathLike
) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w") as file:
        file.write(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, str(int(forks))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == 1
    is_fork, is_equal = json.loads(done.stdout.splitlines()[0].removeprefix("once "))
    assert is_equal
    # A machine with an accelerator forks neither.
    assert is_fork == (forks and not torch.accelerator.is_available())
    assert not [p for p in psutil.process_iter(["cmdline"]) if script in (p.info["cmdline"] or [])]


def test_what_only_says_that_it_is_a_module_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        __slots__ = ()
        __class__ = ModuleType  # type: ignore[assignment]

    monkeypatch.setitem(sys.modules, "a_library", Library())
    assert isinstance(sys.modules["a_library"], ModuleType)
    assert not forkserver._is_importing()
