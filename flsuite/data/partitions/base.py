"""The interface of a partition."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from flsuite.data.arguments import PlainArguments
from flsuite.errors import FlsuiteError, require_at_least

__all__ = ["Partition", "partition_labels"]


class Partition(PlainArguments, ABC):
    """A rule that splits samples over clients.

    A subclass keeps each parameter of its ``__init__`` under the same name. It is a pure function
    of its arguments: the same generator gives the same split.
    """

    @abstractmethod
    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        """Split ``range(len(labels))``.

        Args:
            labels: int64 ``(n,)``, one class per sample.
            clients: Number of clients.
            rng: The only source of randomness.
            ids: int64 ``(n,)``, the natural owner of each sample, where the data has owners.

        Returns:
            One ascending int64 index array per client, disjoint, each with at least one sample.

        Raises:
            FlsuiteError: If the request cannot be met. The message names the parameter to change.
        """

    @staticmethod
    def check_enough(samples: int, clients: int) -> None:
        """Refuse more clients than samples."""
        require_at_least("data", 1, clients=clients)
        if clients > samples:
            raise FlsuiteError(
                f"{clients} clients cannot share {samples} training samples; lower data.clients"
            )


def partition_labels(targets: np.ndarray) -> np.ndarray:
    """Return one class per sample, int64 ``(n,)``, for partitions that need one.

    Multi-label targets ``(n, labels)`` become the first positive label, or ``labels`` (one more
    class, "none") where no label is positive.
    """
    if targets.ndim == 1:
        return targets.astype(np.int64)
    return np.where(targets.any(axis=1), targets.argmax(axis=1), targets.shape[1]).astype(np.int64)
