"""Label skew drawn from a Dirichlet distribution: two schemes, both published, that are easily taken for each other.

``Dirichlet`` draws, for each class, how it spreads over the clients: sizes are skewed as well. ``DirichletBalanced``
draws, for each client, its mix of classes: sizes stay equal. A small ``alpha`` is strong skew; a large one approaches
IID.
"""

import math

import numpy as np

from flsuite.data.partitions.base import Partition
from flsuite.data.partitions.iid import deal
from flsuite.errors import FlsuiteError

__all__ = ["Dirichlet", "DirichletBalanced", "apportion", "check_min_samples", "check_positive"]


class Dirichlet(Partition):
    """Each class is spread over the clients in proportions drawn from Dir(alpha).

    The scheme of Yurochkin et al. 2019 (arXiv:1905.12022), the usual meaning of "Dirichlet(alpha)" since; that of Hsu
    et al. 2019 is ``DirichletBalanced``. The whole table is drawn again until every client has ``min_samples``. With a
    small ``alpha`` and few classes that may practically never happen; so once the redraws are used up, the last draw is
    mended, deterministically: the largest client gives one sample of its most frequent class to the smallest, until
    nobody is short. All samples are used.

    Args:
        alpha: Concentration, above 0.
        min_samples: The fewest samples a client may have, at least 1.
        max_redraws: How often to draw again before mending; 0 mends the first draw.

    Raises:
        FlsuiteError: If a parameter is out of range, or the data cannot give ``min_samples`` to every client.
    """

    def __init__(self, alpha: float, min_samples: int = 1, max_redraws: int = 100) -> None:
        check_positive("Dirichlet.alpha", alpha)
        if min_samples < 1:
            raise FlsuiteError(f"Dirichlet.min_samples must be at least 1, got {min_samples}")
        if max_redraws < 0:
            raise FlsuiteError(f"Dirichlet.max_redraws must be at least 0, got {max_redraws}")
        self.alpha = alpha
        self.min_samples = min_samples
        self.max_redraws = max_redraws

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        self.check_enough(len(labels), clients)
        check_min_samples("Dirichlet", self.min_samples, clients, len(labels))
        classes = np.unique(labels, return_inverse=True)[1]
        sizes = np.bincount(classes)
        for _ in range(1 + self.max_redraws):
            counts = apportion(
                rng.dirichlet(np.full(clients, self.alpha), size=len(sizes)), sizes, rng
            )
            if counts.sum(axis=0).min() >= self.min_samples:
                break
        return deal(classes, _mend(counts, self.min_samples), rng)


class DirichletBalanced(Partition):
    """Equal client sizes, each client's class mix drawn from Dir(alpha).

    The scheme of Hsu et al. 2019 (arXiv:1909.06335) and of Acar et al. 2021 (arXiv:2111.04263): every client has
    ``n // clients`` samples, so up to ``clients - 1`` samples stay unused. Clients fill up without replacement, each
    drawing classes from its own mix. When a class runs out, what is left of it goes to a random part of the draws that
    asked for it; the draws refused are repeated from the client's mix renormalised over the classes that remain, or, if
    the mix gives those no weight at all, in proportion to what remains of them. The drawn mix is thus a wish: clients
    together can only have what the data has.

    Args:
        alpha: Concentration, above 0. It is per class, so Hsu's concentration is ``alpha`` times the number of classes.

    Raises:
        FlsuiteError: If ``alpha`` is out of range, or there are more clients than samples.
    """

    def __init__(self, alpha: float) -> None:
        check_positive("DirichletBalanced.alpha", alpha)
        self.alpha = alpha

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        self.check_enough(len(labels), clients)
        classes = np.unique(labels, return_inverse=True)[1]
        left = np.bincount(classes)
        mix = rng.dirichlet(np.full(len(left), self.alpha), size=clients)
        short = np.full(clients, len(labels) // clients)
        counts = np.zeros((len(left), clients), dtype=np.int64)
        while short.any():  # a pass either fills every client or exhausts a class
            weights = np.where(left > 0, mix, 0.0)
            weights = np.where(weights.sum(axis=1, keepdims=True) > 0, weights, left)
            granted = rng.multinomial(short, weights / weights.sum(axis=1, keepdims=True)).T
            for k in np.flatnonzero(granted.sum(axis=1) > left):
                granted[k] = rng.multivariate_hypergeometric(granted[k], left[k])
            counts += granted
            left -= granted.sum(axis=1)
            short -= granted.sum(axis=0)
        return deal(classes, counts, rng)


def apportion(shares: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole counts ``(classes, clients)`` for shares of the same shape whose rows sum to 1; row k sums to ``sizes[k]``.

    Each row is cut at the rounded cumulative shares. Where the cuts fall depends on the position, which would favour
    the same clients in every class, so each row's counts are shuffled: the distribution is exchangeable and stays as it
    was.
    """
    cuts = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
    cuts[:, -1] = sizes
    return rng.permuted(np.diff(cuts, axis=1, prepend=0), axis=1)


def check_positive(name: str, value: float) -> None:
    """Refuse a parameter that is not a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise FlsuiteError(f"{name} must be finite and above 0, got {value}")


def check_min_samples(partition: str, min_samples: int, clients: int, samples: int) -> None:
    """Refuse a minimum that the data cannot give to every client."""
    if min_samples * clients > samples:
        raise FlsuiteError(
            f"{clients} clients cannot have {min_samples} each of {samples} training samples; "
            f"lower {partition}.min_samples or data.clients"
        )


def _mend(counts: np.ndarray, min_samples: int) -> np.ndarray:
    """Move samples from the largest clients to those with fewer than ``min_samples``; ties go to the lower number."""
    counts = counts.copy()
    sizes = counts.sum(axis=0)
    while sizes[poor := sizes.argmin()] < min_samples:
        rich = sizes.argmax()
        k = counts[:, rich].argmax()
        counts[k, [rich, poor]] += (-1, 1)
        sizes[[rich, poor]] += (-1, 1)
    return counts
