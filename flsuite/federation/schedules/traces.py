"""Traces: CSV files with timings of real devices."""

from pathlib import Path

import numpy as np

from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.data.datasets.csv_files import (
    digest_of_columns,
    read_columns,
    refuse_cells,
    whole_numbers,
)
from flsuite.federation.schedules.base import Fit, Speeds


class Trace(Speeds):
    """Durations of fits from a CSV file with a header and one of two sets of columns.

    Take it if you have measured durations.

    ``client`` and ``seconds``: each row is a fit. With several rows per client, one of them is
    drawn for each fit.

    ``client``, ``start`` and ``end``, in virtual seconds: a fit takes ``end - start`` of the
    client's first row whose ``start`` is not before the start of the fit. After the last ``end`` of
    the file, the whole trace repeats.

    Every client needs a row.

    Args:
        path: The CSV file.

    Raises:
        FlsuiteError: If the file is not a valid trace.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        rows = read_trace(path, ("client", "seconds"), ("client", "start", "end"))
        self.content_digests = {"path": digest_of_columns(rows)}
        self._owners = rows["client"]
        self._is_timed = "start" in rows

        if self._is_timed:
            self._starts, self._durations = rows["start"], rows["end"] - rows["start"]
            self._length = float(rows["end"].max())
        else:
            self._starts, self._durations = np.zeros_like(rows["seconds"]), rows["seconds"]
        if self._is_timed and self._length == 0:
            raise FlsuiteError(f"{path}: the last end must be above 0; correct column 'end'")

    def configure(self, clients: int, seed: int) -> None:
        self._seed = seed
        check_clients(self.path, self._owners, clients)
        without_rows = np.setdiff1d(np.arange(clients), self._owners)
        if len(without_rows):
            raise FlsuiteError(
                f"{self.path} has no row for client {without_rows[0]:.0f}; add one, or lower the "
                "number of clients"
            )

        # Sorted by client and start. The sort is stable for rows with the same start.
        self._order = np.lexsort((self._starts, self._owners))
        self._bounds = client_bounds(self._owners[self._order], clients)

    def seconds(self, fit: Fit) -> float:
        first, last = self._bounds[fit.client : fit.client + 2]
        rows = self._order[first:last]
        if self._is_timed:
            following = np.searchsorted(self._starts[rows], fit.started % self._length)
            # After the client's last start, the trace repeats from its first one.
            row = rows[following % len(rows)]
        else:
            row = numpy_generator(self._seed, "speeds/fit", fit.number, fit.client).choice(rows)
        return float(self._durations[row])


def read_trace(path: str | Path, *layouts: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the columns of a trace as float64, in the order of its rows.

    Args:
        path: A CSV file with a header. A relative path is relative to the working directory.
        layouts: The accepted sets of columns, in any order. The first column contains client
            numbers. The others contain seconds. An ``end`` must not precede its ``start``.

    Raises:
        FlsuiteError: If the file is missing, empty or unreadable, has other columns, or has an
            invalid cell. Rows are counted from 1 below the header.
    """
    columns = read_columns(path, *layouts)
    file = Path(path).expanduser()
    whole_numbers(columns, "client", file)
    if "end" in columns:
        ends = columns["end"]
        refuse_cells(ends < columns["start"], ends, file, "end", "at least the row's 'start'")
    return columns


def check_clients(path: str | Path, owners: np.ndarray, clients: int) -> None:
    """Refuse a trace with a client that the run does not have."""
    expected = f"a number below {clients}, the number of clients"
    refuse_cells(owners >= clients, owners, Path(path), "client", expected)


def client_bounds(owners: np.ndarray, clients: int) -> np.ndarray:
    """Return the offsets of each client's rows, and the number of rows, ``(clients + 1,)``.

    Args:
        owners: The client of each row, ascending.
        clients: Number of clients.
    """
    return np.searchsorted(owners, np.arange(clients + 1))
