"""Rounds in lockstep: a cohort is drawn, all of it trains, the server waits for the last."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from flsuite.errors import FlsuiteError
from flsuite.random import numpy_generator
from flsuite.schedules.base import Schedule

__all__ = ["Synchronous"]


class Synchronous(Schedule):
    """McMahan et al. 2017, algorithm 1: in each round a random cohort, without replacement.

    Args:
        participation: A fraction of the clients in (0, 1] as a float, or their number as an integer. A fraction is rounded
            to the nearest number, and must come to at least one client.
        sampling: ``uniform``, or ``size`` with probabilities in proportion to the clients' training samples.
    """

    def __init__(
        self, participation: int | float = 1.0, sampling: Literal["uniform", "size"] = "uniform"
    ) -> None:
        if sampling not in ("uniform", "size"):
            raise FlsuiteError(f"sampling must be uniform or size, got {sampling!r}")
        if not participation > 0:
            raise FlsuiteError(
                f"participation must be positive, got {participation}: no client would ever train"
            )
        if isinstance(participation, float) and participation > 1:
            raise FlsuiteError(
                f"participation as a fraction must be at most 1.0, got {participation}; a number is an integer"
            )
        self.participation = participation
        self.sampling = sampling

    def configure(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.float64)
        self._seed = seed
        clients = len(sizes)
        number = (
            self.participation
            if isinstance(self.participation, int)
            else int(self.participation * clients + 0.5)
        )
        if number < 1:
            raise FlsuiteError(
                f"participation {self.participation} of {clients} clients gives no client; raise it"
            )
        if number > clients:
            raise FlsuiteError(
                f"participation {number} is more than the {clients} clients there are; lower it"
            )
        self._number = number

    def cohort(self, round: int) -> list[int]:
        clients = len(self._sizes)
        if self._number == clients:
            return list(range(clients))
        rng = numpy_generator(self._seed, "cohort", round)
        weights = self._sizes / self._sizes.sum() if self.sampling == "size" else None
        return sorted(rng.choice(clients, self._number, replace=False, p=weights).tolist())
