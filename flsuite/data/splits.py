"""Assigns rows to training, validation and test, and test rows to clients."""

from collections.abc import Sequence

import numpy as np
import torch

from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.data.federated import DataSplit, Rows

_SUBSET_SEED = 0
"""A fixed seed, because the subset is part of the problem, not of a run."""


def fixed_subset(
    split: DataSplit, samples: int | None, part: tuple[float, float] | None = None
) -> DataSplit:
    """Return a random part of a split in its original order.

    Args:
        split: The training or the test split.
        samples: Maximum number of samples. ``None`` means the whole part.
        part: Start and end of the part in a fixed random order, as fractions. ``None`` means the
            whole split.
    """
    start, end = (round(bound * len(split)) for bound in part or (0.0, 1.0))
    kept = end - start if samples is None else min(samples, end - start)
    if kept == len(split):
        return split

    order = numpy_generator(_SUBSET_SEED, "subset").permutation(len(split))
    return split.take(torch.from_numpy(np.sort(order[start : start + kept])))


def hold_out_for_server(
    train: DataSplit, samples: int, clients: int, seed: int
) -> tuple[DataSplit, DataSplit | None]:
    """Split the training split into the clients' samples and the server's own.

    The server's samples are drawn uniformly at random. They depend only on the seed and on
    ``train``, not on the partition or the number of clients. Both parts keep the order of
    ``train``.

    Args:
        train: The training split.
        samples: Number of samples of the server. With 0, it has none and ``train`` is unchanged.
        clients: Number of clients, each of which needs a sample.
        seed: The seed of the partition.

    Raises:
        FlsuiteError: If fewer samples than clients remain.
    """
    if samples == 0:
        return train, None
    left = len(train) - samples
    if left < clients:
        raise FlsuiteError(
            f"data.server_samples {samples} leaves {max(left, 0)} of {len(train)} training samples "
            f"for {clients} clients; lower data.server_samples or data.clients"
        )

    order = torch.from_numpy(numpy_generator(seed, "server").permutation(len(train)))
    own, others = order[:samples].sort().values, order[samples:].sort().values
    return train.take(others), train.take(own)


def hold_out(rows: Sequence[np.ndarray], fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Split each client's rows into training and validation rows.

    A client keeps at least one training sample. Its rows must be ascending.
    """
    stored = Rows.of(rows)
    values, lengths = stored.values.numpy(), stored.lengths().numpy()
    held = np.rint(fraction * lengths).astype(np.int64).clip(max=np.maximum(lengths - 1, 0))

    is_held = np.zeros(len(values), dtype=bool)
    for client in np.flatnonzero(held > 0):
        # One generator per client, so its draw does not depend on other clients.
        rng = numpy_generator(seed, "validation", client=int(client))
        order = rng.permutation(lengths[client])
        is_held[int(stored.offsets[client]) + order[: held[client]]] = True
    return Rows.cut(values[~is_held], lengths - held), Rows.cut(values[is_held], held)


def hold_out_named(rows: Rows, held: torch.Tensor) -> tuple[Rows, Rows]:
    """Split each client's rows into training rows and held-out rows.

    Args:
        rows: The rows of each client.
        held: The samples that are held out, bool ``(n,)``.

    Raises:
        FlsuiteError: If a client keeps no training sample.
    """
    is_held = held[rows.values]
    train_rows, val_rows = rows.where(~is_held), rows.where(is_held)
    if len(empty := (train_rows.lengths() == 0).nonzero()):
        raise FlsuiteError(
            f"data.partition: client {int(empty[0])} keeps no training sample; raise "
            "data.train_samples, or lower data.server_samples"
        )
    return train_rows, val_rows


def split_test_like_train(
    labels: np.ndarray, rows: Sequence[np.ndarray], test_labels: np.ndarray, seed: int
) -> Rows:
    """Split the test samples so that each client has the class mix of its training samples.

    The test samples of a class are split in proportion to the clients' training samples of that
    class. Each goes to exactly one client, or to none if no client has its class. A client with few
    training samples may get no test samples.

    Args:
        labels: int64 ``(train samples,)``, one class per training sample.
        rows: The training rows of each client.
        test_labels: int64 ``(test samples,)``.
        seed: The seed of the partition.

    Returns:
        The ascending test rows of each client.
    """
    client_of = Rows.of(rows).client_of(len(labels))
    tester_of = np.full(len(test_labels), -1)

    # One generator per class, so its split does not depend on other classes.
    for label in np.unique(test_labels):
        held = np.bincount(client_of[(labels == label) & (client_of >= 0)], minlength=len(rows))
        if held.sum() == 0:
            continue
        rng = numpy_generator(seed, "test", client=int(label))
        samples = rng.permutation(np.flatnonzero(test_labels == label))
        # In random order, so rounding does not favor low client numbers.
        order = rng.permutation(len(rows))
        cuts = np.round(np.cumsum(held[order]) / held.sum() * len(samples)).astype(int)
        tester_of[samples] = np.repeat(order, np.diff(cuts, prepend=0))

    return Rows.of_clients(tester_of, len(rows))


def split_test_by_owner(
    ids: np.ndarray, rows: Sequence[np.ndarray], test_ids: np.ndarray
) -> Rows | None:
    """Assign each natural owner's test rows to the client that has the owner's rows.

    Test rows of an owner that no client has are dropped.

    Args:
        ids: int64 ``(train samples,)``, the owner of each sample.
        rows: The rows of each client, including rows for validation: an owner may have no others.
        test_ids: int64 ``(test samples,)``.

    Returns:
        The ascending test rows of each client, or ``None`` if several clients share an owner.
    """
    client_of = Rows.of(rows).client_of(len(ids))
    is_used = client_of >= 0
    owners, first, owner = np.unique(ids[is_used], return_index=True, return_inverse=True)
    client_of_owner = client_of[is_used][first]
    if not np.array_equal(client_of_owner[owner], client_of[is_used]):
        return None

    place = np.searchsorted(owners, test_ids).clip(max=len(owners) - 1)
    is_known = owners[place] == test_ids
    return Rows.of_clients(np.where(is_known, client_of_owner[place], -1), len(rows))


def evenly_held_out(samples: int, fraction: float) -> np.ndarray:
    """Return which of ``samples`` positions are held out for testing, bool ``(samples,)``.

    Every ``1 / fraction``-th position is held out, ``floor(samples * fraction)`` in all. Whether a
    position is held out does not depend on the number of samples.
    """
    share = np.floor(np.arange(samples + 1) * fraction + 1e-9)  # 0.29 * 100 is just below 29
    return np.diff(share) > 0
