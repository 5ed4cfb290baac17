"""The base class of the robust rules, and the form of their arguments."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated

from torch import Tensor

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.base import CohortRule
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.aggregators.rules.robust.vectors import Vectors, one_thread
from flsuite.arguments import NonNegativeInt, Range, Settings
from flsuite.errors import FederationError
from flsuite.messages import ClientUpdate
from flsuite.state import State

Clients = NonNegativeInt | Annotated[float, Range("a share in [0, 0.5)", lambda x: 0 <= x < 0.5)]
"""A number of clients as an integer, or a share of them as a float."""


class ParameterRule(CohortRule, Settings):
    """A rule that bounds what a few clients can do to the global model.

    It works on the parameters, as one vector per client. A subclass has :meth:`parameters`, and
    :meth:`too_few` where it needs a number of clients. All of its clients weigh alike, unless it
    says otherwise: a client states its own number of samples, and an attacker could state any. A
    client that is late counts with its change, from the version that it started from.

    Floating-point buffers, such as BatchNorm's statistics, take the median of the clients by
    coordinate. No rule on the parameters would keep an attacker from them, their scale is another
    one, and a median of variances is positive. Integer entries, which are counters, take the
    maximum.

    The models of a round are in memory at a time, as one vector each: for ``n`` clients of ``d``
    float32 parameters ``4 n d`` bytes, 400 MB for a hundred clients of a million. What else a rule
    takes is a few vectors and a block of 3 MB. It works with one thread, so that the result does
    not depend on the engine.
    """

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        with one_thread():
            cohort = Cohort(server, updates)
            refuse_few(self, server, len(cohort))
            return cohort.state(self.parameters(server, cohort), self.buffers(cohort.buffers))

    @abstractmethod
    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the next parameters of the global model, ``(parameters,)``.

        It notes in the cohort what it did to each client.
        """

    def buffers(self, buffers: Vectors) -> Tensor:
        """Return the next floating-point buffers of the global model, ``(buffers,)``."""
        return buffers.median()

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Return what it needs: a cohort of known size, if one client is too few."""
        size: frozenset[Capability] = frozenset({"a cohort of known size"})
        return super().needs | size if self.too_few(1) else super().needs


def refuse_few(rule: CohortRule, server: Server, updates: int) -> None:
    """Refuse a round with too few updates for a rule."""
    if fault := rule.too_few(updates):
        raise FederationError(
            f"round {server.round}: {fault}; the state of round {server.round - 1} is kept"
        )


def number_of(clients: int | float, total: int) -> int:
    """Return a number of clients that is given as such, or as a share of all of them.

    A share is rounded down: it is the largest number of attackers within it.
    """
    # 0.3 * 10 may be a little less than 3 in binary.
    return clients if isinstance(clients, int) else int(clients * total + 1e-9)


def more_clients(argument: str, most: int) -> str:
    """Return what to change if there are too few clients.

    Args:
        argument: The argument of the rule that asks for them.
        most: The largest value that these clients allow. Below 0 there is none.
    """
    lower = f"lower {argument} to at most {most}, or " if most >= 0 else ""
    return f"{lower}let more clients train per round"
