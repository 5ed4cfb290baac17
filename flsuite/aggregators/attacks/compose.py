"""An algorithm under attack: transforms of the attackers' updates, or a rule that replaces them."""

from collections.abc import Iterator
from dataclasses import dataclass

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.attacks.updates import Collusion, collude
from flsuite.aggregators.part import Named, Server
from flsuite.aggregators.rules.base import Rule, RuleAround
from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, add, difference, wide


def with_attack(aggregator: Aggregator, attack: Attack | None) -> Aggregator:
    """Return an algorithm that includes the attack on its updates.

    Changes to training batches are not included, see :meth:`Attack.callbacks`.

    Args:
        aggregator: The algorithm. It is not changed.
        attack: The attack, whose attackers are chosen later. Default: none.
    """
    if attack is None or not attack.attackers:
        return aggregator
    given = Named("trainer.attack", attack)
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
