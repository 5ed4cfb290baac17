"""Clients that know only a few classes."""

import numpy as np

from flsuite.data.partitions.base import Partition
from flsuite.data.partitions.iid import deal
from flsuite.errors import FlsuiteError

__all__ = ["Pathological"]


class Pathological(Partition):
    """``classes_per_client`` classes for each client, every class split evenly among the clients that hold it.

    After McMahan et al. 2017 (arXiv:1602.05629), with classes in place of their shards, so that a client has
    exactly as many classes as asked. Classes are dealt from one random permutation after another, so the numbers of
    holders of any two classes differ by at most one. With fewer than ``classes / classes_per_client`` clients some
    classes are held by nobody and their samples go unused. A class with fewer samples than holders reaches only some of
    them.

    Args:
        classes_per_client: From 1 to the number of classes in the training data.

    Raises:
        FlsuiteError: If there are fewer classes than ``classes_per_client``, or classes so small that some client would
            have no sample at all.
    """

    def __init__(self, classes_per_client: int) -> None:
        if classes_per_client < 1:
            raise FlsuiteError(
                f"Pathological.classes_per_client must be at least 1, got {classes_per_client}"
            )
        self.classes_per_client = classes_per_client

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        self.check_enough(len(labels), clients)
        classes = np.unique(labels, return_inverse=True)[1]
        sizes = np.bincount(classes)
        if self.classes_per_client > len(sizes):
            raise FlsuiteError(
                f"Pathological.classes_per_client is {self.classes_per_client}, "
                f"but the training data has {len(sizes)} classes; lower it"
            )
        holds = _deal_classes(len(sizes), clients, self.classes_per_client, rng)
        counts = np.zeros((len(sizes), clients), dtype=np.int64)
        for k in np.argsort(
            -(sizes // np.maximum(holds.sum(axis=1), 1)), kind="stable"
        ):  # the scarcest last
            holders = rng.permutation(np.flatnonzero(holds[k]))
            if len(holders):
                share, extra = divmod(int(sizes[k]), len(holders))
                counts[k, holders] = share
                poorest = holders[np.argsort(counts[:, holders].sum(axis=0), kind="stable")]
                counts[k, poorest[:extra]] += 1
        empty = np.flatnonzero(counts.sum(axis=0) == 0)
        if len(empty):
            raise FlsuiteError(
                f"client {empty[0]} would have no sample: its classes have fewer samples than clients that hold them; "
                f"raise Pathological.classes_per_client or lower data.clients"
            )
        return deal(classes, counts, rng)


def _deal_classes(classes: int, clients: int, each: int, rng: np.random.Generator) -> np.ndarray:
    """Who holds what: bool ``(classes, clients)``, ``each`` classes a column."""
    holds = np.zeros((classes, clients), dtype=bool)
    deck = rng.permutation(classes)
    for client in range(clients):
        hand, deck = deck[:each], deck[each:]
        if missing := each - len(
            hand
        ):  # the rest comes from a new permutation, past the classes already in hand
            fresh = rng.permutation(classes)
            drawn = fresh[~np.isin(fresh, hand)][:missing]
            hand, deck = np.concatenate([hand, drawn]), fresh[~np.isin(fresh, drawn)]
        holds[hand, client] = True
    return holds
