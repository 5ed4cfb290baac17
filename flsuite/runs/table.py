"""The tables of a run, which grow round by round."""

import csv
import hashlib
import io
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import escaped, naming, unescaped
from flsuite.federation.schedules.base import Clock
from flsuite.federation.server.federation import Federation


class _AppendedTable:
    """A CSV file to which each round appends its rows.

    Attributes:
        path: The file. ``None`` writes nothing.
    """

    columns: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._unwritten: list[tuple[object, ...]] = []
        self._cut_at: int | None = None
        self._sha256 = hashlib.sha256()  # of all that is written

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the content, known without reading the file again."""
        return self._sha256.hexdigest()

    def create(self, overwrite: bool = False) -> None:
        """Write the header.

        Raises:
            FileExistsError: If the file exists, unless ``overwrite`` allows replacing it.
        """
        if self.path is not None:
            header = (",".join(self.columns) + "\n").encode()
            with naming(self.path), self.path.open("wb" if overwrite else "xb") as file:
                file.write(header)
            self._sha256 = hashlib.sha256(header)

    def content(self, size: int, digest: str | None) -> bytes:
        """Return the content of the file when a checkpoint was written.

        Args:
            size: Its size in bytes. A killed run may have written more.
            digest: Its SHA-256. Checkpoints of earlier versions have none.

        Raises:
            FlsuiteError: If the file is missing, shorter, or was changed.
        """
        assert self.path is not None
        if not self.path.is_file():
            raise FlsuiteError(f"{self.path} is missing; restore it, or start a new run")
        with self.path.open("rb") as file:
            content = file.read(size)
        if len(content) < size:
            raise FlsuiteError(
                f"{self.path} has {len(content)} bytes, but had {size} when the checkpoint was "
                "written; restore the file, or start a new run"
            )
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise FlsuiteError(
                f"{self.path} was changed after the checkpoint was written; restore the file, or "
                "start a new run"
            )
        return content

    def resume(self, size: int, digest: str | None = None) -> None:
        """Continue the file after its content at a checkpoint, see :meth:`content`.

        The excess of a killed run is cut off when the first round is appended.

        Raises:
            FlsuiteError: If the file is shorter, was changed or has other columns.
        """
        content = self.content(size, digest)
        header, *lines = content.decode(errors="replace").split("\n")
        if header != ",".join(self.columns):
            raise FlsuiteError(
                f"{self.path} has the columns {header}, but this version of flsuite writes "
                f"{','.join(self.columns)}; resume the run with the version that started it, or "
                "start a new run"
            )
        self._read(lines[:-1])
        self._unwritten = []
        self._cut_at = size
        self._sha256 = hashlib.sha256(content)

    def _read(self, lines: list[str]) -> None:
        """Take up the rows of the file, if the table needs them."""

    def append(self) -> int:
        """Write the new rows and return the size of the file in bytes."""
        if self.path is None:
            self._unwritten = []
            return 0
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self._unwritten)
        content = text.getvalue().encode()
        with naming(self.path):
            if self._cut_at is not None:  # later rows belong to rounds that are repeated
                os.truncate(self.path, self._cut_at)
                self._cut_at = None
            with self.path.open("ab") as file:
                file.write(content)
        self._sha256.update(content)
        self._unwritten = []
        return self.path.stat().st_size


def mark_of(checkpoint: Mapping[str, Any], name: str) -> tuple[int, str | None]:
    """Return the size and the digest of a table at a checkpoint.

    Args:
        checkpoint: The content of the checkpoint.
        name: The table's name in it.
    """
    return checkpoint[name], checkpoint.get("digests", {}).get(name)


class _MetricsRow(NamedTuple):
    """One number of a run."""

    round: int
    virtual_s: float
    wall_s: float
    client_updates: int
    bytes: int
    scope: str
    split: str
    metric: str
    value: float


_Time = tuple[int, float, float, int, int]
_Name = tuple[str, str, str]  # scope, split, metric


class MetricsTable(_AppendedTable):
    """All numbers of a run, one per row.

    Rows of closed rounds are stored in 16 bytes each, because a long run has millions of them.

    Attributes:
        latest: The last value of each global number, as ``<split>/<metric>``.
    """

    columns = _MetricsRow._fields

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self._open: list[tuple[str, str, str, float]] = []
        self._clear()

    def _clear(self) -> None:
        self.latest: dict[str, float] = {}
        self._times: list[_Time] = []
        self._names: dict[_Name, int] = {}
        self._time_of, self._name_of, self._values = array("I"), array("I"), array("d")

    def _add(self, time: _Time, name: _Name, value: float) -> None:
        if not self._times or self._times[-1] != time:
            self._times.append(time)
        self._time_of.append(len(self._times) - 1)
        self._name_of.append(self._names.setdefault(name, len(self._names)))
        self._values.append(value)
        scope, split, metric = name
        if scope == "global":
            self.latest[f"{split}/{metric}"] = value

    @property
    def rows(self) -> list[_MetricsRow]:
        """Return the rows of all closed rounds."""
        return list(self)

    def __iter__(self) -> Iterator[_MetricsRow]:
        names = list(self._names)
        for time, name, value in zip(self._time_of, self._name_of, self._values, strict=True):
            yield _MetricsRow(*self._times[time], *names[name], value)

    def by_round(self) -> dict[int, dict[str, float]]:
        """Return the global numbers of each scored round, as ``<split>/<metric>``."""
        rounds: dict[int, dict[str, float]] = {}
        for row in self:
            if row.scope == "global":
                rounds.setdefault(row.round, {})[f"{row.split}/{row.metric}"] = row.value
        return {n: row for n, row in rounds.items() if any(k.startswith("test/") for k in row)}

    def _read(self, lines: list[str]) -> None:
        self._clear()
        for number, cells in enumerate(csv.reader(lines), start=2):
            try:
                round, virtual, wall, updates, bytes, *names, value = cells
                time = int(round), float(virtual), float(wall), int(updates), int(bytes)
                scope, split, metric = map(unescaped, names)
                self._add(time, (scope, split, metric), float(value))
            except ValueError as error:
                raise FlsuiteError(
                    f"{self.path}, line {number}: {one_line(error, 200)}; restore the file, or "
                    "start a new run"
                ) from error

    def note(self, scope: str, split: str, numbers: Mapping[str, float]) -> None:
        """Add numbers to the round in progress."""
        self._open.extend((scope, split, metric, float(value)) for metric, value in numbers.items())

    def close_round(self, clock: Clock, wall: float) -> dict[str, float]:
        """Turn the numbers of the round in progress into rows.

        Args:
            clock: The time of the run at the end of the round.
            wall: Seconds since the start of the run.

        Returns:
            The same numbers as ``<split>/<metric>`` and ``client/<number>/<split>/<metric>``.
        """
        time = (clock.round, clock.seconds, wall, int(clock.client_updates), int(clock.bytes))
        for scope, split, metric, value in self._open:
            self._add(time, (scope, split, metric), value)
        # Once for all rows, because formatting numbers takes most of the table's time.
        cells = (time[0], f"{time[1]:.12g}", f"{time[2]:.3f}", *time[3:])
        self._unwritten.extend(
            (*cells, *map(escaped, name), f"{value:.9g}") for *name, value in self._open
        )

        named = {
            f"{split}/{metric}" if scope == "global" else f"client/{scope}/{split}/{metric}": value
            for scope, split, metric, value in self._open
        }
        self._open = []
        return named


class TimelineRow(NamedTuple):
    """One fit that has ended.

    Attributes:
        fit: Index of the fit in the run.
        client: The client's number.
        version: Version of the global model that the fit started from.
        started_s: Virtual seconds at its start.
        ended_s: Virtual seconds at its end.
        outcome: ``merged``, ``dropped`` (the client dropped out), ``late`` (the round ended without
            it) or ``failed`` (it failed, or its update was refused).
        round: Number of the aggregation that used it.
        merged_s: Virtual seconds at that aggregation.
        staleness: Aggregations between its start and its merge. ``None`` unless it was merged.
        weight: Its weight in the aggregation. ``None`` unless the aggregator records one.
    """

    fit: int
    client: int
    version: int
    started_s: float
    ended_s: float
    outcome: Literal["merged", "dropped", "late", "failed"]
    round: int | None = None
    merged_s: float | None = None
    staleness: int | None = None
    weight: float | None = None


class TimelineTable(_AppendedTable):
    """The timeline of a run, with one row per fit that has ended.

    Rows are dropped from memory once they are written, because a long run has many of them.
    """

    columns = TimelineRow._fields
    _digits: ClassVar = {"started_s": 12, "ended_s": 12, "merged_s": 12, "weight": 9}

    def add(self, rows: Iterable[TimelineRow]) -> None:
        """Add the fits that ended in the round in progress."""
        if self.path is not None:
            self._unwritten.extend(map(self._cells, rows))

    def _cells(self, row: TimelineRow) -> tuple[object, ...]:
        """Return the cells of a row. The csv module writes ``None`` as an empty one."""
        # Virtual times are multiples of a nanosecond. Twelve digits distinguish unequal ones.
        cells = row._asdict() | {
            name: None if (value := getattr(row, name)) is None else f"{value:.{digits}g}"
            for name, digits in self._digits.items()
        }
        return tuple(cells.values())


def timeline_rows(federation: Federation) -> Iterator[TimelineRow]:
    """Yield the fits that ended in the round just done, in clock order.

    A pooled fit does not belong to a client and has no row.
    """
    if federation.aggregator.pools:
        return
    updates = {update.number: update for update in federation.log.updates}
    for fit in federation.schedule.ended:
        assert fit.ended is not None and fit.outcome != "absent"
        cells = fit.number, fit.client, fit.version, fit.started, fit.ended
        update = updates.get(fit.number)
        if update is not None:
            clock, weight = federation.clock, update.metrics.get("weight")
            merged = clock.round, clock.seconds, update.staleness, weight
            yield TimelineRow(*cells, "merged", *merged)
        else:
            # A fit that arrived without an accepted update failed or was refused.
            yield TimelineRow(*cells, "failed" if fit.outcome == "arrived" else fit.outcome)
