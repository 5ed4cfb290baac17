"""What a partition is."""

from abc import ABC, abstractmethod

import numpy as np

from flsuite.errors import FlsuiteError

__all__ = ["Partition", "partition_labels"]


class Partition(ABC):
    """Deals samples to clients.

    A subclass takes its parameters in ``__init__``, keeps each under its own name, and is a pure function of its arguments:
    the same generator gives the same split.
    """

    @abstractmethod
    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Split ``range(len(labels))``.

        Args:
            labels: int64 ``(n,)``, one class a sample.
            clients: How many clients to make.
            rng: The only source of randomness.
            ids: int64 ``(n,)``, the natural owner of each sample, where the data knows one.

        Returns:
            One sorted int64 index array a client, disjoint, each with at least one sample.

        Raises:
            FlsuiteError: If the request cannot be met; the message names the parameter to change.
        """

    @staticmethod
    def check_enough(samples: int, clients: int) -> None:
        """Refuse more clients than samples."""
        if clients < 1:
            raise FlsuiteError(f"clients must be at least 1, got {clients}")
        if clients > samples:
            raise FlsuiteError(
                f"{clients} clients cannot share {samples} training samples; lower data.clients"
            )


def partition_labels(targets: np.ndarray) -> np.ndarray:
    """One class a sample for partitions that need one.

    Multi-label targets ``(n, labels)`` map to the first positive label, and to ``labels`` (an extra class, "none") where no
    label is set.
    """
    if targets.ndim == 1:
        return targets.astype(np.int64)
    return np.where(targets.any(axis=1), targets.argmax(axis=1), targets.shape[1]).astype(np.int64)
