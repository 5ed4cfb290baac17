"""Rounds in lockstep: a cohort is drawn, all of it trains, and the server waits for the last."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from flsuite.engines.base import Engine
from flsuite.errors import FlsuiteError, require_one_of, require_positive
from flsuite.messages import ClientResult, Outcome
from flsuite.random import numpy_generator
from flsuite.schedules.base import Schedule
from flsuite.schedules.clock import Clock

__all__ = ["Synchronous"]

Sampling = Literal["uniform", "size"]


class Synchronous(Schedule):
    """McMahan et al. 2017, algorithm 1: a random cohort per round, drawn without replacement.

    Args:
        participation: Share of the clients in (0, 1] as a float, or their number as an integer. A
            share is rounded to the nearest number.
        sampling: ``uniform``, or ``size`` with probabilities in proportion to the clients' training
            samples.
    """

    def __init__(self, participation: int | float = 1.0, sampling: Sampling = "uniform") -> None:
        self.participation = participation
        self.sampling = sampling
        require_positive("Synchronous", participation=participation)
        require_one_of("Synchronous", get_args(Sampling), sampling=sampling)
        if isinstance(participation, float) and participation > 1:
            raise FlsuiteError(
                f"Synchronous: participation as a share must be at most 1.0, got {participation}; "
                "write a number of clients as an integer"
            )

    def configure(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.float64)
        self._seed = seed
        clients = len(sizes)
        # Rounded half up. round() would round 0.5 and 2.5 to an even number.
        share_as_number = int(self.participation * clients + 0.5)
        is_share = isinstance(self.participation, float)
        self._number = share_as_number if is_share else int(self.participation)

        if not 1 <= self._number <= clients:
            remedy = "raise it" if self._number < 1 else "lower it"
            raise FlsuiteError(
                f"Synchronous: participation {self.participation} of {clients} clients comes to "
                f"{self._number} clients; {remedy}"
            )

    def start(self, clock: Clock) -> list[int]:
        """Draw the cohort of the next round, as a function of the seed and the round alone."""
        clients = len(self._sizes)
        if self._number == clients:
            return list(range(clients))

        # A generator of its own per round, so that a resumed run draws the same cohorts.
        rng = numpy_generator(self._seed, "cohort", clock.round + 1)
        weights = self._sizes / self._sizes.sum() if self.sampling == "size" else None
        return sorted(rng.choice(clients, self._number, replace=False, p=weights).tolist())

    def arrivals(self, engine: Engine, clock: Clock) -> Iterator[Outcome]:
        """Yield all outcomes in the order of submission.

        A round takes as long as its slowest client.
        """
        slowest = 0.0
        # Not in the order in which fits finish: results must not depend on the engine.
        for number in engine.pending:
            outcome = engine.collect(number)
            if isinstance(outcome, ClientResult):
                slowest = max(slowest, outcome.update.seconds)
            yield outcome
        # All clients train at the same time, each on a machine of its own.
        clock.seconds += slowest
