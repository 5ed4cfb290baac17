"""Small non-negative integers packed bit by bit."""

import numpy as np

__all__ = ["pack", "packed_size", "unpack"]

_CHUNK = 8 * 2**15  # numbers at a time, a multiple of eight: every chunk ends with a whole byte


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of so many packed numbers."""
    return -(-count * bits // 8)


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers of at most 16 bits one after the other in bytes, without a gap."""
    flat = numbers.reshape(-1).astype(">u2")
    parts = [np.empty(0, np.uint8)]

    # In chunks, because every bit takes a byte on the way.
    for start in range(0, len(flat), _CHUNK):
        both_bytes = flat[start : start + _CHUNK].view(np.uint8).reshape(-1, 2)
        parts.append(np.packbits(np.unpackbits(both_bytes, axis=1)[:, 16 - bits :]))
    return np.concatenate(parts)


def unpack(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Return the first ``count`` numbers of what :func:`pack` returned, as an int32 vector."""
    numbers = np.empty(count, np.int32)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        first = start * bits // 8
        part = packed[first : first + packed_size(size, bits)]

        wide = np.zeros((size, 16), np.uint8)
        wide[:, 16 - bits :] = np.unpackbits(part)[: size * bits].reshape(size, bits)
        numbers[start : start + size] = np.packbits(wide, axis=1).view(">u2")[:, 0]
    return numbers
