"""Label skew at equal sizes: each client's class mix is drawn from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from flsuite.arguments import PositiveFloat
from flsuite.data.partitions.counts import CountPartition


@dataclass
class DirichletBalanced(CountPartition):
    """Equal client sizes, each client's mix of classes drawn from Dir(alpha).

    This is the scheme of Hsu et al. 2019 (arXiv:1909.06335) and of Acar et al. 2021
    (arXiv:2111.04263). Every client has ``n // clients`` samples, so up to ``clients - 1`` samples
    stay unused.

    Clients are filled without replacement, each by draws of classes from its own mix. When the
    draws of a class exceed what is left of it, a random part of them is granted. The others are
    repeated from the client's mix, renormalised over the classes that remain. If the mix gives
    those no weight, they are drawn in proportion to what remains of them. A client's actual mix can
    thus differ from the drawn one, because the clients together cannot exceed the data.

    Args:
        alpha: Concentration per class, above 0. Hsu's concentration is ``alpha`` times the number
            of classes.

    Raises:
        FlsuiteError: If ``alpha`` is out of range, or there are more clients than samples.
    """

    alpha: PositiveFloat

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        left = sizes.copy()
        mix = rng.dirichlet(np.full(len(left), self.alpha), size=clients)
        missing = np.full(clients, sizes.sum() // clients)
        counts = np.zeros((len(left), clients), dtype=np.int64)

        while missing.any():  # each pass either fills every client or exhausts a class
            # The mix over the classes that remain, or what remains of them where that is all 0.
            weights = np.where(left > 0, mix, 0.0)
            weights = np.where(weights.sum(axis=1, keepdims=True) > 0, weights, left)
            granted = rng.multinomial(missing, weights / weights.sum(axis=1, keepdims=True)).T
            # A class that is drawn too often: a random part of the draws, without replacement.
            for k in np.flatnonzero(granted.sum(axis=1) > left):
                granted[k] = rng.multivariate_hypergeometric(granted[k], left[k])
            counts += granted
            left -= granted.sum(axis=1)
            missing -= granted.sum(axis=0)
        return counts
