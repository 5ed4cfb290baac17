"""The updates of a round, as robust rules see them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flsuite.aggregators.robust.vectors import Vectors, flatten, row_dtype, unflatten
from flsuite.messages import ClientUpdate
from flsuite.state import State

__all__ = ["Cohort"]


class Cohort:
    """The models of a round as flat vectors, in the order of the clients' numbers.

    Attributes:
        global_state: The shared entries that the round started from.
        parameters: The trainable entries.
        statistics: The floating-point buffers, such as BatchNorm's.
        members: The updates behind each vector, without tensors. A bucket has several.
        round: The round in progress, counted from 1.
    """

    def __init__(
        self,
        global_state: State,
        names: tuple[Sequence[str], Sequence[str]],
        vectors: tuple[Vectors, Vectors],
        counters: State,
        members: Sequence[Sequence[ClientUpdate]],
    ) -> None:
        self.global_state = global_state
        self._names = names
        self._counters = counters
        self.parameters, self.statistics = vectors
        self.members = members

    @classmethod
    def of(
        cls, global_state: State, parameters: Sequence[str], updates: Iterable[ClientUpdate]
    ) -> "Cohort":
        """Read updates that arrive one at a time. Their models are kept as one vector each.

        The parameters of an update that started from an older version are those of its change from
        there, applied to the global state.
        """
        own = [name for name in parameters if global_state[name].is_floating_point()]
        others = [k for k, v in global_state.items() if v.is_floating_point() and k not in own]
        counters = {k: v.clone() for k, v in global_state.items() if not v.is_floating_point()}
        dtype = row_dtype(global_state)
        starts = [flatten(global_state, names, dtype) for names in (own, others)]

        read: list[tuple[ClientUpdate, Tensor, Tensor]] = []
        for update in updates:
            row = flatten(update.state, own, dtype)
            if update.base and update.base is not global_state:
                base = flatten(update.base, own, dtype)
                row = (row.double() + (starts[0].double() - base)).to(dtype)
            for name, value in counters.items():
                torch.maximum(value, update.state[name].cpu(), out=value)
            read.append((update.without_tensors(), row, flatten(update.state, others, dtype)))

        # Sorted, so that no rule depends on the order of arrival, not even by rounding.
        read.sort(key=lambda item: (item[0].client, item[0].number))
        vectors = Vectors(starts[0], [r[1] for r in read]), Vectors(starts[1], [r[2] for r in read])
        return cls(global_state, (own, others), vectors, counters, [[r[0]] for r in read])

    def __len__(self) -> int:
        return len(self.members)

    @property
    def round(self) -> int:
        update = self.members[0][0]
        return update.round + update.staleness

    @property
    def samples(self) -> list[int]:
        """Return the training samples that stand behind each vector."""
        return [sum(update.samples for update in group) for group in self.members]

    def clients(self, vectors: Iterable[int]) -> list[int]:
        """Return the clients behind some vectors, ascending."""
        return sorted({update.client for k in vectors for update in self.members[k]})

    def note(self, name: str, values: Iterable[float]) -> None:
        """Log a number per vector, for each of the clients behind it."""
        for group, value in zip(self.members, values, strict=True):
            for update in group:
                update.metrics[name] = float(value)

    def note_weights(self, weights: Iterable[float]) -> None:
        """Log the factor of each client's change in the global model's, as ``weight``."""
        sizes = [len(group) for group in self.members]
        self.note("weight", (w / size for w, size in zip(weights, sizes, strict=True)))

    def merged(self, groups: Sequence[Sequence[int]]) -> "Cohort":
        """Return a cohort of the means of groups of vectors."""
        vectors = self.parameters.merged(groups), self.statistics.merged(groups)
        members = [[update for k in group for update in self.members[k]] for group in groups]
        return Cohort(self.global_state, self._names, vectors, self._counters, members)

    def entries(self, parameters: Tensor) -> State:
        """Return a flat vector of parameters as entries of the state."""
        return unflatten(parameters, self.global_state, self._names[0])

    def vector(self, state: State) -> Tensor:
        """Return the parameters of a state as a flat vector."""
        return flatten(state, self._names[0], self.parameters.start.dtype)

    def state(self, parameters: Tensor, statistics: Tensor) -> State:
        """Return the next global state. A counter takes the maximum."""
        new = self.entries(parameters) | unflatten(statistics, self.global_state, self._names[1])
        new |= self._counters
        return {name: new[name] for name in self.global_state}
