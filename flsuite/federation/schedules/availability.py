"""Client availability, and dropout during fits."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from flsuite.common.arguments import BelowOne, PositiveFloat, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.federation.schedules.base import Availability
from flsuite.federation.schedules.traces import (
    check_clients,
    client_bounds,
    read_trace,
    trace_digest,
)

_TICK = 1e-9  # seconds, the clock's resolution; the last tick of an interval counts as passed


@dataclass
class Bernoulli(Availability, Settings):
    """All clients are always available, and each fit is lost with the same probability.

    A client drops out at a uniformly drawn fraction of the fit's duration. If durations are
    measured, it drops out at the start.

    Args:
        dropout: Probability in [0, 1) that a client drops out of a fit.
    """

    dropout: BelowOne = 0.1

    def configure(self, clients: int, seed: int) -> None:
        self._seed = seed

    def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
        rng = numpy_generator(self._seed, "availability", number, client)
        drops_out = rng.random() < self.dropout
        return started + rng.random() * seconds if drops_out else None


@dataclass
class OnOff(Availability, Settings):
    """Clients come and go by a trace.

    The trace is a CSV file with a header and the columns ``client``, ``start`` and ``end``. Each
    row is an interval ``[start, end)`` in virtual seconds in which the client is available. A
    client without a row is never available. A client drops out of a fit that would outlast its
    interval. If durations are measured, no client drops out.

    Args:
        path: The CSV file.
        period: Virtual seconds after which the trace repeats, at least its last ``end``. Default:
            it does not repeat, and no client is available after its end.

    Raises:
        FlsuiteError: If ``period`` is too short, or the file is not a valid trace.
    """

    path: str | Path
    period: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows = read_trace(self.path, ("client", "start", "end"))
        self.content_digest = trace_digest(self._rows)

        last_end = float(self._rows["end"].max())
        if self.period is not None and self.period < last_end:
            raise FlsuiteError(
                f"OnOff: period must be at least {last_end:.15g}, the last end in "
                f"{self.path}, got {self.period}"
            )

    def configure(self, clients: int, seed: int) -> None:
        owners = self._rows["client"]
        check_clients(self.path, owners, clients)

        # Sorted by client and start. Without empty intervals, where no client is available.
        order = np.lexsort((self._rows["start"], owners))
        order = order[self._rows["start"][order] < self._rows["end"][order]]
        starts, ends = self._rows["start"][order], self._rows["end"][order]
        bounds = client_bounds(owners[order], clients)
        self._intervals = [
            _joined(starts[first:last], ends[first:last]) for first, last in pairwise(bounds)
        ]

        # All intervals sorted by start, to find the open ones at a given time.
        counts = [len(client_starts) for client_starts, _ in self._intervals]
        owners = np.repeat(np.arange(clients), counts)
        starts = np.concatenate([client_starts for client_starts, _ in self._intervals])
        ends = np.concatenate([client_ends for _, client_ends in self._intervals])
        by_start = np.argsort(starts, kind="stable")
        self._owners, self._starts, self._ends = owners[by_start], starts[by_start], ends[by_start]

    def available(self, seconds: float) -> np.ndarray:
        _, phase = self._cycle(seconds)
        begun = np.searchsorted(self._starts, phase, side="right")
        is_open = self._ends[:begun] > phase + _TICK

        available = np.zeros(len(self._intervals), dtype=bool)
        available[self._owners[:begun][is_open]] = True
        return available

    def next_start(self, seconds: float) -> float | None:
        cycle, phase = self._cycle(seconds)
        following = int(np.searchsorted(self._starts, phase, side="right"))
        if following == len(self._starts):
            if self.period is None or not len(self._starts):
                return None
            cycle, following = cycle + 1, 0

        begin, start = self._begin(cycle), float(self._starts[following])
        time = begin + start
        # Rounding of the sum may yield a time before the interval's start.
        while time - begin < start:
            time = math.nextafter(time, math.inf)
        return time

    def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
        cycle, phase = self._cycle(started)
        starts, ends = self._intervals[client]
        at = int(np.searchsorted(starts, phase, side="right")) - 1
        if at < 0 or ends[at] <= phase + _TICK:
            return started  # not available at the start either

        end = self._begin(cycle) + float(ends[at])
        # An interval that ends with the trace continues if the trace repeats with one at 0.
        if ends[at] == self.period and starts[0] == 0:
            if ends[0] == self.period:
                return None
            end += float(ends[0])
        return max(started, end) if end < started + seconds else None

    def _cycle(self, seconds: float) -> tuple[int, float]:
        """Return the number of the trace's repetition, and the seconds since it began."""
        if self.period is None:
            return 0, seconds
        cycle = math.floor(seconds / self.period)
        # Due to rounding, the quotient and the product may disagree by one.
        if self._begin(cycle) > seconds:
            cycle -= 1
        elif self._begin(cycle + 1) <= seconds:
            cycle += 1
        return cycle, seconds - self._begin(cycle)

    def _begin(self, cycle: int) -> float:
        """Return the virtual time at which a repetition of the trace begins."""
        return 0.0 if self.period is None else cycle * self.period


def _joined(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge one client's intervals that overlap or touch.

    Args:
        starts: Ascending, ``(intervals,)``.
        ends: ``(intervals,)``.
    """
    if not len(starts):
        return starts, ends
    reach = np.maximum.accumulate(ends)
    is_apart = starts[1:] > reach[:-1]
    return starts[np.append(True, is_apart)], reach[np.append(is_apart, True)]
