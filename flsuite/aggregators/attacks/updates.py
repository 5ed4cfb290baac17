"""Attacks that alter an update: alone, or with the knowledge of other attackers.

They are transforms of the attackers' updates, or a rule that replaces these updates.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import torch

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.part import Capability, Server, named
from flsuite.aggregators.rules.base import Rule, RuleAround
from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, Sums, Tree, add, difference, wide


@dataclass(eq=False)
class GaussianNoise(Attack):
    """Adds noise to every parameter that is sent (Blanchard et al. 2017).

    Take it as a fault rather than an attacker: broken clients.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        std: Standard deviation of the noise, in the unit of the parameters. 0 is an honest update.
    """

    std: NonNegativeFloat = 1.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        return noisy(trained, self.std, fit)


def noisy(state: State, std: float, fit: FitView) -> State:
    """Return a copy of a state with i.i.d. normal noise of standard deviation ``std``."""
    if not std:
        return {name: value.clone() for name, value in state.items()}
    generator = fit.generator("attack/update")  # honest clients never draw from this stream
    return {
        name: value + std * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in state.items()
    }


@dataclass(eq=False)
class FreeRider(Attack):
    """Returns the received model instead of a trained one (Lin et al. 2019; Fraboni et al. 2021).

    Take it to test whether clients that do no work are noticed.

    With ``last_change``, attackers send ``w_t + (w_t - w_s)``, where ``w_s`` is the model that they
    received the previous time: the delta-weights attack of Lin et al. Adding ``noise`` gives their
    advanced attack. The fit still runs, because an algorithm may need its other results, but its
    parameters are discarded.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        last_change: Whether to repeat the last change of the global model. A client's first round
            has none.
        noise: Standard deviation of Gaussian noise on every parameter, as a disguise.
    """

    last_change: bool = False
    noise: NonNegativeFloat = 0.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        sent = received
        if self.last_change:
            before: State = fit.memory.get("received", received)
            sent = add(received, difference(received, before))
            # Clones, because the received tensors may be in reused memory.
            fit.memory["received"] = {name: value.clone() for name, value in received.items()}
        return noisy(sent, self.noise, fit)


@dataclass(eq=False)
class ScaledUpdate(Attack):
    """Scales the attackers' change (Bagdasaryan et al. 2020, "How to backdoor federated learning").

    Take it to see what one attacker can do to a mean.

    An attacker that received ``w`` and trained to ``w_k`` sends ``w + boost (w_k - w)``, as in the
    paper. If it has ``1 / boost`` of the mean's weight, and the other clients hardly change, the
    next global model is its own.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        boost: Factor of the change. 1 is an honest update.
    """

    boost: NonNegativeFloat = 10.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        return boosted(trained, received, self.boost)


def boosted(trained: State, received: State, boost: float) -> State:
    """Return ``received + boost (trained - received)``, exactly ``trained`` for a boost of 1."""
    return add(trained, difference(trained, received), boost - 1)


@dataclass(eq=False)
class SignFlip(Attack):
    """Sends the change with the opposite sign (Li et al. 2019, RSA).

    Take it as the first test of a robust rule.

    An attacker that received ``w`` and trained to ``w_k`` sends ``w - scale (w_k - w)``.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        scale: Factor of the change.
    """

    scale: NonNegativeFloat = 1.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        return add(received, difference(trained, received), -self.scale)


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


# The largest fraction of clients nearer to the mean. Without a bound, a majority of attackers
# would be infinitely far from the mean.
_MOST = 0.999


@dataclass(eq=False)
class ALittleIsEnough(Collusion):
    """Shifts the mean as far as the spread of the updates conceals it (Baruch et al. 2019).

    Take it against rules that look for outliers.

    Every attacker sends ``mean + z std`` of the changes, coordinate by coordinate. Mean and
    standard deviation are computed from the attackers' own honestly trained changes. A single
    attacker sees no deviation, and sends its honest change.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        z: Standard deviations from the mean. Default: ``z_max`` of the paper for the clients of the
            round, see :func:`largest_hidden`.
        knows: ``attackers``, as in the paper, or ``all``: compute the moments over all clients.
    """

    z: NonNegativeFloat | None = None
    knows: Literal["attackers", "all"] = "attackers"

    def line(self, clients: int) -> str:
        line, attackers = super().line(clients), len(self.attackers)
        if attackers == 1 and self.knows == "attackers":
            return f"{line}; one attacker sees no deviation and sends its honest change: name more"
        if self.z is not None or not attackers or largest_hidden(clients, attackers):
            return line
        return f"{line}; the paper's z is 0 for so few, which is the mean of their changes: set z"

    def conspire(self, mean: State, std: State, clients: int, attackers: int) -> State:
        z = largest_hidden(clients, attackers) if self.z is None else self.z
        return add(mean, std, z)


def largest_hidden(clients: int, attackers: int) -> float:
    """Return ``z_max``, the largest deviation at which honest clients still support the attackers.

    With ``s = floor(n / 2 + 1) - m`` supporters needed, it is the largest ``z`` with
    ``phi(z) < (n - m - s) / (n - m)``, where ``phi`` is the normal CDF. It is 0 if the right-hand
    side is below one half, as for few attackers, and at most 3.09, which a majority of attackers
    reaches.

    Args:
        clients: Clients of the round, ``n``.
        attackers: Attackers among them, ``m``.
    """
    honest, supporters = clients - attackers, clients // 2 + 1 - attackers
    share = (honest - supporters) / honest if honest else 1.0
    return NormalDist().inv_cdf(min(max(share, 0.5), _MOST))


@dataclass(eq=False)
class InnerProduct(Collusion):
    """Sends the honest mean with the opposite sign (Xie et al. 2020, "Fall of empires").

    Take it against rules that choose by distance.

    Every attacker sends ``-epsilon`` times the mean of the honest changes. With ``m`` attackers of
    ``n`` equally weighted clients, the inner product of the mean and the honest mean is negative if
    ``epsilon > (n - m) / m``. A small ``epsilon`` stays near honest updates and defeats rules that
    select by distance. Attackers that know no client send the model that they received.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        epsilon: Factor of the mean.
        knows: ``honest``, as in the paper, or ``attackers``: use the mean of their own changes,
            trained honestly.
    """

    epsilon: NonNegativeFloat = 0.5
    knows: Literal["honest", "attackers"] = "honest"

    def conspire(self, mean: State, std: State, clients: int, attackers: int) -> State:
        return {name: value.mul(-self.epsilon) for name, value in mean.items()}


def with_attack(aggregator: Aggregator, attack: Attack | None) -> Aggregator:
    """Return an algorithm that includes the attack on its updates.

    Changes to training batches are not included, see :meth:`Attack.poisoned`.

    Args:
        aggregator: The algorithm. It is not changed.
        attack: The attack, whose attackers are chosen later. Default: none.
    """
    if attack is None or not attack.attackers:
        return aggregator
    given = named("trainer.attack", attack)
    if isinstance(attack, Collusion):
        return aggregator.with_parts(given, rule=_Colluding(aggregator.rule, attack))
    if type(attack).alter is Attack.alter:
        return aggregator.with_parts(given)

    # After the algorithm's transforms and before the codecs, which see the altered change.
    transforms = list(aggregator.transforms)
    codecs = (i for i, part in enumerate(transforms) if "dense changes" in part.withholds)
    transforms.insert(next(codecs, len(transforms)), _Altering(attack))
    return aggregator.with_parts(given, transforms=transforms)


@dataclass(frozen=True)
class _Altering(Transform):
    """Applies an attack on updates to the attackers' changes.

    Args:
        attack: The attack, whose attackers have been chosen.
    """

    attack: Attack

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        if fit.client not in self.attack.attackers:
            return payload
        received = {name: fit.base[name] for name in payload.change}
        exact = wide(received)
        moved = add(exact, payload.change)
        trained = {name: value.to(received[name].dtype) for name, value in moved.items()}
        altered = self.attack.alter(trained, received, fit)
        return payload._replace(change=difference(wide(altered), exact))


@dataclass(frozen=True)
class _Colluding(RuleAround):
    """A rule that receives a round's updates with the attackers' updates replaced.

    Args:
        rule: The rule.
        attack: The attack, whose attackers have been chosen.
    """

    rule: Rule
    attack: Collusion

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        names = [name for name in server.layout.parameters if name in server.state]
        return self.of_rule(server, collude(self.attack, server.state, names, updates))

    @property
    def name(self) -> str:
        """Return the name of the rule."""
        return type(self.rule).__name__
