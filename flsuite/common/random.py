"""Seeds as a function of (seed, stream, round, client).

Nothing in flsuite draws from a generator whose state depends on earlier calls. Each use of
randomness names its stream. A run therefore has the same result on every engine, with any number
of workers, and after a resume from any round.
"""

import os
import random as python_random
import zlib

import numpy as np
import torch


def seed_for(seed: int, stream: str, round: int = 0, client: int = 0) -> int:
    """Return a 63-bit seed for one use of randomness.

    Args:
        seed: The run's seed.
        stream: The purpose of the randomness, e.g. ``"cohort"``. Streams are independent.
        round: The round, counted from 1. 0 means once per run.
        client: The client's number. -1 is the pooled client.
    """
    # crc32 and not hash(), which differs from process to process. Entropy must be non-negative.
    high, low = divmod(seed & (2**63 - 1), 2**32)
    entropy = [low, *([high] if high else []), zlib.crc32(stream.encode()), round, client + 1]
    # SeedSequence mixes the entropy, so neighboring seeds and rounds are unrelated. A list is slow.
    words = np.random.SeedSequence(np.array(entropy, np.uint32)).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def numpy_generator(seed: int, stream: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return a NumPy generator seeded by :func:`seed_for`."""
    return np.random.default_rng(seed_for(seed, stream, round, client))


def torch_generator(seed: int, stream: str, round: int = 0, client: int = 0) -> torch.Generator:
    """Return a torch generator seeded by :func:`seed_for`."""
    return torch.Generator().manual_seed(seed_for(seed, stream, round, client))


def seed_process(seed: int, stream: str, round: int = 0, client: int = 0) -> None:
    """Seed the global generators before a fit, because dropout and third-party code use them."""
    value = seed_for(seed, stream, round, client)
    seed_cpu(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def seed_cpu(value: int) -> None:
    """Seed the global generators of the CPU only."""
    python_random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed would collect a stack trace for unused GPUs.
    torch.default_generator.manual_seed(value)


def secure_normal(size: int) -> torch.Tensor:
    """Return standard normal samples from the operating system's randomness, float64 ``(size,)``.

    They are the inverse normal CDF of 52 random bits from ``os.urandom``. No seed reproduces them.
    """
    from scipy.special import ndtri

    words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(12)
    # Use midpoints of 2^52 intervals to avoid 0 and 1, whose inverses are infinite.
    return torch.from_numpy(np.asarray(ndtri((words + 0.5) * 2.0**-52)))
