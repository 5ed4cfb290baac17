"""FedAvg, FedProx, and the two baselines without a federation.

FedAvg: McMahan et al. 2017, algorithm 1. Communication-Efficient Learning of Deep Networks from
Decentralized Data, arXiv:1602.05629.
FedProx: Li et al. 2020, algorithm 2. Federated Optimization in Heterogeneous Networks,
arXiv:1812.06127.
"""

from typing import Any, ClassVar

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Proximal
from flsuite.aggregators.rules.base import Rule, Weighting
from flsuite.aggregators.rules.mean import Mean
from flsuite.aggregators.staleness import Staleness, StalenessName
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.errors import FlsuiteError


class FedAvg(Aggregator):
    """The mean of the clients' models.

    Take it first: all other methods are compared with it.

    Args:
        weighting: ``samples`` weights a client by its number of training samples, as in the paper.
            ``uniform`` is the plain mean.
        staleness: The weight of a late client, under an asynchronous schedule.
        rule: Another rule instead of the mean. It has its own weighting.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    _weighting: ClassVar[Weighting] = "samples"  # the default

    def __init__(
        self,
        weighting: Weighting = "samples",
        staleness: StalenessName | Staleness = "polynomial",
        rule: Rule | None = None,
        **kwargs: Any,
    ) -> None:
        self.weighting, self.staleness = weighting, staleness
        if rule is not None and (weighting, staleness) != (self._weighting, "polynomial"):
            name = type(rule).__name__
            raise FlsuiteError(
                f"{type(self).__name__}: weighting and staleness belong to the mean, but rule is "
                f"{name}; leave them out, or set them as arguments of {name} if it has them"
            )
        super().__init__(rule=rule or Mean(weighting, staleness), **kwargs)


class LocalOnly(Aggregator):
    """The lower baseline: every entry is private, so each client trains alone.

    Take it in every comparison, as the floor: what a client reaches without the others.
    """

    needs = frozenset()  # nothing is averaged

    def __init__(self) -> None:
        super().__init__(private=["*"])


class Centralized(Aggregator):
    """The upper baseline: one client with the training samples of all clients.

    Take it in every comparison, as the ceiling.

    In each round, one fit replaces the fits of the cohort. It draws batches from the union of all
    clients' training samples, and takes as many steps as the cohort does in total.
    """

    pools = True
    needs = frozenset()
    withholds = {
        "clients": "trains on pooled data, without clients; set trainer.aggregator to FedAvg"
    }

    def __init__(self) -> None:
        super().__init__()


class FedProx(FedAvg):
    """FedAvg with a :class:`~flsuite.aggregators.Proximal` term.

    Take it if many local epochs let the clients' models drift apart.

    Args:
        mu: Weight of the proximal term. With 0 this is FedAvg.
        weighting: See FedAvg.
        kwargs: See FedAvg.
    """

    def __init__(
        self, mu: NonNegativeFloat = 0.01, weighting: Weighting = "samples", **kwargs: Any
    ) -> None:
        self.mu = mu
        super().__init__(weighting=weighting, objective=Proximal(mu), **kwargs)
