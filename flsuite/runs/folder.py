"""What a run leaves behind: one folder, readable without flsuite."""

import contextlib
import csv
import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from flsuite.data.federated import FederatedData
from flsuite.data.tasks import TaskData
from flsuite.errors import FlsuiteError

__all__ = [
    "COLUMNS",
    "TASK_COLUMNS",
    "MetricsTable",
    "RunFolder",
    "atomic_save",
    "make_folder",
    "new_run_dir",
    "partition_rows",
    "task_rows",
    "write_pictures",
    "write_predictions",
]

TASK_COLUMNS = ("client", "task", "first_round", "class", "samples")
COLUMNS = ("round", "virtual_s", "wall_s", "scope", "split", "metric", "value")
_PACKAGES = ("flsuite", "torch", "lightning", "torchmetrics", "numpy", "medmnist", "torchvision", "wandb")

Row = tuple[int, float, float, str, str, str, float]


def new_run_dir(name: str, seed: int, parent: str | Path = "runs") -> Path:
    """``runs/<name>/<time>-<seed>``, with a number behind it where two runs start in the same second."""
    stem = Path(parent) / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    candidates: Iterator[Path] = (stem.with_name(f"{stem.name}-{n}") if n else stem for n in range(1000))
    return next(path for path in candidates if not path.exists())


def make_folder(path: Path) -> Path:
    """Make the folder where it is missing, with all above it.

    Raises:
        FlsuiteError: If that cannot be done.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlsuiteError(f"cannot write to {path}: {error.strerror}") from error
    return path


def atomic_save(write: Any, path: Path) -> None:
    """Have ``write(temporary_path)`` make the file, then rename it into place: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


class MetricsTable:
    """The tidy table of a run, appended a round at a time.

    Attributes:
        rows: Everything closed so far.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._open: list[tuple[str, str, str, float]] = []
        self._written = 0

    def create(self, again: bool = False) -> None:
        """Begin the file; only ``again`` may take the place of one that is there."""
        if self.path is not None:
            with self.path.open("w" if again else "x") as file:
                file.write(",".join(COLUMNS) + "\n")

    def resume(self, size: int) -> None:
        """Go on behind byte ``size``, and forget what a killed run wrote after it."""
        assert self.path is not None
        with self.path.open("r+") as file:
            file.truncate(size)
        with self.path.open(newline="") as file:
            self.rows = [_row(cells) for cells in list(csv.reader(file))[1:]]
        self._written = len(self.rows)

    def note(self, scope: str, split: str, numbers: Mapping[str, float]) -> None:
        """Numbers of the current round."""
        self._open.extend((scope, split, metric, float(value)) for metric, value in numbers.items())

    def close_round(self, round: int, virtual: float, wall: float) -> dict[str, float]:
        """Turn the notes into rows; the same numbers as ``<split>/<metric>`` and ``client/<number>/<split>/<metric>``."""
        self.rows.extend((round, virtual, wall, *note) for note in self._open)
        named = {
            f"{split}/{metric}" if scope == "global" else f"client/{scope}/{split}/{metric}": value
            for scope, split, metric, value in self._open
        }
        self._open = []
        return named

    def flush(self) -> int:
        """Write what is new; the file's size in bytes."""
        if self.path is None:
            return 0
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(_cells(row) for row in self.rows[self._written :])
        self._written = len(self.rows)
        return self.path.stat().st_size


