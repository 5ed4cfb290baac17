"""A federation from which one client is absent in one round."""

from functools import cache

import torch

from flsuite.federation import Clock, Fit, Synchronous
from tests.conftest import classifier, digits, state, trainer


class WithoutOne(Synchronous):
    """The schedule of a federation from which client 1 is absent in round 2."""

    def start(self, clock: Clock) -> list[Fit]:
        fits = super().start(clock)
        self._cohort = [fit for fit in self._cohort if (fit.client, clock.round) != (1, 1)]
        return [fit for fit in fits if fit in self._cohort]


@cache
def state_without_client_1() -> dict[str, torch.Tensor]:
    """Return where three rounds end from whose second one client 1 is absent."""
    made = trainer(rounds=3, schedule=WithoutOne())
    made.fit(classifier(), digits())
    return state(made)
