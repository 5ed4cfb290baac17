"""Label skew: each class is spread over clients in proportions from a Dirichlet distribution."""

from collections.abc import Sequence

import numpy as np

from flsuite.data.partitions.base import Partition
from flsuite.data.partitions.counts import (
    apportion,
    assign_by_counts,
    check_min_samples,
    draw_counts,
)
from flsuite.errors import require_at_least, require_positive

__all__ = ["Dirichlet"]


class Dirichlet(Partition):
    """Each class is spread over the clients in proportions drawn from Dir(alpha).

    This is the scheme of Yurochkin et al. 2019 (arXiv:1905.12022), which most papers mean by
    "Dirichlet(alpha)". Client sizes are skewed as well. Two other schemes draw each client's mix of
    classes: ``DirichletBalanced`` keeps sizes equal (Hsu et al. 2019), and ``DirichletProportions``
    spreads each class in proportion to the clients' mixes (FedFisher).

    The whole table is drawn again until every client has ``min_samples``. With a small ``alpha``
    and few classes that may never happen in practice. After ``max_redraws``, the last table is
    therefore levelled, deterministically: the largest client gives one sample of its most frequent
    class to the smallest, until every client has enough. All samples are used.

    Args:
        alpha: Concentration, above 0. A small one gives strong skew, and a large one approaches
            IID.
        min_samples: The fewest samples per client, at least 1.
        max_redraws: Redraws before the last table is levelled. 0 levels the first one.

    Raises:
        FlsuiteError: If a parameter is out of range, or the data cannot give ``min_samples`` to
            every client.
    """

    def __init__(self, alpha: float, min_samples: int = 1, max_redraws: int = 100) -> None:
        self.alpha = alpha
        self.min_samples = min_samples
        self.max_redraws = max_redraws
        require_positive("Dirichlet", alpha=alpha)
        require_at_least("Dirichlet", 1, min_samples=min_samples)
        require_at_least("Dirichlet", 0, max_redraws=max_redraws)

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        self.check_enough(len(labels), clients)
        check_min_samples("Dirichlet", self.min_samples, clients, len(labels))

        classes = np.unique(labels, return_inverse=True)[1]
        sizes = np.bincount(classes)

        def draw() -> np.ndarray:
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(sizes))
            return apportion(shares, sizes, rng)

        counts = draw_counts(draw, self.min_samples, self.max_redraws)
        return assign_by_counts(classes, counts, rng)
