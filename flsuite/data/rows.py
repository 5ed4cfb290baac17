"""Index arrays of many clients, before they become tensors."""

from collections.abc import Sequence
from typing import overload

import numpy as np


class Rows(Sequence[np.ndarray]):
    """One index array per client, all in one array: a million small ones would take a gigabyte.

    Attributes:
        values: int64 ``(total,)``, the arrays one after another.
        offsets: int64 ``(clients + 1,)``, the start of each array. The last entry is the total.
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        self.values = values.astype(np.int64, copy=False)
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Rows":
        """Return these index arrays in one, without a copy where they are already."""
        if isinstance(rows, Rows):
            return rows
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return cls(np.concatenate(rows) if len(rows) else np.zeros(0, np.int64), lengths)

    @classmethod
    def of_clients(cls, client_of: np.ndarray, clients: int) -> "Rows":
        """Return the ascending rows of each client.

        Args:
            client_of: int64 ``(n,)``, the client of each row. A number outside ``range(clients)``
                is no client.
            clients: Number of clients.
        """
        rows = np.flatnonzero((client_of >= 0) & (client_of < clients))
        own = client_of[rows]
        # Stable, so that the rows of a client stay ascending.
        return cls(rows[np.argsort(own, kind="stable")], np.bincount(own, minlength=clients))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, client: slice) -> list[np.ndarray]: ...

    def __getitem__(self, client: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        number = range(len(self))[client]  # counts from the end if negative, and checks the bounds
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def lengths(self) -> np.ndarray:
        """Return the length of each array, int64 ``(clients,)``."""
        return np.diff(self.offsets)

    def client_of(self, samples: int) -> np.ndarray:
        """Return the client of each of ``samples`` rows, int64, -1 where no client has the row."""
        owners = np.full(samples, -1)
        owners[self.values] = np.repeat(np.arange(len(self)), self.lengths())
        return owners
