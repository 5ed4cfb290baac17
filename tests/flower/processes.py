"""Flower's own processes on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.flower.example import EXAMPLE, left_in


class Processes:
    """Runs Flower's commands in a home of their own, and ends them all at exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        own = {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        quick = {
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        # Flower's simulation would join any cluster of Ray that runs on this machine.
        alone = {"RAY_ADDRESS": "local"}
        self.environment = {**os.environ, **own, **quick, **alone, "PATH": path}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + 15
            while (
                number == signal.SIGTERM
                and time.monotonic() < deadline
                and any(p.poll() is None for p in self.running)
            ):
                time.sleep(0.1)

    def connect(self, *lines: str) -> None:
        """Tell ``flwr`` how to reach the SuperLink."""
        (self.folder / "home").mkdir()
        head = (
            "[superlink]",
            'default = "test"',
            "",
            "[superlink.test]",
            f'address = "127.0.0.1:{self.port}"',
        )
        (self.folder / "home" / "config.toml").write_text("\n".join((*head, *lines)) + "\n")

    def start(self, *command: str) -> None:
        """Start a server, which writes to a log named after it."""
        with (self.folder / f"{len(self.running)}-{command[0]}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)

    def flwr(self, *arguments: str, timeout: float = 60) -> str:
        done = subprocess.run(
            ["flwr", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout + done.stderr

    def wait(self, *command: str, until: Callable[[str], bool] = lambda _: True) -> None:
        """Wait until ``flwr`` with these arguments succeeds and prints the expected text."""
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline and all(p.poll() is None for p in self.running), (
                self.logs()
            )
            with suppress(AssertionError, subprocess.TimeoutExpired):
                if until(self.flwr(*command)):
                    return
            time.sleep(0.5)

    def logs(self) -> str:
        return "\n".join(
            f"=== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log"))
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def under_flower(
    flower: Processes, arguments: str, *options: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Run the example under Flower; return the resulting model and table."""
    run = flower.folder / "run"
    config = f'flsuite-args="{arguments} --run_dir {run}"'
    said = flower.flwr(
        "run", str(EXAMPLE), "test", "--stream", "--run-config", config, *options, timeout=600
    )
    assert (run / "checkpoints" / "model.ckpt").exists(), said + flower.logs()
    return left_in(run)
