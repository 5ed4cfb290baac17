"""Tables of counts: how many samples of each class each client gets."""

import numpy as np

from flsuite.errors import FlsuiteError

__all__ = ["apportion", "assign_by_counts", "check_min_samples"]


def assign_by_counts(
    classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draw the counted number of samples of each class for each client, without replacement.

    Every class-based partition computes such a table first and assigns samples only here, so that
    none can assign a sample twice.

    Args:
        classes: int64 ``(n,)``, classes numbered from 0 without gaps.
        counts: int64 ``(classes, clients)``. Samples of a class beyond its row's sum stay unused.
        rng: Draws the samples of a class for each client.

    Returns:
        One ascending int64 index array per client.
    """
    clients = counts.shape[1]

    # The unused samples go to one more client, whose rows are then left out.
    unused = np.bincount(classes, minlength=len(counts)) - counts.sum(axis=1)
    table = np.column_stack([counts, unused])
    client_of = np.repeat(np.tile(np.arange(clients + 1), len(counts)), table.ravel())

    # Samples in random order within each class, then the first ones to the first client, and so on.
    shuffled = rng.permutation(len(classes)).astype(np.int64)
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    by_client = by_class[np.argsort(client_of, kind="stable")]
    return [np.sort(part) for part in np.split(by_client, np.cumsum(table.sum(axis=0)))[:clients]]


def apportion(shares: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Turn shares into whole counts, int64 ``(classes, clients)``.

    Row k sums to ``sizes[k]``.

    Each row is cut at its rounded cumulative shares. The rounding depends on the position, which
    would favour the same clients in every class. Each row's counts are therefore shuffled, which
    keeps the distribution of shares that are drawn exchangeably.

    Args:
        shares: float64 ``(classes, clients)``, each row sums to 1.
        sizes: int64 ``(classes,)``.
        rng: Shuffles each row.
    """
    cuts = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
    cuts[:, -1] = sizes
    return rng.permuted(np.diff(cuts, axis=1, prepend=0), axis=1)


def check_min_samples(partition: str, min_samples: int, clients: int, samples: int) -> None:
    """Refuse a minimum that the data cannot give to every client."""
    if min_samples * clients > samples:
        raise FlsuiteError(
            f"{clients} clients cannot have {min_samples} each of {samples} training samples; "
            f"lower {partition}.min_samples or data.clients"
        )
