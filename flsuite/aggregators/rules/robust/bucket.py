"""Several updates as one: their mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.robust.vectors import row_dtype
from flsuite.aggregators.staleness import rebased
from flsuite.messages import ClientUpdate
from flsuite.state import State, cast, flatten_tree, mean_of, nested_like

__all__ = ["Bucket", "bucket_of", "clients_of", "place"]


@dataclass
class Bucket(ClientUpdate):
    """An update that stands for those of several clients.

    Attributes:
        clients: Their numbers.
    """

    clients: tuple[int, ...] = ()


def bucket_of(
    server: Server, members: Sequence[ClientUpdate], metrics: dict[str, float]
) -> ClientUpdate:
    """Return updates as one. One alone is returned as it is.

    Args:
        server: What a rule sees on the server.
        members: The updates.
        metrics: What takes the numbers that are noted for the bucket.
    """
    if len(members) == 1:
        return members[0]
    first, dtype = members[0], row_dtype(server.state)
    # A late client's model is rounded before the mean, as in the rows of a robust rule.
    models = (_floats(rebased(update, server).state, dtype) for update in members)
    extras = mean_of((flatten_tree(update.extras), update.samples) for update in members)
    staleness = max(update.staleness for update in members)
    return Bucket(
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
        clients=tuple(client for update in members for client in clients_of(update)),
    )


def clients_of(update: ClientUpdate) -> tuple[int, ...]:
    """Return the clients that an update stands for."""
    return update.clients if isinstance(update, Bucket) else (update.client,)


def place(update: ClientUpdate) -> tuple[int, int]:
    """Return the key by which updates are sorted."""
    return update.client, update.number


def _floats(state: Mapping[str, Tensor], dtype: torch.dtype) -> State:
    """Return a state with its floating-point entries in a dtype."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
