"""Seeds are a function of (seed, stream, round, client), and of nothing else."""

import random as python_random
from itertools import product

import numpy as np
import torch

from flsuite.common.messages import POOLED
from flsuite.common.random import numpy_generator, seed_for, seed_process, torch_generator

ARGUMENTS = (7, "cohort", 3, 5)


def test_the_same_arguments_give_the_same_seed() -> None:
    first = seed_for(*ARGUMENTS)
    torch.rand(3), np.random.rand(3), python_random.random()
    assert seed_for(*ARGUMENTS) == first
    assert seed_for(seed=7, stream="cohort", round=3, client=5) == first


def test_a_seed_never_changes_between_versions() -> None:
    """Check that published runs can be repeated from their configs."""
    assert seed_for(0, "fit") == 6628933309107228273
    assert seed_for(1, "partition") == 282319860088955593
    assert seed_for(*ARGUMENTS) == 6192189148877701855
    assert seed_for(2, "batches/0", 50, POOLED) == 7674602936260540623


def test_every_argument_matters() -> None:
    for position, other in enumerate((8, "fit", 4, 6)):
        changed = (*ARGUMENTS[:position], other, *ARGUMENTS[position + 1 :])
        assert seed_for(*changed) != seed_for(*ARGUMENTS)
    assert seed_for(7, "cohort", 5, 3) != seed_for(*ARGUMENTS)


def test_no_collisions_over_a_grid() -> None:
    streams = ("cohort", "fit", "partition", "validation", "batches/0", "batches/1", "batches/10")
    grid = list(product((0, 1, 2**32, 2**62), streams, range(15), range(POOLED, 20)))
    assert len({seed_for(*point) for point in grid}) == len(grid)


def test_seeds_fit_every_generator() -> None:
    seeds = [
        seed_for(seed, "fit", 1, client)
        for seed in (0, 2**63 - 1, 2**70, -1)
        for client in (POOLED, 0, 10**6)
    ]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**60
    for seed in seeds:
        torch.Generator().manual_seed(seed)
        np.random.default_rng(seed)


def test_generators_repeat_and_are_independent() -> None:
    def draws(client: int) -> tuple[list[float], list[float]]:
        return (
            numpy_generator(7, "cohort", 3, client).random(4).tolist(),
            torch.rand(4, generator=torch_generator(7, "cohort", 3, client)).tolist(),
        )

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)


def test_generators_leave_the_global_ones_alone() -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), python_random.getstate()
    numpy_generator(*ARGUMENTS).random(10)
    torch.rand(10, generator=torch_generator(*ARGUMENTS))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert python_random.getstate() == states[2]


def test_seed_process_seeds_all_three_global_generators() -> None:
    def draw(client: int) -> tuple[float, float, float]:
        seed_process(7, "fit", 1, client)
        return torch.rand(()).item(), float(np.random.rand()), python_random.random()

    before = torch.get_rng_state(), np.random.get_state(), python_random.getstate()
    try:
        first, other, again = draw(0), draw(1), draw(0)
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        python_random.setstate(before[2])
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))
