"""Index arrays of many clients: NumPy arrays while rows are assigned, then tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor


class Rows(Sequence[np.ndarray]):
    """One index array per client, stored in one array, because a million arrays take a gigabyte.

    Attributes:
        values: int64 ``(total,)``, the arrays one after another.
        offsets: int64 ``(clients + 1,)``, the start of each array. The last entry is the total.
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        self.values = values.astype(np.int64, copy=False)
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Rows":
        """Store these index arrays. If they are already stored like this, return them."""
        if isinstance(rows, Rows):
            return rows
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return cls(np.concatenate(rows) if len(rows) else np.zeros(0, np.int64), lengths)

    @classmethod
    def of_clients(cls, client_of: np.ndarray, clients: int) -> "Rows":
        """Return the ascending rows of each client.

        Args:
            client_of: int64 ``(n,)``, the client of each row. A number outside ``range(clients)``
                means no client.
            clients: Number of clients.
        """
        rows = np.flatnonzero((client_of >= 0) & (client_of < clients))
        own = client_of[rows]
        # Stable, so the rows of a client stay ascending.
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
        """Return the client of each row, int64 ``(samples,)``, or -1 if no client has it."""
        owners = np.full(samples, -1)
        owners[self.values] = np.repeat(np.arange(len(self)), self.lengths())
        return owners


@dataclass
class RaggedIndex:
    """Index arrays of unequal length: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
        values: int64 ``(total,)``, all rows one after another.
        offsets: int64 ``(rows + 1,)``, the start of each row. The last entry is the total.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "RaggedIndex":
        """Store these index arrays, one per row."""
        stored = Rows.of(rows)
        return cls(torch.from_numpy(stored.values), torch.from_numpy(stored.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tensor:
        # A NumPy array, because reading two numbers of a tensor takes as long as a small copy.
        offsets = self.offsets.numpy()
        return self.values[offsets[row] : offsets[row + 1]]

    def part(self, first: int, last: int) -> "RaggedIndex":
        """Return the rows from ``first`` up to but excluding ``last``."""
        offsets = self.offsets[first : last + 1]
        start = int(offsets[0])
        return RaggedIndex(self.values[start : int(offsets[-1])], offsets - start)

    def lengths(self) -> Tensor:
        """Return the length of each row, int64 ``(rows,)``."""
        return self.offsets.diff()

    def owners(self) -> Tensor:
        """Return the row number of each value, int64 ``(total,)``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths())

    def where(self, kept: Tensor) -> "RaggedIndex":
        """Keep the values at which ``kept``, bool ``(total,)``, is true."""
        # Empty rows remain, with length 0, because a row's number is a client's number.
        counts = torch.bincount(self.owners()[kept], minlength=len(self))
        return RaggedIndex(self.values[kept], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
