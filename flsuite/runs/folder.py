"""The folder of a run, readable without flsuite."""

import contextlib
import json
import platform
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from flsuite.aggregators.attacks.base import Attack
from flsuite.common.errors import FlsuiteError, log
from flsuite.common.files import csv_of, locked, make_folder, replace_file, replace_text
from flsuite.common.turns import companions
from flsuite.data.federated import FederatedData
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.partition import task_table, write_partition
from flsuite.runs.record import first_round
from flsuite.runs.table import MetricsTable, TimelineTable, mark_of

_STORES = ("checkpoints", "clients", "in_flight")  # clients' memories, versions in flight
_FILES = (
    "config.yaml",
    "settings.yaml",
    "versions.txt",
    "partition.csv",
    "tasks.csv",
    "attackers.json",
    "metrics.csv",
    "timeline.csv",
    "errors/*.txt",
    "checkpoints/*.ckpt",
    "checkpoints/*.pt",
    "clients/*.pt",
    "in_flight/*.pt",
)
_HOLDS_A_RUN = (
    "{} already holds a run: resume it with --ckpt_path last, or name another folder with --run_dir"
)
TOGETHER = "together"  # in versions.txt: with how many runs of the same process it trained
_PACKAGES = (
    "flsuite",
    "torch",
    "lightning",
    "torchmetrics",
    "numpy",
    "medmnist",
    "torchvision",
    "wandb",
)


def new_run_dir(name: str, seed: int) -> Path:
    """Return ``runs/<name>/<time>-<seed>``, with milliseconds so that two runs do not collide."""
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now % 1 * 1000):03d}"
    return Path("runs") / name / f"{stamp}-{seed}"


