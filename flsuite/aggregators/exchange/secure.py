"""Secure sums: what they are, and what they cost."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flsuite.common.state import State


@dataclass
class PartyCost:
    """The cost of secure aggregation for one client.

    Attributes:
        seconds: Wall time of the client's part.
        sent: Bytes sent, per phase.
        received: Bytes received, per phase.
    """

    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


@dataclass
class SumReport:
    """The cost of secure aggregation, and the clients whose contributions it includes.

    Attributes:
        survivors: Clients whose contributions are in the sum, ascending.
        dropped: The other clients of the cohort, ascending.
        costs: The cost for each client of the cohort.
        server_seconds: Wall time of the server's part.
    """

    survivors: tuple[int, ...]
    dropped: tuple[int, ...]
    costs: dict[int, PartyCost]
    server_seconds: float


class Parties(ABC):
    """The simulated client devices of a round.

    Attributes:
        clients: The cohort, ascending.
    """

    clients: tuple[int, ...]

    @abstractmethod
    def hold(self, client: int, contribution: State) -> None:
        """Move a trained client's contribution to its device.

        Raises:
            ValueError: If it cannot be summed. The message says why.
        """

    @abstractmethod
    def finish(
        self, arrived: Collection[int], gone: Collection[int] = ()
    ) -> tuple[State, SumReport]:
        """Return the sums in float64, and their cost.

        Args:
            arrived: Clients that came back. Each has called :meth:`hold`.
            gone: Clients that are lost after sending their masked contribution.

        Raises:
            FederationError: If too few clients came back, or remain at the end.
        """


class SecureAggregation(ABC):
    """A protocol that sums the clients' contributions without showing them to the server.

    A subclass stores each of its parameters under its own name.
    """

    @abstractmethod
    def configure(self, template: State, clients: int) -> None:
        """Prepare for contributions, and refuse settings that cannot work.

        Args:
            template: The contribution of any client. Only names and shapes matter.
            clients: Clients per round.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the bytes that a client sends in a full round, after :meth:`configure`.

        This counts the protocol: keys, shares and masked contributions.
        """

    @abstractmethod
    def begin(self, clients: Sequence[int]) -> Parties:
        """Let the clients of a round agree on keys before they train.

        Raises:
            FederationError: If there are too few of them.
        """
