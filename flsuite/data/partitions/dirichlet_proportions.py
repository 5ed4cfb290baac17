"""Label skew: each class is spread in proportion to the clients' drawn class mixes."""

from dataclasses import dataclass

import numpy as np

from flsuite.data.partitions.counts import apportion_by_client
from flsuite.data.partitions.dirichlet import Dirichlet


@dataclass
class DirichletProportions(Dirichlet):
    """Each client draws a class mix from Dir(alpha), and classes are spread by the mixes.

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

    Raises:
        FlsuiteError: If a parameter is out of range, or the data cannot give ``min_samples`` to
            every client.
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
