"""The folder of a run, readable without flsuite."""

import contextlib
import csv
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from flsuite.data.federated import FederatedData
from flsuite.data.task_data import TaskData
from flsuite.errors import FlsuiteError
from flsuite.files import atomic_save, make_folder
from flsuite.runs.partition import PARTITION_COLUMNS, TASK_COLUMNS, partition_rows, task_rows
from flsuite.runs.table import MetricsTable

__all__ = ["RunFolder", "new_run_dir"]

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


def new_run_dir(name: str, seed: int, parent: str | Path = "runs") -> Path:
    """Return ``runs/<name>/<time>-<seed>``, with a number if two runs start in the same second."""
    stem = Path(parent) / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    candidates: Iterator[Path] = (
        stem.with_name(f"{stem.name}-{n}") if n else stem for n in range(1000)
    )
    return next(path for path in candidates if not path.exists())


class RunFolder:
    """Config, settings, partition, versions, metrics and checkpoints of one run.

    Args:
        path: The folder. ``None`` writes nothing.

    Attributes:
        table: The metrics.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.table = MetricsTable(path / "metrics.csv" if path else None)
        self._made: list[Path] = []

    @property
    def checkpoints(self) -> Path | None:
        """Return the folder of the checkpoints, or ``None`` if nothing is written."""
        return self.path / "checkpoints" if self.path else None

    def create(
        self,
        config: dict[str, Any] | str,
        settings: dict[str, Any],
        data: FederatedData,
        overwrite: bool = False,
    ) -> None:
        """Begin a new run.

        Args:
            config: The request of the user, as text or plain data.
            settings: All that decides the result.
            data: The data, whose partition is written.
            overwrite: Start over a run that was killed before its first checkpoint.

        Raises:
            FlsuiteError: If the folder holds another run.
        """
        if self.path is None:
            return
        if not overwrite and (self.path / "metrics.csv").exists():
            raise FlsuiteError(
                f"{self.path} already holds a run: resume it with --ckpt_path last, or name "
                "another folder with --run_dir"
            )
        assert self.checkpoints is not None
        parents = (self.checkpoints, *self.checkpoints.parents)
        # Noted before they are made, so that discard removes these folders only.
        self._made = [folder for folder in parents if not folder.exists()]
        make_folder(self.checkpoints)

        self.write_request(config, settings)
        (self.path / "versions.txt").write_text(_versions())
        _write_csv(self.path / "partition.csv", PARTITION_COLUMNS, partition_rows(data))
        if isinstance(data, TaskData):
            _write_csv(self.path / "tasks.csv", TASK_COLUMNS, task_rows(data))
        self.table.create(overwrite)

    def write_request(self, config: dict[str, Any] | str, settings: dict[str, Any]) -> None:
        """Write ``config.yaml`` and ``settings.yaml``.

        A resumed run writes them again, because it may have more rounds.
        """
        if self.path is None:
            return
        for name, content in (("config.yaml", config), ("settings.yaml", settings)):
            is_text = isinstance(content, str)
            text = content if is_text else yaml.safe_dump(content, sort_keys=False)
            _write_text(self.path / name, str(text))

    def discard(self) -> None:
        """Remove what :meth:`create` made, and what loggers have put into a new folder."""
        if self.path is None or not self._made:
            return

        if self.path in self._made:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            # The folder was there before: other files in it are the user's.
            names = ("config", "settings", "versions", "partition", "tasks", "metrics")
            for path in self.path.iterdir():
                if path.stem in names and path.suffix in (".yaml", ".csv", ".txt"):
                    path.unlink()

        for folder in self._made:
            # A folder that still has files stays.
            with contextlib.suppress(OSError):
                folder.rmdir()


def _write_text(path: Path, text: str) -> None:
    atomic_save(lambda temporary: temporary.write_text(text), path)


def _write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _versions() -> str:
    lines = [f"python {platform.python_version()}", f"platform {platform.platform()}"]
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{package} {metadata.version(package)}")
    return "\n".join(lines) + "\n"
