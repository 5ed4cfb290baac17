"""Aggregation from sums: what every client adds up to, and no model of a single client."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from flsuite.messages import ClientUpdate
from flsuite.state import State

__all__ = ["STATE", "Summed", "mean_state", "means", "state_summands", "sum_up"]

STATE = "state/"
"""The prefix of the sums of ``n_i w_i``."""


class Summed(NamedTuple):
    """What is left of the updates of a round.

    Attributes:
        sums: The sums of the clients' summands, in float64.
        updates: The updates without their models.
        seconds: The time of summing. Clients may train while the server waits for their updates.
    """

    sums: State
    updates: list[ClientUpdate]
    seconds: float


def state_summands(update: ClientUpdate) -> State:
    """Return ``n_i w_i`` by the names of the state's entries, in float64. A counter is no sum."""
    floats = {name: w for name, w in update.state.items() if w.is_floating_point()}
    return {STATE + name: w.double() * update.samples for name, w in floats.items()}


def sum_up(
    updates: Iterable[ClientUpdate],
    summands: Callable[[ClientUpdate], State],
    keep: Sequence[str] = (),
) -> Summed:
    """Return the sums over updates that arrive one at a time.

    Args:
        updates: The updates.
        summands: Returns what an update adds to the sums.
        keep: The extras that stay with the updates. Counters, the integer entries of the state,
            stay in any case.
    """
    sums: State = {}
    kept: list[ClientUpdate] = []
    seconds = 0.0
    for update in updates:
        started = time.perf_counter()
        for name, summand in summands(update).items():
            if name in sums:
                sums[name] += summand
            else:
                sums[name] = summand.to(torch.float64, copy=True)

        counters = {k: value for k, value in update.state.items() if not value.is_floating_point()}
        extras = {key: update.extras[key] for key in keep}
        kept.append(replace(update, state=counters, extras=extras, base={}))
        seconds += time.perf_counter() - started
    return Summed(sums, kept, seconds)


def means(sums: State, updates: Sequence[ClientUpdate]) -> State:
    """Return the sums divided by the samples of all clients."""
    samples = sum(update.samples for update in updates)
    return {name: value / samples for name, value in sums.items()}


def mean_state(mean: State, updates: Sequence[ClientUpdate], like: State) -> State:
    """Return the mean of the clients' models by samples, as FedAvg does.

    A counter takes the maximum, and stays as it was where the updates do not have it.

    Args:
        mean: The means, with the entries of the state under :data:`STATE`.
        updates: The updates without their models.
        like: The state that the clients started from.
    """
    new: State = {}
    for name, old in like.items():
        if old.is_floating_point():
            new[name] = mean[STATE + name].to(old.dtype)
        else:
            counters = [update.state[name] for update in updates if name in update.state]
            new[name] = torch.stack(counters).amax(0) if counters else old.clone()
    return new
