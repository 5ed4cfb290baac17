"""Colluding attackers, which see other updates before they send theirs."""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.part import Capability
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, Sums, Tree, wide


class Collusion(Attack):
    """Attackers that all send the same change, computed from the round's updates that they know.

    Each known client counts equally, whatever its number of samples.

    Attributes:
        knows: The clients whose updates the attackers know: attackers, honest clients, or all.
    """

    knows: Literal["attackers", "honest", "all"]

    @property
    def needs(self) -> frozenset[Capability]:
        return super().needs | {"each update", "current models", "plain updates"}

    @abstractmethod
    def conspire(self, mean: State, std: State, clients: int, attackers: int) -> State:
        """Return the change that every attacker of a round sends.

        If a round has no client that they know, they send the model that they received.

        Args:
            mean: Mean of the known clients' changes, trained honestly, float64.
            std: Standard deviation of these changes (ddof 0), float64.
            clients: Number of updates in the round.
            attackers: Number of attackers among them, at least one.
        """


def collude(
    attack: Collusion, received: State, names: Collection[str], updates: Iterator[ClientUpdate]
) -> Iterator[ClientUpdate]:
    """Yield the updates of a round, with the attackers' updates replaced.

    Honest updates pass through one at a time, in order, and the attackers' updates follow.
    Meanwhile, two float64 states and the attackers' buffers are held in memory.

    Args:
        attack: The attack.
        received: The shared state that all clients started from.
        names: Names of its parameters. Other entries are sent as trained.
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
        moved = attack.conspire(*_mean_and_std(known.values), clients, len(held))
    sent = {
        name: received[name].add(moved[name]).to(received[name].dtype)
        if name in moved
        else received[name].clone()
        for name in names
    }
    for update in held:
        state = {name: sent[name] if name in sent else update.state[name] for name in received}
        # A separate part, because updates of one part must be adjacent.
        yield replace(update, state=state, part=-1)


def _mean_and_std(known: Tree) -> tuple[State, State]:
    """Return mean and standard deviation (ddof 0) of changes from their sums, float64.

    Args:
        known: The sums over changes: ``count``, ``sums`` and ``squares``.
    """
    mean = {name: total / known["count"] for name, total in known["sums"].items()}
    std = {
        # Rounding may make a difference of equal numbers negative.
        name: (total / known["count"] - mean[name].square()).clamp_(min=0).sqrt_()
        for name, total in known["squares"].items()
    }
    return mean, std
