"""Independent and identically distributed clients, and how a table of counts becomes clients."""

import numpy as np

from flsuite.data.partitions.base import Partition

__all__ = ["IID", "deal"]


class IID(Partition):
    """A random split into clients whose sizes differ by at most one (McMahan et al. 2017, arXiv:1602.05629)."""

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        self.check_enough(len(labels), clients)
        sizes = np.full((1, clients), len(labels) // clients)
        sizes[0, : len(labels) % clients] += 1
        return deal(np.zeros(len(labels), dtype=np.int64), sizes, rng)


def deal(classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw, without replacement, as many samples of each class for each client as ``counts`` says.

    Every class-based partition decides on a table of counts first and deals once, so none of them can deal a sample
    twice.

    Args:
        classes: int64 ``(n,)``, classes numbered from 0 without gaps.
        counts: int64 ``(classes, clients)``; a row that sums to less than its class leaves the rest unused.
        rng: Decides which of a class's samples go where.

    Returns:
        One sorted int64 index array a client.
    """
    clients = counts.shape[1]
    unused = np.bincount(classes, minlength=len(counts)) - counts.sum(axis=1)
    table = np.column_stack([counts, unused])
    owner = np.repeat(np.tile(np.arange(clients + 1), len(counts)), table.ravel())
    shuffled = rng.permutation(len(classes)).astype(np.int64)
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    by_client = by_class[np.argsort(owner, kind="stable")]
    return [np.sort(part) for part in np.split(by_client, np.cumsum(table.sum(axis=0)))[:clients]]