class RunFolder:
    """Config, partition, versions, metrics and checkpoints of one run; with no path, nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.table = MetricsTable(path / "metrics.csv" if path else None)
        self._made: list[Path] = []

    @property
    def checkpoints(self) -> Path | None:
        return self.path / "checkpoints" if self.path else None

    def create(self, config: dict[str, Any] | str, data: FederatedData, again: bool = False) -> None:
        """Begin a new run; ``again`` starts over one that was killed before its first checkpoint.

        Raises:
            FlsuiteError: If the folder holds another run.
        """
        if self.path is None:
            return
        if not again and (self.path / "metrics.csv").exists():
            raise FlsuiteError(
                f"{self.path} already holds a run: resume it with --ckpt_path last, or name another folder with --run_dir"
            )
        assert self.checkpoints is not None
        self._made = [folder for folder in (self.checkpoints, *self.checkpoints.parents) if not folder.exists()]
        make_folder(self.checkpoints)
        self.write_config(config)
        (self.path / "versions.txt").write_text(_versions())
        with (self.path / "partition.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["client", "split", "class", "samples"])
            writer.writerows(partition_rows(data))
        if isinstance(data, TaskData):
            with (self.path / "tasks.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([TASK_COLUMNS, *task_rows(data)])
        self.table.create(again)

    def write_config(self, config: dict[str, Any] | str) -> None:
        if self.path is not None:
            text = config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False)
            atomic_save(lambda path: path.write_text(text), self.path / "config.yaml")

    def discard(self) -> None:
        """Take back what :meth:`create` wrote."""
        if self.path is None or not self._made:
            return
        for name in ("config.yaml", "versions.txt", "partition.csv", "tasks.csv", "metrics.csv"):
            (self.path / name).unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def partition_rows(data: FederatedData) -> Iterator[tuple[int, str, str, int]]:
    """Client, split, class name, number of samples (of positives, for a multi-label task)."""
    names = data.spec.class_names or tuple(str(c) for c in range(data.spec.num_classes))
    parts = (
        ("train", data.train.y, data.train_index),
        ("val", data.train.y, data.val_index),
        ("test", data.test.y, data.test_index),
    )
    for client in range(data.clients):
        for split, y, rows in parts:
            own = y[rows[client]]
            counts = torch.bincount(own, minlength=len(names)) if y.ndim == 1 else own.sum(0, dtype=torch.int64)
            yield from ((client, split, name, int(n)) for name, n in zip(names, counts, strict=True))


def task_rows(data: TaskData) -> Iterator[tuple[int, int, int, str, int]]:
    """Client, number of the task, the round it begins with, class name, number of training samples."""
    names = data.spec.class_names or tuple(str(c) for c in range(data.spec.num_classes))
    for client, groups in enumerate(data.sequences):
        counts = data.class_counts(client).tolist()
        for task, (group, start) in enumerate(zip(groups, data.starts, strict=True)):
            yield from ((client, task, start, names[c], counts[c]) for c in group)


def write_predictions(folder: Path, probabilities: Tensor, data: FederatedData) -> Path:
    """``predictions.csv``: sample, target, prediction (classes by number; for labels, the set ones), probabilities."""
    path = folder / "predictions.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sample", "target", "prediction", *(f"p_{c}" for c in range(data.spec.num_classes))])
        for sample, (row, target) in enumerate(zip(probabilities, data.test.y, strict=True)):
            if target.ndim:
                cells = [" ".join(map(str, t.nonzero().flatten().tolist())) for t in (target, row >= 0.5)]
            else:
                cells = [str(int(target)), str(int(row.argmax()))]
            writer.writerow([sample, *cells, *(f"{p:.6f}" for p in row.tolist())])
    return path


def write_pictures(folder: Path, pictures: Mapping[str, Tensor]) -> list[Path]:
    """One PNG each, of grids ``(rows, columns, channels, height, width)`` within [0, 1]."""
    from torchvision.utils import save_image

    paths = []
    for name, grid in pictures.items():
        paths.append(folder / f"{name}.png")
        save_image(_enlarged(grid.flatten(0, 1).clamp(0, 1)), paths[-1], nrow=grid.shape[1])
    return paths


def _enlarged(images: Tensor, least: int = 56) -> Tensor:
    """Small images in whole multiples of their size, pixel for pixel: to be looked at."""
    factor = max(1, -(-least // images.shape[-1]))
    return images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)


def _cells(row: Row) -> tuple[object, ...]:
    round, virtual, wall, scope, split, metric, value = row
    return round, f"{virtual:.3f}", f"{wall:.3f}", scope, split, metric, f"{value:.9g}"


def _row(cells: list[str]) -> Row:
    round, virtual, wall, scope, split, metric, value = cells
    return int(round), float(virtual), float(wall), scope, split, metric, float(value)


def _versions() -> str:
    lines = [f"python {platform.python_version()}", f"platform {platform.platform()}"]
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{package} {metadata.version(package)}")
    return "\n".join(lines) + "\n"
