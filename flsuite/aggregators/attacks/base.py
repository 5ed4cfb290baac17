"""The base class of the attacks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.arguments import Share, check_init
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator, torch_generator
from flsuite.common.state import State
from flsuite.data.federated import DataSplit, FederatedData
from flsuite.data.loader import TrainLoader


class Trial(NamedTuple):
    """A test of an attack's success.

    Attributes:
        metric: Name of the score, which is the fraction of hits.
        rows: Rows of the split to test, int64 ``(n,)``.
        change: Returns a changed copy of a batch. It must not modify the batch itself.
        hits: Returns which samples are hits, bool ``(n,)``, given the model's probabilities
            ``(n, classes)``.
    """

    metric: str
    rows: Tensor
    change: Callable[[Any], Any]
    hits: Callable[[Tensor], Tensor]


@dataclass(init=False, eq=False)
class Attack(ABC):
    """Base of all attacks.

    An attack changes the training batches of the attackers (:meth:`poison`), or their finished
    updates (:meth:`alter`). Attackers that see each other's updates are a
    :class:`~flsuite.aggregators.Collusion`. Honest clients draw the same random numbers with and
    without attackers, and evaluation data is never changed.

    A subclass is a dataclass. Its fields are checked by their annotations.

    Args:
        clients: Numbers of the attackers. The list may be empty.
        fraction: Fraction of the clients that attack, drawn with the run's seed. Give either
            ``clients`` or ``fraction``.

    Attributes:
        needs: What the attack requires of the other parts of a run.
        attackers: Numbers of the attackers, ascending, set by :meth:`configure`.

    Raises:
        FlsuiteError: If both or neither are given, or the fraction is outside [0, 1].
    """

    clients: list[int] | None = None
    fraction: Share | None = None
    attackers: tuple[int, ...] = field(default=(), init=False)

    @abstractmethod
    def __init__(self, clients: list[int] | None = None, fraction: Share | None = None) -> None:
        self.clients, self.fraction = clients, fraction
        self.__post_init__()

    def __post_init__(self) -> None:
        check_init(self)
        owner = type(self).__name__
        if (self.clients is None) == (self.fraction is None):
            raise FlsuiteError(
                f"{owner}: give either clients, such as [0, 3], or fraction, such as 0.2"
            )

    @property
    def needs(self) -> frozenset[Capability]:
        # An attack on batches has an effect even if nothing is shared.
        if self._changes_batches:
            return frozenset({"clients"})
        return frozenset({"clients", "shared parameters"})

    def configure(self, data: FederatedData, seed: int) -> None:
        """Choose the attackers of a run, and refuse data that they cannot attack.

        Called once, before the first round.

        Args:
            data: The samples of all clients.
            seed: The run's seed.

        Raises:
            FlsuiteError: If a client does not exist, or the attack cannot handle the data.
        """
        self.attackers = self._chosen(data.clients, seed)

    def poisons(self, client: int) -> bool:
        """Return whether a client poisons its training batches."""
        return client in self.attackers and self._changes_batches

    def poisoned(self, loader: TrainLoader) -> None:
        """Poison all batches of an attacker's fit, including those that it measures afterwards."""
        stream = f"attack/batches/{loader.repeat}" if loader.repeat else "attack/batches"
        generator = torch_generator(loader.seed, stream, loader.round, loader.client)
        loader.change = lambda batch: self.poison(batch, generator)

    def poison(self, batch: Any, generator: torch.Generator) -> Any:
        """Return the poisoned version of a training batch.

        Args:
            batch: A batch of the attacker's own samples. It must not be changed.
            generator: Randomness for the batches of this fit.
        """
        return batch

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        """Return the parameters that an attacker sends.

        Buffers, private entries and extras of the algorithm stay as trained.

        Args:
            trained: The shared parameters after the attacker's fit. They must not be changed.
            received: The global model's parameters that the fit started from. They must not be
                changed.
            fit: The fit. Its memory holds the attacker's own notes.
        """
        return trained

    def trial(self, samples: DataSplit) -> Trial | None:
        """Return a test of the attack's success on a split.

        Default: no test, because accuracy shows the effect.
        """
        return None

    def line(self, clients: int) -> str:
        """Return the line that names the attackers at the start of a run."""
        numbers = ", ".join(map(str, self.attackers[:20]))
        more = ", ..." if len(self.attackers) > 20 else ""
        who = f": {numbers}{more}" if self.attackers else ""
        return f"{type(self).__name__} by {len(self.attackers)} of {clients} clients{who}"

    @property
    def _changes_batches(self) -> bool:
        return type(self).poison is not Attack.poison

    def _chosen(self, clients: int, seed: int) -> tuple[int, ...]:
        owner = type(self).__name__
        if self.fraction is not None:
            # Rounded half up: 0.25 of 10 clients is 3.
            number = int(self.fraction * clients + 0.5)
            if self.fraction > 0 and not number:
                raise FlsuiteError(
                    f"{owner}: a fraction of {self.fraction} of {clients} clients is 0 clients; "
                    "raise fraction, or name clients"
                )
            drawn = numpy_generator(seed, "attackers").choice(clients, number, replace=False)
            return tuple(sorted(drawn.tolist()))

        named = self.clients or []
        for client in named:
            if type(client) is not int or client not in range(clients):
                raise FlsuiteError(
                    f"{owner}: clients names {client!r}, but the clients are 0 to {clients - 1}"
                )
        if len(set(named)) < len(named):
            raise FlsuiteError(f"{owner}: clients names a client twice: {named}")
        return tuple(sorted(named))
