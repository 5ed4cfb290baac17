"""Attackers that see updates of others before they send theirs."""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flsuite.attacks.base import Attack
from flsuite.messages import ClientUpdate
from flsuite.state import State

__all__ = ["Collusion", "Known", "Moments", "collude"]

Known = Literal["attackers", "honest", "all"]
"""The clients whose updates attackers know: their own, those of all honest clients, or all."""


class Moments:
    """Mean and deviation of changes that arrive one at a time, summed in float64.

    It holds two states, whatever the number of changes.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def add(self, change: State) -> None:
        """Add one change."""
        self.count += 1
        for name, value in change.items():
            exact = value.to(torch.float64)
            if name not in self._sums:
                self._sums[name], self._squares[name] = exact.clone(), exact.square()
            else:
                self._sums[name] += exact
                self._squares[name].addcmul_(exact, exact)

    def mean(self) -> State:
        """Return the mean, float64. It is empty if nothing was added."""
        return {name: total / self.count for name, total in self._sums.items()}

    def std(self) -> State:
        """Return the standard deviation (ddof 0), float64."""
        mean = self.mean()
        return {
            # Rounding may leave a difference of equal numbers below zero.
            name: (total / self.count - mean[name].square()).clamp_(min=0).sqrt_()
            for name, total in self._squares.items()
        }


class Collusion(Attack):
    """Attackers that all send the same change, made from what they know of a round's updates.

    Every client counts the same in what they know, whatever its samples. A collusion needs
    rounds whose updates are together before they are aggregated, and as they are.

    Attributes:
        knows: The clients whose updates they know.
    """

    knows: Known
    needs: ClassVar[str] = "needs the updates of a whole round as they are"

    @abstractmethod
    def conspire(self, known: Moments, clients: int, attackers: int) -> State:
        """Return the change that every attacker of a round sends.

        Args:
            known: Moments of the changes of the clients that they know, trained honestly: at least
                one. In a round without any, attackers send the model that they have received.
            clients: Updates in the round.
            attackers: Those of attackers among them, at least one.
        """

    def knows_of(self, client: int) -> bool:
        """Return whether attackers know the update of a client."""
        return self.knows == "all" or self.has(client) == (self.knows == "attackers")


def collude(
    attack: Collusion, received: State, names: Collection[str], updates: Iterator[ClientUpdate]
) -> Iterator[ClientUpdate]:
    """Yield the updates of a round with those of attackers replaced.

    Honest updates pass through one at a time, in their order, and those of attackers follow. What
    is held meanwhile is two states in float64, and the attackers' buffers.

    Args:
        attack: The attack.
        received: The shared state that all clients have started from.
        names: Its parameters. Other entries are sent as trained.
        updates: The updates as trained.
    """
    known, held, clients, parameters = Moments(), list[ClientUpdate](), 0, set(names)
    for update in updates:
        clients += 1
        if attack.attackers and attack.knows_of(update.client):
            known.add({name: update.state[name] - received[name] for name in names})
        if attack.has(update.client):
            buffers = {name: v for name, v in update.state.items() if name not in parameters}
            held.append(replace(update, state=buffers))
        else:
            yield update

    if not held:
        return
    change = attack.conspire(known, clients, len(held)) if known.count else {}
    sent = {
        name: received[name].add(change[name]).to(received[name].dtype)
        if name in change
        else received[name].clone()
        for name in names
    }
    for update in held:
        state = {name: sent[name] if name in sent else update.state[name] for name in received}
        # A part of their own, because updates of one part follow each other.
        yield replace(update, state=state, part=-1)
