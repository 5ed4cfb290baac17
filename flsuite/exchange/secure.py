"""The base class of secure sums: the server learns the sum of the clients' summands, no summand."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flsuite.state import State

__all__ = ["Parties", "PartyCost", "SecureSum", "SumReport"]


@dataclass
class PartyCost:
    """The cost of a secure sum for one client.

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
    """What a secure sum has cost, and whose summands are in it.

    Attributes:
        survivors: Clients whose summands are in the sum, ascending.
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
    def hold(self, client: int, summands: State) -> None:
        """Leave the summands of a trained client on its device.

        Raises:
            ValueError: If they cannot be summed. The text says why.
        """


class SecureSum(ABC):
    """How the sum of the clients' summands is formed while the server sees no summand.

    A subclass takes its parameters in ``__init__`` and keeps each under its own name.
    """

    @abstractmethod
    def configure(self, template: State, clients: int) -> None:
        """Prepare for summands, and refuse settings that cannot work.

        Args:
            template: Summands of any client. Only names and shapes count.
            clients: Clients per round.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the bytes that a client sends in a round of all clients, after :meth:`configure`.

        They are those of the protocol: keys, shares and masked summands.
        """

    @abstractmethod
    def begin(self, clients: Sequence[int]) -> Parties:
        """Let the clients of a round agree on keys, before they train.

        Raises:
            FederationError: If there are too few of them.
        """

    @abstractmethod
    def finish(self, parties: Parties, arrived: Collection[int]) -> tuple[State, SumReport]:
        """Return the sums in float64, and what they have cost.

        Args:
            parties: What :meth:`begin` returned.
            arrived: Clients that are back. Each has left its summands with :meth:`Parties.hold`.

        Raises:
            FederationError: If too few clients are back.
        """
