"""Label skew by few classes per client, and by uneven shares of them."""

from dataclasses import dataclass

import numpy as np

from flsuite.common.arguments import NonNegativeInt, PositiveFloat, PositiveInt
from flsuite.data.partitions.counts import CountPartition, apportion
from flsuite.data.partitions.pathological import assign_classes


@dataclass
class DirichletExtended(CountPartition):
    """``classes_per_client`` classes per client, each shared unevenly by its clients.

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

    Raises:
        FlsuiteError: If there are fewer classes than ``classes_per_client``, or the data cannot
            give ``min_samples`` to every client.
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
