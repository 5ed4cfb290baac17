"""What a robust rule is, and the cohort that it sees."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.base import CohortRule, Rule, Weighting
from flsuite.aggregators.rules.robust.vectors import Vectors, one_thread, row_dtype
from flsuite.aggregators.staleness import rebased
from flsuite.common.arguments import NonNegativeInt, Range, Settings
from flsuite.common.errors import FederationError, log, some
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, cast, flatten, flatten_tree, mean_of, nested_like, unflatten

_NAMED = 20  # clients in a line of the log


class Cohort:
    """The models of a round as flat vectors, in the order of the clients' numbers.

    The vector of a late client is its change, applied to the global state.

    Attributes:
        parameters: The trainable entries.
        buffers: The floating-point buffers, such as BatchNorm statistics.
        members: The update of each vector, without tensors.
        round: The current round, counted from 1.

    Args:
        server: The rule's view of the server.
        updates: The updates, which arrive one at a time. Each model is kept as one vector.
    """

    def __init__(self, server: Server, updates: Iterable[ClientUpdate]) -> None:
        self._start = state = server.state
        self.round = server.round
        own = [name for name in server.layout.parameters if state[name].is_floating_point()]
        others = [k for k, v in state.items() if v.is_floating_point() and k not in own]
        self._names = own, others
        self._counters = {k: v.clone() for k, v in state.items() if not v.is_floating_point()}
        dtype = row_dtype(state)

        read: list[tuple[ClientUpdate, Tensor, Tensor]] = []
        for update in updates:
            model = rebased(update, server).state
            for name, value in self._counters.items():
                torch.maximum(value, model[name].cpu(), out=value)
            rows = flatten(model, own, dtype), flatten(model, others, dtype)
            read.append((update.without_tensors(), *rows))

        # Sorted, so a rule does not depend on the order of arrival, not even by rounding.
        read.sort(key=lambda item: place(item[0]))
        self.members = [member for member, _, _ in read]
        self.parameters = Vectors(flatten(state, own, dtype), [row for _, row, _ in read])
        self.buffers = Vectors(flatten(state, others, dtype), [row for _, _, row in read])

    def __len__(self) -> int:
        return len(self.members)

    def weights(self, weighting: Weighting) -> list[int]:
        """Return the weight of each vector: its number of samples, or 1."""
        return [update.samples if weighting == "samples" else 1 for update in self.members]

    def name_clients(self, rule: Rule, did: str, vectors: Iterable[int]) -> None:
        """Log the clients affected by a rule, in ascending order."""
        if clients := sorted({client for k in vectors for client in _clients_of(self.members[k])}):
            named = some([*map(str, clients)], _NAMED)
            log.info("round %d: %s %s clients %s", self.round, type(rule).__name__, did, named)

    def note(self, name: str, values: Iterable[float]) -> None:
        """Log a metric per vector. ``weight`` is the factor of its change in the global change."""
        for update, value in zip(self.members, values, strict=True):
            update.metrics[name] = float(value)

    def entries(self, parameters: Tensor) -> State:
        """Return a flat parameter vector as entries in the shapes and dtypes of the state."""
        entries = unflatten(parameters, self._start, self._names[0])
        return cast(entries, {name: self._start[name] for name in entries})

    def vector(self, state: State) -> Tensor:
        """Return the parameters of a state as a flat vector."""
        return flatten(state, self._names[0], self.parameters.start.dtype)

    def state(self, parameters: Tensor, buffers: Tensor) -> State:
        """Return the next global state, not rounded to its dtypes. Counters take the maximum."""
        own, others = (
            unflatten(vector, self._start, names)
            for vector, names in zip((parameters, buffers), self._names, strict=True)
        )
        return own | others | self._counters


@dataclass
class _Bucket(ClientUpdate):
    """An update that stands for several clients.

    Attributes:
        clients: The clients' numbers.
    """

    clients: tuple[int, ...] = ()


def bucket_of(
    server: Server, members: Sequence[ClientUpdate], metrics: dict[str, float]
) -> ClientUpdate:
    """Return updates combined into one. A single update is returned unchanged.

    Args:
        server: The rule's view of the server.
        members: The updates.
        metrics: Collects the metrics of the bucket.
    """
    if len(members) == 1:
        return members[0]
    first, dtype = members[0], row_dtype(server.state)
    # A late client's model is rounded before averaging, like the rows of a robust rule.
    models = (_floats(rebased(update, server).state, dtype) for update in members)
    extras = mean_of((flatten_tree(update.extras), update.samples) for update in members)
    staleness = max(update.staleness for update in members)
    return _Bucket(
        first.client,
        server.round - staleness,
        samples=sum(update.samples for update in members),
        steps=sum(update.steps for update in members),
        # An attacker may claim any number of classes.
        class_counts=pad_sequence([u.class_counts for u in members], True).sum(0),
        state=_floats(mean_of((model, 1.0) for model in models), dtype),
        extras=nested_like(first.extras, cast(extras, flatten_tree(first.extras))),
        metrics=metrics,
        number=first.number,
        staleness=staleness,
        part=first.part,
        clients=tuple(client for update in members for client in _clients_of(update)),
    )


def _clients_of(update: ClientUpdate) -> tuple[int, ...]:
    """Return the clients that an update stands for."""
    return getattr(update, "clients", (update.client,))


def place(update: ClientUpdate) -> tuple[int, int]:
    """Return the key by which updates are sorted."""
    return update.client, update.number


def _floats(state: Mapping[str, Tensor], dtype: torch.dtype) -> State:
    """Return a state with its floating-point entries in a dtype."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}


