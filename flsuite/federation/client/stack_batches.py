"""The batches of a stack of clients, read together where they are of one size."""

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice, zip_longest
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.stack_member import Member, laid_out
from flsuite.federation.client.stacked_loss import StackGroup
from flsuite.federation.client.trainer import ClientTrainer


class StackBatches:
    """Yields the batches of each step, in groups of one size.

    Clients with fewer steps than others are in no group of the last ones.

    Args:
        members: The clients.
        view: The samples in this round.
        trainer: Moves batches to its device.

    Attributes:
        fills: Whether smaller batches are filled up, so that clients need fewer groups.
    """

    def __init__(
        self, members: Sequence[Member], view: FederatedData, trainer: ClientTrainer
    ) -> None:
        self.members, self.trainer = members, trainer
        # Members of several runs may have samples of their own.
        self._views = [member.loader.data for member in members]
        self._device = trainer.strategy.root_device
        # The batches of a step are read at once, unless each has randomness of its own.
        self._reads_rows = view.augment is None and view.train.in_memory
        self.fills = False

    def __iter__(self) -> Iterator[list[StackGroup]]:
        return self._of_one_size() if self._are_alike() else self._by_size()

    def _are_alike(self) -> bool:
        """Return whether the batches of a step are read at once and have one size in each step."""
        kinds = {(m.steps, m.epoch_steps, m.client.samples) for m in self.members}
        is_poisson = any(member.loader.is_poisson for member in self.members)
        return self._reads_rows and len(kinds) == 1 and not is_poisson

    def _of_one_size(self) -> Iterator[list[StackGroup]]:
        """Yield the batches where all clients have as many of the same size."""
        first, places = self.members[0], [*range(len(self.members))]
        for start in range(0, first.steps, first.epoch_steps):
            length = min(first.epoch_steps, first.steps - start)
            orders = [[*islice(member.loader.rows(), length)] for member in self.members]
            # One transfer, because each would wait for the steps before it.
            rows = torch.stack([*map(torch.cat, orders)]).to(self._device)
            batches = rows.split_with_sizes([len(batch) for batch in orders[0]], dim=1)
            for index, batch in enumerate(batches):
                yield [StackGroup(places, slice(None), self._read([*batch], places), index)]

    def _by_size(self) -> Iterator[list[StackGroup]]:
        """Yield the batches of any size, grouped in each step."""
        streams = [self._of(member.loader, member) for member in self.members]
        kind_of = Tensor.numel if self._reads_rows and not self.fills else self._shape_of  # faster
        for step, batches in enumerate(zip_longest(*streams)):
            alike: dict[Any, list[int]] = {}
            for place, batch in enumerate(batches):
                if batch is not None:
                    alike.setdefault(kind_of(batch), []).append(place)
            yield [self._group(step, places, batches) for places in alike.values()]

    def first(self) -> Any:
        """Return the first batch of the first client."""
        one = next(self._of(copy.copy(self.members[0].loader), self.members[0]))
        return tree_map(lambda part: part[0], self._read([one], [0]))

    def mixed(self) -> Any:
        """Return a batch of all clients' samples, as large as their first batches."""
        samples = self._views[0].train.x
        own = [one for one in self.members if one.loader.data.train.x is samples]
        ones = [next(self._of(copy.copy(member.loader), member)) for member in own]
        longest, total = max(map(_size, ones)), sum(map(_size, ones))
        spread = torch.arange(longest) * total // longest
        mix = tree_map(lambda *parts: torch.cat(parts)[spread], *ones)
        return tree_map(lambda part: part[0], self._read([mix], [0]))

    def _shape_of(self, batch: Any) -> Any:
        """Return what batches of a group have in common."""
        start = 1 if self.fills else 0
        return tuple(part.shape[start:] for part in _parts(batch))

    def _group(self, step: int, places: list[int], batches: Sequence[Any]) -> StackGroup:
        own, at = [batches[place] for place in places], self._at(places)
        index = self._index(step, places)
        sizes = [_size(batch) for batch in own] if self.fills else [0]
        if len({*sizes}) == 1:
            return StackGroup(places, at, self._read(own, places), index)
        filled = [_filled(batch, size, max(sizes)) for batch, size in zip(own, sizes, strict=True)]
        count = torch.tensor(sizes, device=self._device)
        return StackGroup(places, at, self._read(filled, places), index, count)

    def _of(self, loader: TrainLoader, member: Member) -> Iterator[Any]:
        """Return a client's batches, or only their rows where they are read at once."""
        epoch = loader.rows if self._reads_rows else loader.__iter__
        epochs = math.ceil(member.steps / member.epoch_steps)
        of_all = chain.from_iterable(islice(epoch(), member.epoch_steps) for _ in range(epochs))
        return islice(of_all, member.steps)

    def _index(self, step: int, places: list[int]) -> int | Tensor:
        """Return the numbers of the batches in their epochs: one, if it is the same for all."""
        numbers = [step % self.members[place].epoch_steps for place in places]
        if len({*numbers}) == 1:
            return numbers[0]
        return torch.tensor(numbers, device=self._device)

    def _at(self, places: list[int]) -> Any:
        is_all = len(places) == len(self.members)
        return slice(None) if is_all else torch.tensor(places, device=self._device)

    def _read(self, batches: Sequence[Any], places: Sequence[int]) -> Any:
        """Return batches of the same size as one, ``(clients, batch, ...)``.

        Args:
            batches: The batches, or their rows.
            places: The places of the clients whose samples they are.
        """
        if not self._reads_rows:
            moved = (move_data_to_device(batch, self._device) for batch in batches)
            return tree_map(lambda *parts: laid_out(torch.stack(parts)), *moved)
        read: list[Any] = []
        rows_of = zip(places, batches, strict=True)
        for _, ones in groupby(rows_of, key=lambda one: id(self._views[one[0]].train.x)):
            owners, rows = zip(*ones, strict=True)
            view = self._views[owners[0]]
            read += view.batches_of(view.train, [torch.cat(rows)])
        batch = read[0] if len(read) == 1 else tree_map(lambda *parts: torch.cat(parts), *read)
        return tree_map(lambda part: laid_out(part.unflatten(0, (len(batches), -1))), batch)


def _filled(batch: Any, size: int, longest: int) -> Any:
    """Return a batch with its last sample repeated, to be as large as the longest one."""
    index = torch.arange(longest).clamp(max=size - 1)
    return tree_map(lambda part: part[index], batch)


def _size(batch: Any) -> int:
    """Return the number of samples of a batch, or of its rows."""
    return _parts(batch)[0].shape[0]


def _parts(batch: Any) -> list[Any]:
    """Return the tensors of a batch, or its rows. This is called for each client in each step."""
    return [batch] if isinstance(batch, torch.Tensor) else tree_leaves(batch)
