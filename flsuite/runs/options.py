"""The limits and options of a run."""

from collections.abc import Iterator
from dataclasses import dataclass

from flsuite.common.arguments import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Settings
from flsuite.federation.client.callbacks import LRDecay
from flsuite.federation.client.entries import BatchNorm
from flsuite.federation.schedules.base import Clock


@dataclass(frozen=True)
class Budget(Settings):
    """The limits of a run, which ends with the first round that reaches one of them.

    Attributes:
        rounds: Maximum number of rounds.
        max_virtual_seconds: Maximum virtual time.
        max_client_updates: Maximum number of aggregated client updates.
    """

    owner = "trainer"

    rounds: PositiveInt | None = None
    max_virtual_seconds: PositiveFloat | None = None
    max_client_updates: PositiveInt | None = None

    @classmethod
    def of(cls, rounds: int | None, seconds: float | None, updates: int | None) -> "Budget":
        """Return these limits, or 10 rounds if none is given."""
        is_open = rounds is None and seconds is None and updates is None
        return cls(10 if is_open else rounds, seconds, updates)

    @property
    def is_of_time_alone(self) -> bool:
        """Return whether virtual time is the only limit."""
        others = self.rounds, self.max_client_updates
        return self.max_virtual_seconds is not None and others == (None, None)

    def is_spent(self, clock: Clock) -> bool:
        """Return whether a limit is reached."""
        return any(spent >= limit for spent, limit in self._pairs(clock))

    def share(self, clock: Clock) -> float:
        """Return the spent share of the limit closest to its end, in [0, 1]."""
        shares = (spent / limit for spent, limit in self._pairs(clock))
        return min(max(shares, default=0.0), 1.0)

    def __str__(self) -> str:
        limits = {name: limit for name, limit in vars(self).items() if limit is not None}
        return ", ".join(f"trainer.{name} (now {limit})" for name, limit in limits.items())

    def _pairs(self, clock: Clock) -> Iterator[tuple[float, float]]:
        """Yield what is spent of each limit, and the limit."""
        spent = clock.round, clock.seconds, clock.client_updates
        limits = self.rounds, self.max_virtual_seconds, self.max_client_updates
        return ((used, limit) for used, limit in zip(spent, limits, strict=True) if limit)


@dataclass(frozen=True)
class RunOptions(Settings):
    """The plain options of a run, see :class:`~flsuite.FederatedTrainer`."""

    owner = "trainer"

    budget: Budget
    seed: int
    evaluate_every: PositiveInt = 1
    monitor: str | None = None
    score_clients: PositiveInt = 100
    adapt_epochs: NonNegativeInt = 0
    batchnorm: BatchNorm = "average"
    keep_optimizers: bool = False
    channels_last: bool = True
    lr_decay: LRDecay | None = None
    max_share: Fraction | None = None
    show: bool = False
