"""Class mixes that are drawn from Dirichlet distributions."""

from dataclasses import dataclass

import numpy as np

from flsuite.common.arguments import NonNegativeInt, PositiveFloat, PositiveInt
from flsuite.data.partitions.base import CountPartition, apportion, apportion_by_client
from flsuite.data.partitions.shares import QuantitySkew, assign_classes


@dataclass
class Dirichlet(CountPartition):
    """Each class is spread over the clients in proportions drawn from Dir(alpha).

    Take it first: most papers have it.

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
    """

    alpha: PositiveFloat
    min_samples: PositiveInt = 1
    max_redraws: NonNegativeInt = 100

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        shares = rng.dirichlet(np.full(clients, self.alpha), size=len(sizes))
        return apportion(shares, sizes, rng)


@dataclass
class DirichletBalanced(CountPartition):
    """Equal client sizes, with each client's class mix drawn from Dir(alpha).

    Take it if classes should be skewed and sizes not.

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


@dataclass
class DirichletExtended(CountPartition):
    """``classes_per_client`` classes per client, each shared unevenly by its clients.

    Take it if clients have few classes, in unequal shares.

    This is the extended Dirichlet strategy ExDir(C, alpha) of Li and Lyu 2023 (arXiv:2311.03154):
    classes are assigned as in ``Pathological``, and each class is spread over its own clients in
    proportions drawn from Dir(alpha). A class that no client has stays unused.

    The proportions are redrawn until every client has ``min_samples``. After ``max_redraws``, the
    last table is leveled as in ``Dirichlet``.

    Args:
        classes_per_client: From 1 to the number of classes in the training data.
        alpha: Concentration, above 0. A large value approaches ``Pathological``.
        min_samples: Minimum number of samples per client, at least 1.
        max_redraws: Redraws before the last table is leveled. 0 levels the first one.
    """

    classes_per_client: PositiveInt
    alpha: PositiveFloat
    min_samples: PositiveInt = 1
    max_redraws: NonNegativeInt = 100

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        per_client = self.classes_per_client
        holds = assign_classes("DirichletExtended", len(sizes), clients, per_client, rng)
        counts = np.zeros(holds.shape, dtype=np.int64)
        for k, own in enumerate(holds):
            holders = np.flatnonzero(own)
            if len(holders):
                shares = rng.dirichlet(np.full(len(holders), self.alpha))
                counts[k, holders] = apportion(shares[None], sizes[k : k + 1], rng)[0]
        return counts


@dataclass
class DirichletProportions(Dirichlet):
    """Each client draws a class mix from Dir(alpha), and classes are spread by the mixes.

    Take it to compare with FedFisher.

    Client i draws ``q_i ~ Dir(alpha)`` over the classes. Class k is then spread over the clients in
    proportion to ``q_ik``. This is the scheme of FedFisher (Jhunjhunwala et al. 2024,
    arXiv:2403.12329), whose public code keeps one partition for all seeds: ``data.seed`` does that.

    All samples are used. Sizes are skewed less than with ``Dirichlet``, because every client's mix
    has the same sum. Tables are redrawn and leveled as in ``Dirichlet``. If no mix gives weight to
    a class, as may happen with a tiny ``alpha``, the class goes to one client at random.

    Args:
        alpha: Concentration per class, above 0. A small value gives strong skew, and a large value
            approaches IID.
        min_samples: Minimum number of samples per client, at least 1.
        max_redraws: Redraws before the last table is leveled. 0 levels the first one.
    """

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        mixes = rng.dirichlet(np.full(len(sizes), self.alpha), size=clients)
        return apportion_by_client(_shares(mixes, rng), sizes, rng)


def _shares(mixes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return each class's shares, ``(classes, clients)``, from the clients' mixes."""
    weights = mixes.T.copy()
    unwanted = np.flatnonzero(weights.sum(axis=1) == 0)
    weights[unwanted, rng.integers(len(mixes), size=len(unwanted))] = 1.0
    # Divide by the largest weight first, because a sum of tiny floats can underflow.
    weights /= weights.max(axis=1, keepdims=True)
    return weights / weights.sum(axis=1, keepdims=True)
