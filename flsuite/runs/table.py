"""The tidy table of a run."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from flsuite.errors import FlsuiteError

__all__ = ["COLUMNS", "MetricsTable"]

COLUMNS = ("round", "virtual_s", "wall_s", "scope", "split", "metric", "value")

Row = tuple[int, float, float, str, str, str, float]


class MetricsTable:
    """All numbers of a run, one per row, appended round by round.

    Attributes:
        rows: The rows of all closed rounds.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._open: list[tuple[str, str, str, float]] = []
        self._written = 0
        self._cut_at: int | None = None

    def create(self, overwrite: bool = False) -> None:
        """Write the header.

        Raises:
            FileExistsError: If the file exists, unless ``overwrite`` allows replacing it.
        """
        if self.path is not None:
            with self.path.open("w" if overwrite else "x") as file:
                file.write(",".join(COLUMNS) + "\n")

    def resume(self, size: int) -> None:
        """Go on after byte ``size``.

        A killed run may have written more. It is cut off when the first round is appended.

        Raises:
            FlsuiteError: If the file is shorter.
        """
        assert self.path is not None
        content = self.path.read_bytes() if self.path.is_file() else b""
        if len(content) < size:
            raise FlsuiteError(
                f"{self.path} has {len(content)} bytes, and had {size} when the checkpoint was "
                "written; restore the file, or start a new run"
            )
        lines = content[:size].decode().splitlines()
        self.rows = [_row(cells) for cells in list(csv.reader(lines))[1:]]
        self._written = len(self.rows)
        self._cut_at = size

    def note(self, scope: str, split: str, numbers: Mapping[str, float]) -> None:
        """Add numbers to the round in progress."""
        self._open.extend((scope, split, metric, float(value)) for metric, value in numbers.items())

    def close_round(self, round: int, virtual: float, wall: float) -> dict[str, float]:
        """Turn the numbers of the round in progress into rows.

        Returns:
            The same numbers as ``<split>/<metric>`` and ``client/<number>/<split>/<metric>``.
        """
        self.rows.extend((round, virtual, wall, *numbers) for numbers in self._open)
        named = {
            f"{split}/{metric}" if scope == "global" else f"client/{scope}/{split}/{metric}": value
            for scope, split, metric, value in self._open
        }
        self._open = []
        return named

    def append(self) -> int:
        """Write the new rows and return the size of the file in bytes."""
        if self.path is None:
            return 0
        if self._cut_at is not None:  # rows after the checkpoint are of rounds that are done again
            os.truncate(self.path, self._cut_at)
            self._cut_at = None
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows(_cells(row) for row in self.rows[self._written :])
        self._written = len(self.rows)
        return self.path.stat().st_size


def _cells(row: Row) -> tuple[object, ...]:
    round, virtual, wall, scope, split, metric, value = row
    return round, f"{virtual:.3f}", f"{wall:.3f}", scope, split, metric, f"{value:.9g}"


def _row(cells: list[str]) -> Row:
    round, virtual, wall, scope, split, metric, value = cells
    return int(round), float(virtual), float(wall), scope, split, metric, float(value)
