"""Fixed-point encoding modulo 2^32, in which masks hide numbers and sums are exact.

With M clients and a public range R, ``u = round(x / s) mod 2^32``, ``s = 2R / (2^B - 1)`` and
``B = 32 - ceil(log2 M)``. The sum of M such integers fits into 32 bits, and decodes as a signed
number. Its error is at most ``M s / 2``.
"""

import numpy as np
import torch
from torch import Tensor


def bits_per_number(clients: int) -> int:
    """Return B, the bits per number."""
    return 32 - (clients - 1).bit_length()


def step(largest: float, clients: int) -> float:
    """Return s, the step of numbers within ``[-largest, largest]``."""
    # Computed as largest / half, because 2 * largest can overflow.
    return largest / ((2 ** bits_per_number(clients) - 1) / 2)


def encode_values(values: Tensor, largest: float, clients: int) -> np.ndarray:
    """Return a client's numbers encoded as a uint32 vector.

    Raises:
        ValueError: If a number is outside the range.
    """
    flat = values.detach().double().reshape(-1).numpy()
    peak = float(np.abs(flat).max(initial=0.0))
    if not peak <= largest:
        raise ValueError(f"it has a value of size {peak:.6g}, outside its range of {largest:.6g}")

    size = step(largest, clients)
    if size == 0.0:
        return np.zeros(flat.shape, np.uint32)
    # x = R is halfway between two integers. M times the upper one would overflow 32 bits.
    top = 2 ** (bits_per_number(clients) - 1) - 1
    return np.clip(np.rint(flat / size), -top, top).astype(np.int32).view(np.uint32)


def decode_sum(total: np.ndarray, largest: float, clients: int) -> Tensor:
    """Return the sum of the clients' numbers in float64, from the sum of their integers."""
    return torch.from_numpy(total.view(np.int32).astype(np.float64) * step(largest, clients))
