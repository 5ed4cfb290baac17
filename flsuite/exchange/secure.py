"""The base class of secure aggregation: the server learns a sum alone."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flsuite.state import State


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
    """What secure aggregation has cost, and whose contributions are in it.

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
    """The clients of a round in a simulation: each of them stands for a device.

    Attributes:
        clients: The cohort, ascending.
    """

    clients: tuple[int, ...]

    @abstractmethod
    def hold(self, client: int, contribution: State) -> None:
        """Leave the contribution of a trained client on its device.

        Raises:
            ValueError: If they cannot be summed. The text says why.
        """


class SecureAggregation(ABC):
    """How the sum of the clients' contributions is formed while the server sees none of them.

    A subclass takes its parameters in ``__init__`` and keeps each under its own name.
    """

    @abstractmethod
    def configure(self, template: State, clients: int) -> None:
        """Prepare for contributions, and refuse settings that cannot work.

        Args:
            template: The contribution of any client. Only names and shapes count.
            clients: Clients per round.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the bytes that a client sends in a round of all clients, after :meth:`configure`.

        They are those of the protocol: keys, shares and masked contributions.
        """

    @abstractmethod
    def begin(self, clients: Sequence[int]) -> Parties:
        """Let the clients of a round agree on keys, before they train.

        Raises:
            FederationError: If there are too few of them.
        """

    @abstractmethod
    def finish(
        self, parties: Parties, arrived: Collection[int], gone: Collection[int] = ()
    ) -> tuple[State, SumReport]:
        """Return the sums in float64, and what they have cost.

        Args:
            parties: What :meth:`begin` returned.
            arrived: Clients that are back. Each has called :meth:`Parties.hold`.
            gone: Clients that are lost after they have sent their masked contribution.

        Raises:
            FederationError: If too few clients are back, or left at the end.
        """
