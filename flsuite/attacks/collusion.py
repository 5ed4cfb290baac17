"""Attackers that see updates of others before they send theirs."""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from flsuite.aggregators.part import Capability
from flsuite.attacks.base import Attack
from flsuite.messages import ClientUpdate
from flsuite.state import State, Sums, Tree, wide

Known = Literal["attackers", "honest", "all"]
"""The clients whose updates attackers know: their own, those of all honest clients, or all."""


class Collusion(Attack):
    """Attackers that all send the same change, made from what they know of a round's updates.

    Every client counts the same in what they know, whatever its samples.

    Attributes:
        knows: The clients whose updates they know.
    """

    knows: Known

    @property
    def needs(self) -> frozenset[Capability]:
        return super().needs | {"each update", "current models", "plain updates"}

    @abstractmethod
    def conspire(self, mean: State, std: State, clients: int, attackers: int) -> State:
        """Return the change that every attacker of a round sends.

        In a round without any client that they know, they send the model that they have received.

        Args:
            mean: The mean of the changes of the clients that they know, trained honestly, float64.
            std: The standard deviation of these changes (ddof 0), float64.
            clients: Updates in the round.
            attackers: Those of attackers among them, at least one.
        """


def collude(
    attack: Collusion, received: State, names: Collection[str], updates: Iterator[ClientUpdate]
) -> Iterator[ClientUpdate]:
    """Yield the updates of a round, with the attackers' updates replaced.

    Honest updates pass through one at a time, in their order, and those of attackers follow. Two
    states in float64 and the attackers' buffers are held meanwhile.

    Args:
        attack: The attack.
        received: The shared state that all clients have started from.
        names: Its parameters. Other entries are sent as trained.
        updates: The updates as trained.
    """
    known, held, clients, parameters = Sums(), list[ClientUpdate](), 0, set(names)
    for update in updates:
        clients += 1
        is_attacker = update.client in attack.attackers
        if attack.knows == "all" or is_attacker == (attack.knows == "attackers"):
            change = wide({name: update.state[name] - received[name] for name in names})
            squares = {name: value.square() for name, value in change.items()}
            known.add({"count": 1.0, "sums": change, "squares": squares})
        if is_attacker:
            buffers = {name: v for name, v in update.state.items() if name not in parameters}
            held.append(replace(update, state=buffers))
        else:
            yield update

    if not held:
        return
    moved: State = {}
    if known.values:
        moved = attack.conspire(*mean_and_std(known.values), clients, len(held))
    sent = {
        name: received[name].add(moved[name]).to(received[name].dtype)
        if name in moved
        else received[name].clone()
        for name in names
    }
    for update in held:
        state = {name: sent[name] if name in sent else update.state[name] for name in received}
        # A part of their own, because updates of one part follow each other.
        yield replace(update, state=state, part=-1)


def mean_and_std(known: Tree) -> tuple[State, State]:
    """Return mean and standard deviation (ddof 0) from sums over changes, float64.

    Args:
        known: ``count``, ``sums`` and the sums of ``squares``.
    """
    mean = {name: total / known["count"] for name, total in known["sums"].items()}
    std = {
        # Rounding may leave a difference of equal numbers below zero.
        name: (total / known["count"] - mean[name].square()).clamp_(min=0).sqrt_()
        for name, total in known["squares"].items()
    }
    return mean, std
