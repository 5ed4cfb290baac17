"""Client sampling, and the start of fits on the virtual clock."""

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.federation.schedules.base import Always, Amounts, Availability, Clock, Fit, Speeds


class Launcher:
    """Draws clients and starts their fits on the virtual clock.

    Both are functions of the run's seed, the version of the global model and the starts from that
    version so far, so a resumed run draws the same clients.

    Args:
        speeds: How long fits take.
        availability: Which clients can train. Default: all of them.
        sizes, seed, work: The run, see :meth:`Schedule.configure`.

    Attributes:
        fits: Number of fits started in the run so far.
    """

    def __init__(
        self,
        speeds: Speeds,
        availability: Availability | None,
        sizes: Sequence[int],
        seed: int,
        work: Amounts | None,
    ) -> None:
        self.speeds = speeds
        self.availability = availability or Always()
        self.fits = 0
        self._clients = len(sizes)
        self._seed = seed
        self._work = work or (lambda client: (sizes[client], 0, 0))
        self._version, self._starts = -1, Counter[int]()
        self.speeds.configure(self._clients, seed)
        self.availability.configure(self._clients, seed)

    def draw(
        self,
        number: int,
        clock: Clock,
        attempt: int,
        busy: Collection[int] = (),
        weights: np.ndarray | None = None,
    ) -> list[int]:
        """Draw clients that are available and not busy, without replacement, ascending.

        All of them are returned if there are at most ``number``.

        Args:
            number: Number of clients.
            clock: The clock.
            attempt: Number of earlier draws from this version.
            busy: Clients that cannot be drawn.
            weights: Unnormalized probabilities of all clients. Default: equal.
        """
        # A new generator per draw, so a resumed run draws the same clients.
        rng = numpy_generator(self._seed, "cohort", clock.round + 1, attempt)
        mask = self.availability.available(clock.seconds)
        if mask is None and weights is None:
            return self._draw_from_all(number, rng, sorted(busy))

        idle = np.ones(self._clients, dtype=bool) if mask is None else mask.copy()
        idle[list(busy)] = False
        candidates = np.flatnonzero(idle)
        if len(candidates) > number:
            p = None if weights is None else weights[candidates] / weights[candidates].sum()
            candidates = candidates[rng.choice(len(candidates), number, replace=False, p=p)]
        return sorted(candidates.tolist())

    def available(self, clients: Iterable[int], clock: Clock) -> list[int]:
        """Return the clients that can start a fit now, ascending, out of the given ones."""
        mask = self.availability.available(clock.seconds)
        return sorted(client for client in clients if mask is None or mask[client])

    def launch(self, client: int, clock: Clock) -> Fit:
        """Start a fit now.

        Its end and outcome are known at once, unless durations are measured.
        """
        if clock.round != self._version:
            self._version, self._starts = clock.round, Counter()
        fit = Fit(self.fits, client, clock.round, self._starts[client], clock.seconds)
        fit.samples, fit.bytes_down, fit.bytes_up = self._work(client)
        self.fits += 1
        self._starts[client] += 1

        seconds = self.speeds.seconds(fit)
        if seconds is not None and not 0 <= seconds < math.inf:
            raise FlsuiteError(
                f"{type(self.speeds).__name__}: a fit of client {client} takes {seconds} virtual "
                "seconds; it must be a finite number of at least 0"
            )
        leaves = self.availability.leaves(client, fit.number, fit.started, seconds or 0.0)
        if leaves is not None:
            fit.ended, fit.outcome = _tick(leaves), "dropped"
        elif seconds is not None:
            fit.ended = _tick(fit.started + seconds)
        return fit

    def nobody_comes(self, clock: Clock) -> FederationError:
        """Return the error of a run in which no client becomes available again."""
        return FederationError(
            f"round {clock.round + 1}: no client is in flight, and none is available from virtual "
            f"second {clock.seconds:g} on; give schedule.availability a longer trace or a period, "
            f"or end the run earlier: the last aggregation was number {clock.round}"
        )

    def copy(self) -> "Launcher":
        """Return a launcher that goes on from here by itself."""
        twin = copy.copy(self)
        twin._starts = self._starts.copy()
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the number of fits.

        The rest starts anew with each version, and checkpoints are written between versions.
        """
        return {"fits": self.fits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.fits = state["fits"]
        self._version = -1

    def _draw_from_all(self, number: int, rng: np.random.Generator, busy: list[int]) -> list[int]:
        """Draw without an array of all clients, at a cost that depends on the number drawn."""
        idle = self._clients - len(busy)
        ranks = rng.choice(idle, number, replace=False).tolist() if idle > number else range(idle)

        # Convert ranks among idle clients to clients by skipping the busy ones.
        chosen, passed = [], 0
        for rank in sorted(ranks):
            while passed < len(busy) and busy[passed] <= rank + passed:
                passed += 1
            chosen.append(rank + passed)
        return chosen


def _tick(seconds: float) -> float:
    """Return a time rounded to nanoseconds.

    Sums of floats that should be equal then are equal, so ties are detected.
    """
    return round(seconds, 9)
