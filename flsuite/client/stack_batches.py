"""The batches of a stack of clients, read together where they are of one size."""

import copy
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from flsuite.client.stack_member import Member
from flsuite.client.stacked_loss import Group
from flsuite.client.trainer import ClientTrainer
from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader
from flsuite.data.map_style import StoredSplit


class StackBatches:
    """Yields the batches of each step, in groups of one size.

    Clients with fewer steps than others are in no group of the last ones.

    Args:
        members: The clients.
        view: The samples in this round.
        trainer: Moves batches to its device.
    """

    def __init__(
        self, members: Sequence[Member], view: FederatedData, trainer: ClientTrainer
    ) -> None:
        self.members, self.view, self.trainer = members, view, trainer
        # The batches of a step are read at once, unless each has randomness of its own.
        self._reads_rows = view.augment is None and not isinstance(view.train, StoredSplit)

    def __iter__(self) -> Iterator[list[Group]]:
        streams = [self._of(member.loader, member.epochs) for member in self.members]
        for batches in zip_longest(*streams):
            of_size: dict[Any, list[int]] = {}
            for place, batch in enumerate(batches):
                if batch is not None:
                    parts = [batch] if self._reads_rows else tree_flatten(batch)[0]
                    of_size.setdefault(tuple(part.shape for part in parts), []).append(place)
            yield [
                Group(places, self._index(places), self._read([batches[i] for i in places]))
                for places in of_size.values()
            ]

    def first(self) -> Any:
        """Return the first batch of the first client."""
        one = next(self._of(copy.copy(self.members[0].loader), 1))
        return tree_map(lambda part: part[0], self._read([one]))

    def _of(self, loader: TrainLoader, epochs: int) -> Iterator[Any]:
        """Yield a client's batches, or only their rows where they are read at once."""
        for _ in range(epochs):
            yield from loader.rows() if self._reads_rows else loader

    def _index(self, places: list[int]) -> Any:
        is_all = len(places) == len(self.members)
        device = self.trainer.strategy.root_device
        return slice(None) if is_all else torch.tensor(places, device=device)

    def _read(self, batches: Sequence[Any]) -> Any:
        """Return batches of the same size as one, ``(clients, batch, ...)``."""
        if not self._reads_rows:
            moved = map(self.trainer.strategy.batch_to_device, batches)
            return tree_map(lambda *parts: torch.stack(parts), *moved)
        (batch,) = self.view.batches_of(self.view.train, [torch.cat(list(batches))])
        return tree_map(lambda part: part.unflatten(0, (len(batches), -1)), batch)
