"""Seeds as a function of (seed, stream, round, client).

Nothing in flsuite draws from a generator whose state depends on what ran before it. Whoever needs randomness asks for a
generator by name, so that the same run comes out whatever the engine, the number of workers, or the round it resumed from.
"""

import random as python_random
import zlib

import numpy as np
import torch

__all__ = ["numpy_generator", "seed_for", "seed_process", "torch_generator"]


def seed_for(seed: int, stream: str, round: int = 0, client: int = 0) -> int:
    """A 63-bit seed for one use of randomness.

    Args:
        seed: The run's seed.
        stream: What the randomness is for, e.g. ``"cohort"``; streams are independent of each other.
        round: The round, counted from 1; 0 for what happens once.
        client: The client's number; -1 is the pooled client.
    """
    entropy = [seed & (2**63 - 1), zlib.crc32(stream.encode()), round, client + 1]
    words = np.random.SeedSequence(entropy).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def numpy_generator(seed: int, stream: str, round: int = 0, client: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, stream, round, client))


def torch_generator(seed: int, stream: str, round: int = 0, client: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, stream, round, client))


def seed_process(seed: int, stream: str, round: int = 0, client: int = 0) -> None:
    """Seed the global generators, which dropout and third-party code draw from, before one client's fit."""
    value = seed_for(seed, stream, round, client)
    python_random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(
        value
    )  # torch.manual_seed collects a stack trace for GPUs that are not in use
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
