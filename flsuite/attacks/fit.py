"""The fit of an attacker, where clients train."""

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flsuite.attacks.base import Attack, Attacker
from flsuite.data.loader import Batch, BatchSource, TrainLoader
from flsuite.messages import FitRequest
from flsuite.random import torch_generator
from flsuite.state import State

__all__ = ["AttackedFit", "attacked_fit"]


class AttackedFit:
    """One fit of an attacker.

    Args:
        attack: The attack.
        request: The fit.
        seed: The run's seed.

    Attributes:
        attacker: The fit as the attack sees it, with the notes that the client keeps.
    """

    def __init__(self, attack: Attack, request: FitRequest, seed: int) -> None:
        self.attack = attack
        client, round = request.client, request.broadcast.round
        again = f"/{request.repeat}" if request.repeat else ""
        self._of_batches = torch_generator(seed, f"attack/batches{again}", round, client)
        self.attacker = Attacker(
            client,
            round,
            torch_generator(seed, f"attack/update{again}", round, client),
            copy.deepcopy(request.memory.get("attack", {})),
        )

    def loader(self, loader: TrainLoader) -> TrainLoader:
        """Return the loader of the same samples, as the attacker trains on them."""
        return replace(loader, data=_Poisoned(loader.data, self.attack, self._of_batches))

    def sent(self, trained: State, received: State, kept: Collection[str]) -> State:
        """Return the state that the attacker sends.

        Args:
            trained: The shared state after its fit.
            received: The shared state that it started from.
            kept: Entries that are sent as they are: buffers.
        """
        names = [name for name in trained if name not in kept]
        altered = self.attack.alter(
            {name: trained[name] for name in names},
            {name: received[name] for name in names},
            self.attacker,
        )
        return {**trained, **altered}


def attacked_fit(attack: Attack | None, request: FitRequest, seed: int) -> AttackedFit | None:
    """Return the fit of an attacker, or ``None`` for an honest client."""
    if attack is None or not attack.has(request.client):
        return None
    return AttackedFit(attack, request, seed)


@dataclass
class _Poisoned:
    """The samples of a client, as an attacker trains on them."""

    data: BatchSource
    attack: Attack
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.batch_size = self.data.batch_size

    def train_rows(self, client: int) -> Tensor:
        return self.data.train_rows(client)

    def train_batches(self, parts: Iterable[Tensor], generator: torch.Generator) -> Iterator[Batch]:
        for batch in self.data.train_batches(parts, generator):
            yield self.attack.poison(batch, self.generator)

    def plain_batch(self, rows: Tensor) -> Batch:
        return self.attack.poison(self.data.plain_batch(rows), self.generator)