class RunFolder:
    """Config, settings, partition, versions, metrics and checkpoints of one run.

    Args:
        path: The folder. ``None`` writes nothing.

    Attributes:
        checkpoints: The folder of the checkpoints, or ``None`` if nothing is written.
        table: The metrics.
        timeline: The fits and their times.
        tables: Both, by their names in checkpoints.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.checkpoints = self.inside("checkpoints")
        self.table = MetricsTable(path / "metrics.csv" if path else None)
        self.timeline = TimelineTable(path / "timeline.csv" if path else None)
        self.tables = {"table": self.table, "timeline": self.timeline}
        self._made: list[Path] = []
        self._is_new = False

    def inside(self, name: str) -> Path | None:
        """Return a path in the folder, or ``None`` if the run writes nothing."""
        return self.path / name if self.path else None

    def find_checkpoint(self, ckpt_path: str | None) -> Path | None:
        """Return the file of a requested checkpoint, or ``None`` if there is none to resume."""
        if ckpt_path not in ("last", "best"):
            return None if ckpt_path is None else Path(ckpt_path)
        if self.checkpoints is None:
            raise FlsuiteError(
                f"ckpt_path {ckpt_path} refers to a file in the run's folder, but "
                "trainer.enable_checkpointing is false"
            )

        path = self.checkpoints / f"{ckpt_path}.ckpt"
        return path if path.exists() or ckpt_path == "best" else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent other processes from writing to this run until the context ends.

        Raises:
            FlsuiteError: If another process writes to it.
        """
        if self.path is None or not self.path.is_dir():
            yield
            return
        with locked(self.path) as is_ours:
            if is_ours is False:
                raise FlsuiteError(
                    f"another process is writing to {self.path}; wait for it, or name another "
                    "folder with --run_dir"
                )
            if is_ours is None:
                log.warning(
                    "the disk of %s has no locks: do not start a second run in it", self.path
                )
            yield

    def make(self) -> None:
        """Create the folder of a new run, before it is locked and filled.

        Existing files are checked later, under the lock, because another run may be starting in the
        folder at this moment.

        Raises:
            FlsuiteError: If the folder cannot be created.
        """
        if self.checkpoints is None:
            return
        run = self.checkpoints.parent
        folders = (*(run / name for name in _STORES), run, *run.parents)
        self._made = [folder for folder in folders if not folder.exists()]
        make_folder(self.checkpoints)

    def create(
        self,
        config: dict[str, Any] | str,
        settings: dict[str, Any],
        data: FederatedData,
        overwrite: bool = False,
        attack: Attack | None = None,
    ) -> None:
        """Start a new run in a folder that exists and is locked.

        Args:
            config: The user's request, as text or plain data.
            settings: All settings that determine the result.
            data: The data, whose partition is written.
            overwrite: Restart a run that was killed before its first checkpoint.
            attack: The attack, if any. Its attackers are written.

        Raises:
            FlsuiteError: If the folder holds another run, a run whose checkpoint is lost, or files
                that a run would replace.
        """
        if self.path is None:
            return
        is_restart = overwrite and (self.path / "metrics.csv").exists()
        if is_restart:
            self._refuse_lost_checkpoint(first_round(settings))
        elif reason := self._reason_to_refuse():
            self._remove_empty()
            raise FlsuiteError(reason)
        # The table comes first: on a disk without locks, it reserves the folder.
        self._is_new = not is_restart
        try:
            self.table.create(is_restart)
        except FileExistsError as error:
            self._is_new = False
            raise FlsuiteError(_HOLDS_A_RUN.format(self.path)) from error
        self.timeline.create(overwrite=True)
        (self.path / "versions.txt").write_text(versions(), encoding="utf-8")
        self.write_request(config, settings)
        self.write_clients(data, attack)

    def write_clients(self, data: FederatedData, attack: Attack | None) -> None:
        """Write what the clients hold and which of them attack, as the settings determine it.

        A resumed run writes it again, because the files may be damaged.
        """
        if self.path is None:
            return

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as file:
                write_partition(file, data)

        replace_file(write, self.path / "partition.csv")
        if data.sequences:
            replace_text(csv_of(task_table(data)), self.path / "tasks.csv")
        if attack is not None:
            kind = type(attack).__name__
            who = {"attack": kind, "attackers": attack.attackers, "clients": data.clients}
            replace_text(json.dumps(who) + "\n", self.path / "attackers.json", flush=True)

    def keep_error(self, round: int, text: str) -> None:
        """Write the tracebacks of a round to ``errors/round-ROUND.txt``, if there are any."""
        if (folder := self.inside("errors")) is None or not text:
            return
        if not folder.exists():
            self._made.insert(0, folder)
        replace_text(text, make_folder(folder) / f"round-{round}.txt")

    def forget_errors(self, round: int) -> None:
        """Remove the tracebacks of the rounds after a round, which are repeated."""
        for path in self.path.glob("errors/round-*.txt") if self.path else ():
            number = path.stem.removeprefix("round-")
            if number.isdecimal() and int(number) > round:
                path.unlink()

    def require_tables(self) -> None:
        """Refuse tables that are not the ones that the last checkpoint was written with, if any.

        Raises:
            FlsuiteError: If one is missing or was changed.
        """
        last = self.find_checkpoint("last")
        if last is None:
            return
        checkpoint = load_checkpoint(last)
        for name, table in self.tables.items():
            table.content(*mark_of(checkpoint, name))

    def write_request(self, config: dict[str, Any] | str, settings: dict[str, Any]) -> None:
        """Write ``config.yaml`` and ``settings.yaml``, and note with how many runs it trains.

        A resumed run writes them again, because it may have more rounds.
        """
        if self.path is None:
            return
        text = config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False)
        replace_text(text, self.path / "config.yaml", flush=True)
        text = yaml.safe_dump(settings, sort_keys=False)
        replace_text(text, self.path / "settings.yaml", flush=True)
        if (runs := companions()) > 1:  # their stack rounds otherwise than one of this run alone
            with (self.path / "versions.txt").open("a", encoding="utf-8") as file:
                file.write(f"{TOGETHER} {runs}\n")

    def discard(self) -> None:
        """Remove the files of a new run, files of loggers in a new folder, and empty folders."""
        if self._is_new and self.path in self._made:
            shutil.rmtree(self.path, ignore_errors=True)
        for path in self._files() if self._is_new else ():
            path.unlink()
        self._remove_empty()

    def _files(self) -> list[Path]:
        """Return the files in the folder that a run writes, or a user's files of these names."""
        return [path for name in _FILES for path in self.path.glob(name)] if self.path else []

    def _remove_empty(self) -> None:
        """Remove the empty folders that :meth:`make` created."""
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _refuse_lost_checkpoint(self, first: int) -> None:
        """Refuse to restart a run that has lost its checkpoint.

        The rows of a run's second round are written after the checkpoint of its first.

        Args:
            first: The first round of the run itself. Earlier ones are its parent's.
        """
        path = self.table.path
        if path is None or not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            firsts = {line.split(",", 1)[0] for line in file}
        rounds = max((int(cell) for cell in firsts if cell.isdecimal()), default=0)
        if rounds > first:
            raise FlsuiteError(
                f"{self.path} has {rounds} rounds but no checkpoints/last.ckpt: restore it, "
                "continue from the picked round with --ckpt_path best, or name another folder with "
                "--run_dir"
            )

    def _reason_to_refuse(self) -> str | None:
        """Return the reason why a new run must not use the folder, or ``None``.

        The folder may hold another run, or user files that would be replaced.
        """
        assert self.path is not None
        assert self.checkpoints is not None
        names = [path.relative_to(self.path) for path in self._files()]
        # Checked after the other files: on a disk without locks, a new run writes it first.
        if (self.path / "metrics.csv").exists() or (self.checkpoints / "last.ckpt").exists():
            return _HOLDS_A_RUN.format(self.path)
        if not names:
            return None
        return (
            f"{self.path} has a file {names[0]} that a run would replace; name "
            "another folder with --run_dir"
        )


def versions() -> str:
    """Return the versions of Python and packages, the kind of CPU, and torch's threads, by line."""
    lines = [
        f"python {platform.python_version()}",
        f"platform {platform.platform()}",
        f"cpu {torch.backends.cpu.get_cpu_capability()}",
        f"threads {torch.get_num_threads()}",
    ]
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{package} {metadata.version(package)}")
    return "\n".join(lines) + "\n"
