"""Label skew: each class is spread over clients in proportions from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from flsuite.common.arguments import NonNegativeInt, PositiveFloat, PositiveInt
from flsuite.data.partitions.counts import CountPartition, apportion


@dataclass
class Dirichlet(CountPartition):
    """Each class is spread over the clients in proportions drawn from Dir(alpha).

    This is the scheme of Yurochkin et al. 2019 (arXiv:1905.12022), which most papers mean by
    "Dirichlet(alpha)". Client sizes are also skewed. Two other schemes draw each client's class
    mix: ``DirichletBalanced`` keeps sizes equal (Hsu et al. 2019), and ``DirichletProportions``
    spreads each class in proportion to the clients' mixes (FedFisher).

    The whole table is redrawn until every client has ``min_samples``. With a small ``alpha`` and
    few classes, this may never happen in practice. After ``max_redraws``, the last table is
    therefore leveled deterministically: the largest client gives one sample of its most frequent
    class to the smallest, until every client has enough. All samples are used.

    Args:
        alpha: Concentration, above 0. A small value gives strong skew, and a large value approaches
            IID.
        min_samples: Minimum number of samples per client, at least 1.
        max_redraws: Redraws before the last table is leveled. 0 levels the first one.

    Raises:
        FlsuiteError: If a parameter is out of range, or the data cannot give ``min_samples`` to
            every client.
    """

    alpha: PositiveFloat
    min_samples: PositiveInt = 1
    max_redraws: NonNegativeInt = 100

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        shares = rng.dirichlet(np.full(clients, self.alpha), size=len(sizes))
        return apportion(shares, sizes, rng)