Clients = NonNegativeInt | Annotated[float, Range("a share in [0, 0.5)", lambda x: 0 <= x < 0.5)]
"""A number of clients as an integer, or a fraction of them as a float."""


class ParameterRule(CohortRule, Settings):
    """A rule that bounds the influence of a few clients on the global model.

    It works on the parameters, as one vector per client. A subclass implements :meth:`parameters`,
    and :meth:`too_few` if it needs a minimum number of clients. All clients have equal weight
    unless documented otherwise, because an attacker could report any number of samples. A late
    client counts with its change from the version that it started from.

    Floating-point buffers, such as BatchNorm statistics, take the coordinate-wise median of the
    clients. A rule on the parameters would not exclude an attacker's buffers, their scale differs,
    and a median of variances stays positive. Integer entries, which are counters, take the maximum.

    The models of a round are in memory at the same time, as one vector each: ``4 n d`` bytes for
    ``n`` clients of ``d`` float32 parameters, 400 MB for a hundred clients of a million. Beyond
    that, a rule needs a few vectors and a block of 3 MB. It uses one thread, so the result does not
    depend on the engine.
    """

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        with one_thread():
            cohort = Cohort(server, updates)
            refuse_few(self, server, len(cohort))
            return cohort.state(self.parameters(server, cohort), self.buffers(cohort.buffers))

    @abstractmethod
    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the next parameters of the global model, ``(parameters,)``.

        Its effect on each client is recorded in the cohort.
        """

    def buffers(self, buffers: Vectors) -> Tensor:
        """Return the next floating-point buffers of the global model, ``(buffers,)``."""
        return buffers.median()

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Return the rule's needs: a cohort of known size, if one client is too few."""
        size: frozenset[Capability] = frozenset({"a cohort of known size"})
        return super().needs | size if self.too_few(1) else super().needs


def refuse_few(rule: CohortRule, server: Server, updates: int) -> None:
    """Refuse a round that has too few updates for a rule."""
    if fault := rule.too_few(updates):
        raise FederationError(
            f"round {server.round}: {fault}; the state of round {server.round - 1} is kept"
        )


def number_of(clients: int | float, total: int) -> int:
    """Return a number of clients, given as such or as a fraction of all of them.

    A fraction is rounded down: it is the largest number of attackers within it.
    """
    # In binary, 0.3 * 10 may be slightly less than 3.
    return clients if isinstance(clients, int) else int(clients * total + 1e-9)


def more_clients(argument: str, most: int) -> str:
    """Return what to change if there are too few clients.

    Args:
        argument: The rule's argument that requires them.
        most: The largest value that these clients allow. Negative if there is none.
    """
    lower = f"lower {argument} to at most {most}, or " if most >= 0 else ""
    return f"{lower}let more clients train per round"
