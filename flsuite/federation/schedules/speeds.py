"""How long a fit takes on the virtual clock."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, Range, Settings, Share
from flsuite.common.random import numpy_generator
from flsuite.federation.schedules.base import Speeds, Work

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

    def seconds(self, work: Work) -> float:
        rng = numpy_generator(self._seed, "speeds/fit", work.number, work.client)
        # Drawn first, so a fit has the same jitter with and without per_fit.
        jitter = rng.uniform(0, self.jitter)

        base = self._fixed[work.client]
        if self.per_fit:
            base = rng.uniform(self._low[work.client], self._high[work.client])
        return float(base + jitter)


@dataclass
class LogNormal(Speeds, Settings):
    """Log-normal seconds per fit: most are near the median, a few are long.

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

    def seconds(self, work: Work) -> float:
        z = self._z[work.client]
        if self.per_fit:
            rng = numpy_generator(self._seed, "speeds/fit", work.number, work.client)
            z = rng.standard_normal()
        return float(self.median * np.exp(self.sigma * z))


@dataclass
class PerSample(Speeds, Settings):
    """Seconds in proportion to the work: the samples of a fit, and the bytes sent and received.

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

    def seconds(self, work: Work) -> float:
        computing = work.samples * self.seconds_per_sample
        receiving = work.bytes_down * self.seconds_per_byte_down
        sending = work.bytes_up * self.seconds_per_byte_up
        return float(self._factors[work.client] * (computing + receiving + sending))
