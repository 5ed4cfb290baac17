"""Index arrays of unequal length, stored as one array."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flsuite.data.rows import Rows

__all__ = ["RaggedIndex"]


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
        # An array of NumPy, because reading two numbers of a tensor takes as long as a small copy.
        offsets = self.offsets.numpy()
        return self.values[offsets[row] : offsets[row + 1]]

    def part(self, first: int, last: int) -> "RaggedIndex":
        """Return the rows from ``first`` up to and without ``last``."""
        offsets = self.offsets[first : last + 1]
        start = int(offsets[0])
        return RaggedIndex(self.values[start : int(offsets[-1])], offsets - start)

    def lengths(self) -> Tensor:
        """Return the length of each row, int64 ``(rows,)``."""
        return self.offsets.diff()

    def owners(self) -> Tensor:
        """Return the number of the row that each value is in, int64 ``(total,)``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths())

    def where(self, kept: Tensor) -> "RaggedIndex":
        """Keep the values at which ``kept``, bool ``(total,)``, is true."""
        # Rows without values keep their place with length 0: a row's number is a client's number.
        counts = torch.bincount(self.owners()[kept], minlength=len(self))
        return RaggedIndex(self.values[kept], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
