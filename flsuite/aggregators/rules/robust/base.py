"""The base class of the robust rules, and the types of their arguments."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated

from torch import Tensor

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.base import CohortRule
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.aggregators.rules.robust.vectors import Vectors, one_thread
from flsuite.common.arguments import NonNegativeInt, Range, Settings
from flsuite.common.errors import FederationError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State

Clients = NonNegativeInt | Annotated[float, Range("a share in [0, 0.5)", lambda x: 0 <= x < 0.5)]
"""A number of clients as an integer, or a fraction of them as a float."""


class ParameterRule(CohortRule, Settings):
    """A rule that bounds the influence of a few clients on the global model.

    It works on the parameters, as one vector per client. A subclass implements :meth:`parameters`,
    and :meth:`too_few` if it needs a minimum number of clients. All clients have equal weight
    unless documented otherwise, because an attacker could report any number of samples. A late
    client counts with its change from the version that it started from.

    Floating-point buffers, such as BatchNorm statistics, take the coordinate-wise median of the
    clients. A rule on the parameters would not exclude an attacker's buffers, their scale differs,
    and a median of variances stays positive. Integer entries, which are counters, take the maximum.

    The models of a round are in memory at the same time, as one vector each: ``4 n d`` bytes for
    ``n`` clients of ``d`` float32 parameters, 400 MB for a hundred clients of a million. Beyond
    that, a rule needs a few vectors and a block of 3 MB. It uses one thread, so the result does not
    depend on the engine.
    """

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        with one_thread():
            cohort = Cohort(server, updates)
            refuse_few(self, server, len(cohort))
            return cohort.state(self.parameters(server, cohort), self.buffers(cohort.buffers))

    @abstractmethod
    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the next parameters of the global model, ``(parameters,)``.

        Its effect on each client is recorded in the cohort.
        """

    def buffers(self, buffers: Vectors) -> Tensor:
        """Return the next floating-point buffers of the global model, ``(buffers,)``."""
        return buffers.median()

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Return the rule's needs: a cohort of known size, if one client is too few."""
        size: frozenset[Capability] = frozenset({"a cohort of known size"})
        return super().needs | size if self.too_few(1) else super().needs


def refuse_few(rule: CohortRule, server: Server, updates: int) -> None:
    """Refuse a round that has too few updates for a rule."""
    if fault := rule.too_few(updates):
        raise FederationError(
            f"round {server.round}: {fault}; the state of round {server.round - 1} is kept"
        )


def number_of(clients: int | float, total: int) -> int:
    """Return a number of clients, given as such or as a fraction of all of them.

    A fraction is rounded down: it is the largest number of attackers within it.
    """
    # In binary, 0.3 * 10 may be slightly less than 3.
    return clients if isinstance(clients, int) else int(clients * total + 1e-9)


def more_clients(argument: str, most: int) -> str:
    """Return what to change if there are too few clients.

    Args:
        argument: The rule's argument that requires them.
        most: The largest value that these clients allow. Negative if there is none.
    """
    lower = f"lower {argument} to at most {most}, or " if most >= 0 else ""
    return f"{lower}let more clients train per round"
