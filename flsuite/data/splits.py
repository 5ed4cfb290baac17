"""The assignment of rows to training, validation and test, and of test rows to clients."""

import numpy as np
import torch

from flsuite.data.spec import DataSplit
from flsuite.errors import FlsuiteError
from flsuite.random import numpy_generator

__all__ = [
    "assign_test_rows_by_owner",
    "evenly_held_out",
    "fixed_subset",
    "hold_out",
    "hold_out_for_server",
    "owners_are_whole",
    "split_test_like_train",
]

_SUBSET_SEED = 0
"""Fixed: the subset is part of the problem, not of a run."""


def fixed_subset(
    train: DataSplit, samples: int | None, part: tuple[float, float] | None = None
) -> DataSplit:
    """Return a random part of the training split in its original order.

    Args:
        train: The training split.
        samples: The largest number of samples. ``None`` is for all of the part.
        part: Start and end of the part in a fixed random order, as fractions. ``None`` is for all
            of the split.
    """
    start, end = (round(bound * len(train)) for bound in part or (0.0, 1.0))
    kept = end - start if samples is None else min(samples, end - start)
    if kept == len(train):
        return train

    order = numpy_generator(_SUBSET_SEED, "subset").permutation(len(train))
    return train.take(torch.from_numpy(np.sort(order[start : start + kept])))


def hold_out_for_server(
    train: DataSplit, samples: int, clients: int, seed: int
) -> tuple[DataSplit, DataSplit | None]:
    """Split the training split into the clients' samples and the server's own.

    The server's samples are drawn uniformly at random. They depend on the seed and on ``train``
    alone, and not on the partition or the number of clients. Both parts are in the order of
    ``train``.

    Args:
        train: The training split.
        samples: Number of samples of the server. With 0, it has none and ``train`` stays as it is.
        clients: Number of clients, each of which needs a sample.
        seed: The seed of the partition.

    Raises:
        FlsuiteError: If fewer samples than clients would be left.
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


def hold_out(
    rows: list[np.ndarray], fraction: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's rows into training and validation rows.

    A client keeps at least one training sample.
    """
    if fraction == 0:
        return rows, [np.zeros(0, np.int64) for _ in rows]

    train_rows, val_rows = [], []
    for client, own in enumerate(rows):
        # One generator per client: its draw does not depend on the draws of others.
        order = numpy_generator(seed, "validation", client=client).permutation(own)
        held = min(round(fraction * len(own)), len(own) - 1)
        val_rows.append(np.sort(order[:held]))
        train_rows.append(np.sort(order[held:]))
    return train_rows, val_rows


def split_test_like_train(
    labels: np.ndarray, rows: list[np.ndarray], test_labels: np.ndarray, seed: int
) -> list[np.ndarray]:
    """Split the test samples so that each client has the class mix of its training samples.

    The test samples of a class are split in proportion to the training samples of it per client.
    Each goes to exactly one client, or to none if no client has its class. A client with few
    training samples may get no test sample.

    Args:
        labels: int64 ``(train samples,)``, one class per training sample.
        rows: The training rows of each client.
        test_labels: int64 ``(test samples,)``.
        seed: The seed of the partition.

    Returns:
        The ascending test rows of each client.
    """
    client_of = _client_of(rows, len(labels))
    parts: list[list[np.ndarray]] = [[] for _ in rows]

    # One generator per class, so that a class is split the same way whatever the others are.
    for label in np.unique(test_labels):
        held = np.bincount(client_of[(labels == label) & (client_of >= 0)], minlength=len(rows))
        if held.sum() == 0:
            continue
        rng = numpy_generator(seed, "test", client=int(label))
        samples = rng.permutation(np.flatnonzero(test_labels == label))
        # In a random order, so that rounding does not favour low client numbers.
        order = rng.permutation(len(rows))
        cuts = np.round(np.cumsum(held[order]) / held.sum() * len(samples)).astype(int)
        for client, part in zip(order, np.split(samples, cuts[:-1]), strict=True):
            parts[client].append(part)

    return [np.sort(np.concatenate(own)) if own else np.zeros(0, np.int64) for own in parts]


def owners_are_whole(ids: np.ndarray, rows: list[np.ndarray]) -> bool:
    """Return whether no natural owner's rows are spread over several clients.

    Args:
        ids: int64 ``(train samples,)``, the owner of each sample.
        rows: The rows of each client, those for validation included.
    """
    client_of = _client_of(rows, len(ids))
    pairs = np.stack([ids, client_of])[:, client_of >= 0]
    return np.unique(pairs, axis=1).shape[1] == len(np.unique(pairs[0]))


def assign_test_rows_by_owner(
    ids: np.ndarray, rows: list[np.ndarray], test_ids: np.ndarray
) -> list[np.ndarray]:
    """Assign each natural owner's test rows to the client that has the owner's rows.

    Test rows of an owner that no client has are left out.

    Args:
        ids: int64 ``(train samples,)``, the owner of each sample.
        rows: The rows of each client, those for validation included: an owner may have no others.
        test_ids: int64 ``(test samples,)``.

    Returns:
        The ascending test rows of each client.
    """
    # Owners are whole, so each is found in the rows of one client only.
    client_of_owner = {
        owner: client for client, own in enumerate(rows) for owner in np.unique(ids[own]).tolist()
    }
    client_of = np.array([client_of_owner.get(owner, -1) for owner in test_ids.tolist()])
    return [np.flatnonzero(client_of == client) for client in range(len(rows))]


def evenly_held_out(samples: int, fraction: float) -> np.ndarray:
    """Return which of ``samples`` places are held out for testing, bool ``(samples,)``.

    Every ``1 / fraction``-th place is held out, ``floor(samples * fraction)`` in all. Whether a
    place is held out does not depend on the number of samples.
    """
    share = np.floor(np.arange(samples + 1) * fraction + 1e-9)  # 0.29 * 100 is just below 29
    return np.diff(share) > 0


def _client_of(rows: list[np.ndarray], samples: int) -> np.ndarray:
    """Return the client of each row, int64 ``(samples,)``.

    It is -1 where no client has the row.
    """
    client_of = np.full(samples, -1)
    for client, own in enumerate(rows):
        client_of[own] = client
    return client_of
