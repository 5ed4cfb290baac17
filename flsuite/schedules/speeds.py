"""How long a fit takes on the virtual clock."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Measured", "Speeds", "Work"]


@dataclass(frozen=True)
class Work:
    """The work of one fit.

    Attributes:
        client: The client's number.
        number: Number of the fit in the run, from 0.
        started: Virtual seconds at its start.
        samples: Training samples that the client processes, over all local epochs.
        bytes_down: Bytes that the client receives.
        bytes_up: Bytes that the client sends.
    """

    client: int
    number: int
    started: float
    samples: int
    bytes_down: int
    bytes_up: int


class Speeds(ABC):
    """Says how long a fit takes on the virtual clock.

    The answer is a function of the run's seed and of the work, never of the machine or of the order
    of calls.
    """

    def configure(self, clients: int, seed: int) -> None:
        """Prepare for a run with this number of clients and this seed."""
        return

    @abstractmethod
    def seconds(self, work: Work) -> float | None:
        """Return the virtual seconds of a fit, or ``None`` if they must be measured."""


class Measured(Speeds):
    """The seconds that the fit takes on this machine.

    They differ from run to run, and so does everything that depends on them.
    """

    def seconds(self, work: Work) -> float | None:
        return None
