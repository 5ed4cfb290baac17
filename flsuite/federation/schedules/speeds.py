"""How long a fit takes on the virtual clock, and when clients are available."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np

from flsuite.common.arguments import (
    BelowOne,
    NonNegativeFloat,
    PositiveFloat,
    Range,
    Settings,
    Share,
)
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.data.datasets.csv_files import digest_of_columns
from flsuite.federation.schedules.base import Availability, Fit, Speeds
from flsuite.federation.schedules.traces import check_clients, client_bounds, read_trace

_Seconds = Annotated[
    tuple[float, float],
    Range(
        "two numbers of seconds, at least 0, the lower one first",
        lambda seconds: len(seconds) == 2 and 0 <= seconds[0] <= seconds[1] < math.inf,
    ),
]


@dataclass
class Stragglers(Speeds, Settings):
    """A fraction of the clients is slow, and the others are fast.

    Take it if there are two kinds of clients.

    The same clients are slow throughout a run.

    Args:
        fraction: Fraction of slow clients, in [0, 1]. Their number is rounded half up.
        fast: The lowest and the highest seconds per fit of a fast client.
        slow: The lowest and the highest seconds per fit of a slow client.
        jitter: Maximum of the uniform random seconds added to each fit.
        per_fit: Whether a client's seconds are drawn for each fit, from its range. Default: once
            per run.
    """

    fraction: Share = 0.3
    fast: _Seconds = (0.0, 0.2)
    slow: _Seconds = (0.8, 2.0)
    jitter: NonNegativeFloat = 0.1
    per_fit: bool = False

    def configure(self, clients: int, seed: int) -> None:
        self._seed = seed
        rng = numpy_generator(seed, "speeds")
        # Rounded half up. round() would round 0.5 and 2.5 to an even number.
        slow_clients = rng.choice(clients, int(self.fraction * clients + 0.5), replace=False)

        self._low = np.full(clients, self.fast[0], dtype=np.float64)
        self._high = np.full(clients, self.fast[1], dtype=np.float64)
        self._low[slow_clients], self._high[slow_clients] = self.slow
        self._fixed = rng.uniform(self._low, self._high)

    def seconds(self, fit: Fit) -> float:
        rng = numpy_generator(self._seed, "speeds/fit", fit.number, fit.client)
        # Drawn first, so a fit has the same jitter with and without per_fit.
        jitter = rng.uniform(0, self.jitter)

        base = self._fixed[fit.client]
        if self.per_fit:
            base = rng.uniform(self._low[fit.client], self._high[fit.client])
        return float(base + jitter)


@dataclass
class LogNormal(Speeds, Settings):
    """Log-normal seconds per fit: most are near the median, a few are long.

    Take it if most clients are alike and a few are slow.

    A fit takes ``median * exp(sigma * z)`` seconds, with ``z`` standard normal.

    Args:
        median: Median of the seconds per fit.
        sigma: Standard deviation of their logarithm. With 0, every fit takes ``median`` seconds.
        per_fit: Whether ``z`` is drawn for each fit. Default: once per client and run.
    """

    median: PositiveFloat = 1.0
    sigma: NonNegativeFloat = 0.5
    per_fit: bool = False

    def configure(self, clients: int, seed: int) -> None:
        self._seed = seed
        self._z = numpy_generator(seed, "speeds").standard_normal(clients)

    def seconds(self, fit: Fit) -> float:
        z = self._z[fit.client]
        if self.per_fit:
            rng = numpy_generator(self._seed, "speeds/fit", fit.number, fit.client)
            z = rng.standard_normal()
        return float(self.median * np.exp(self.sigma * z))


@dataclass
class PerSample(Speeds, Settings):
    """Seconds in proportion to the work: the samples of a fit, and the bytes sent and received.

    Take it if slow clients are those with many samples or a thin line.

    A fit takes ``factor * (samples * seconds_per_sample + bytes_down * seconds_per_byte_down +
    bytes_up * seconds_per_byte_up)`` seconds. Each client has a fixed log-normal ``factor`` with
    median 1 for the whole run.

    The seconds per byte are the inverse of the bandwidth in bytes per second. 1 MB/s is 1e-6
    seconds per byte, 10 MB/s is 1e-7, and 1 Mbit/s is 8e-6.

    Args:
        seconds_per_sample: Seconds per training sample. A sample counts once per local epoch.
        seconds_per_byte_down: Seconds per byte that the client receives. Default: 0.
        seconds_per_byte_up: Seconds per byte that the client sends. Default: 0.
        spread: Standard deviation of the logarithm of ``factor``. With 0, all clients are equally
            fast.
    """

    seconds_per_sample: NonNegativeFloat = 0.001
    seconds_per_byte_down: NonNegativeFloat = 0.0
    seconds_per_byte_up: NonNegativeFloat = 0.0
    spread: NonNegativeFloat = 0.0

    def configure(self, clients: int, seed: int) -> None:
        z = numpy_generator(seed, "speeds").standard_normal(clients)
        self._factors = np.exp(self.spread * z)

    def seconds(self, fit: Fit) -> float:
        computing = fit.samples * self.seconds_per_sample
        receiving = fit.bytes_down * self.seconds_per_byte_down
        sending = fit.bytes_up * self.seconds_per_byte_up
        return float(self._factors[fit.client] * (computing + receiving + sending))


_TICK = 1e-9  # seconds, the clock's resolution; the last tick of an interval counts as passed


@dataclass
class Bernoulli(Availability, Settings):
    """All clients are always available, and each fit is lost with the same probability.

    Take it if fits are lost at random.

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

    Take it if you have a trace of who was there when.

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
        self.content_digests = {"path": digest_of_columns(self._rows)}

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
