"""Label skew at equal sizes: each client's class mix is drawn from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from flsuite.common.arguments import PositiveFloat
from flsuite.data.partitions.counts import CountPartition
from flsuite.data.partitions.quantity import QuantitySkew


@dataclass
class DirichletBalanced(CountPartition):
    """Equal client sizes, with each client's class mix drawn from Dir(alpha).

    This is the scheme of Hsu et al. 2019 (arXiv:1909.06335) and of Acar et al. 2021
    (arXiv:2111.04263). Every client has ``n // clients`` samples, so up to ``clients - 1`` samples
    stay unused. With ``sizes``, clients differ in size too, and all samples are used.

    Clients are filled without replacement, by drawing classes from each client's mix. If the draws
    of a class exceed its remaining samples, a random subset of them is granted. The others are
    redrawn from the client's mix, renormalized over the remaining classes. If the mix gives those
    no weight, they are drawn in proportion to their remaining samples. A client's actual mix can
    thus differ from the drawn one, because the clients together cannot exceed the data.

    Args:
        alpha: Concentration per class, above 0. Hsu's concentration is ``alpha`` times the number
            of classes.
        sizes: How many samples each client has. Default: equal sizes.

    Raises:
        FlsuiteError: If ``alpha`` is out of range, or there are more clients than samples, or too
            few for ``sizes``.
    """

    alpha: PositiveFloat
    sizes: QuantitySkew | None = None

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        left = sizes.copy()
        mix = rng.dirichlet(np.full(len(left), self.alpha), size=clients)
        total = sizes.sum()
        missing = np.full(clients, total // clients)
        if self.sizes is not None:
            self.sizes.require_enough(int(total), clients)
            missing = self.sizes.counts(np.array([total]), clients, rng)[0]
        counts = np.zeros((len(left), clients), dtype=np.int64)

        while missing.any():  # each pass either fills every client or exhausts a class
            # The mix over the remaining classes, or their remaining samples if all weights are 0.
            weights = np.where(left > 0, mix, 0.0)
            weights = np.where(weights.sum(axis=1, keepdims=True) > 0, weights, left)
            granted = rng.multinomial(missing, weights / weights.sum(axis=1, keepdims=True)).T
            # For an overdrawn class, grant a random subset of the draws.
            for k in np.flatnonzero(granted.sum(axis=1) > left):
                granted[k] = rng.multivariate_hypergeometric(granted[k], left[k])
            counts += granted
            left -= granted.sum(axis=1)
            missing -= granted.sum(axis=0)
        return counts
