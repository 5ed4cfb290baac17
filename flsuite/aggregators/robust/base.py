"""The base class of the robust rules, and the form of their arguments."""

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator

from torch import Tensor

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.robust.cohort import Cohort
from flsuite.aggregators.robust.vectors import Vectors, one_thread
from flsuite.errors import FederationError, FlsuiteError, require_whole
from flsuite.messages import ClientUpdate
from flsuite.state import State

__all__ = [
    "ParameterRule",
    "RobustAggregator",
    "more_clients",
    "number_of",
    "require_number",
    "require_radius",
]

log = logging.getLogger("flsuite")

_NAMED = 20  # clients in a line of the log


class RobustAggregator(Aggregator):
    """A rule that bounds what a few clients can do to the global model.

    The models of a round are in memory at a time, as one vector each: for ``n`` clients of ``d``
    float32 parameters ``4 n d`` bytes, 400 MB for a hundred clients of a million. What else a rule
    takes is a few vectors and a block of 3 MB. It works with one thread, so that the result does
    not depend on the engine.
    """

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        with one_thread():
            cohort = Cohort.of(global_state, self.layout.parameters, updates)
            if fault := self.too_few(len(cohort)):
                raise FederationError(
                    f"round {cohort.round}: {fault}; the state of round {cohort.round - 1} is kept"
                )
            return self.fold(cohort)

    @abstractmethod
    def fold(self, cohort: Cohort) -> State:
        """Return the next global state.

        It notes in the updates' metrics what it did to each client.
        """

    def name(self, cohort: Cohort, did: str, vectors: Iterable[int]) -> None:
        """Name in the log the clients that the rule did something to."""
        clients = cohort.clients(vectors)
        if clients:
            more = f" and {len(clients) - _NAMED} more" if len(clients) > _NAMED else ""
            named = ", ".join(map(str, clients[:_NAMED])) + more
            log.info("round %d: %s %s clients %s", cohort.round, type(self).__name__, did, named)


class ParameterRule(RobustAggregator):
    """A rule on the parameters, as one vector per client.

    A subclass has :meth:`combine`, and :meth:`too_few` where it needs a number of clients. All of
    its clients weigh alike, unless it says otherwise: a client states its own number of samples,
    and an attacker could state any.

    Floating-point buffers, such as BatchNorm's statistics, take the median of the clients by
    coordinate. No rule on the parameters would keep an attacker from them, their scale is another
    one, and a median of variances is positive. Integer entries, which are counters, take the
    maximum.
    """

    def fold(self, cohort: Cohort) -> State:
        parameters = self.combine(cohort)
        return cohort.state(parameters, self.combine_statistics(cohort.statistics))

    @abstractmethod
    def combine(self, cohort: Cohort) -> Tensor:
        """Return the next parameters of the global model, ``(parameters,)``."""

    def combine_statistics(self, statistics: Vectors) -> Tensor:
        """Return the next floating-point buffers of the global model, ``(buffers,)``."""
        return statistics.median()


def number_of(clients: int | float, total: int) -> int:
    """Return a number of clients that is given as such, or as a share of all of them.

    A share is rounded down: it is the largest number of attackers within it.
    """
    # 0.3 * 10 may be a little less than 3 in binary.
    return clients if isinstance(clients, int) else int(clients * total + 1e-9)


def more_clients(argument: str, most: int) -> str:
    """Return what to change if there are too few clients.

    Args:
        argument: The argument of the aggregator that asks for them.
        most: The largest value that these clients allow. Below 0 there is none.
    """
    lower = f"lower trainer.aggregator.{argument} to at most {most}, or " if most >= 0 else ""
    return f"{lower}let more clients train per round"


def require_number(owner: str, **values: int | float) -> None:
    """Refuse what is neither a number of clients, from 0, nor a share of them below 0.5."""
    for name, value in values.items():
        if not isinstance(value, float):
            require_whole(owner, 0, **{name: value})
        elif not 0 <= value < 0.5:
            raise FlsuiteError(
                f"{owner}: {name} as a share must be in [0, 0.5), got {value}; write a number of "
                "clients as an integer"
            )


def require_radius(owner: str, radius: float | None) -> None:
    """Refuse a radius that is not above zero. It may be infinite, or left out."""
    if radius is not None and not (radius > 0 and not math.isnan(radius)):
        raise FlsuiteError(f"{owner}: radius must be positive, got {radius}")
