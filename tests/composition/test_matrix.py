"""Everything composes: a combination of parts runs, or is refused before round 1 with a reason."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from flsuite import FlsuiteError
from flsuite.engines import Processes
from tests.aggregators.federations import assert_same_models
from tests.composition.cells import (
    CHOICES,
    Cell,
    conflict,
    name,
    outcome,
    pairs,
    problem,
    trainer_of,
)


def sampled(count: int, seed: int) -> list[Cell]:
    """Return combinations of choices of all dimensions, drawn by the seed."""
    rng = random.Random(seed)
    choices = {dimension: list(named) for dimension, named in CHOICES.items()}
    return [{name: rng.choice(named) for name, named in choices.items()} for _ in range(count)]


def parted(cells: Sequence[Cell], parts: int) -> list[Sequence[Cell]]:
    return [cells[k::parts] for k in range(parts)]


PAIRS = list(pairs())
CELLS = list({tuple(cell.items()): cell for cell in PAIRS}.values())  # many pairs are the same run
COMBINATIONS = sampled(300, seed=24)
RUNNING = [cell for cell in [*CELLS, *COMBINATIONS] if conflict(cell) is None]
random.Random(7).shuffle(RUNNING)


def run_each(cells: Sequence[Cell]) -> None:
    for cell in cells:
        try:
            result = outcome(cell)
        except Exception as error:
            raise AssertionError(f"{name(cell)}: {type(error).__name__}: {error}") from error
        declared = conflict(cell)
        assert declared == (result if isinstance(result, str) else None), name(cell)


@pytest.mark.parametrize("cells", parted(CELLS, 40), ids=range(40))
def test_each_pair_runs_or_is_refused(cells: Sequence[Cell]) -> None:
    run_each(cells)


@pytest.mark.parametrize("cells", parted(COMBINATIONS, 20), ids=range(20))
def test_each_combination_runs_or_is_refused(cells: Sequence[Cell]) -> None:
    run_each(cells)


def test_most_pairs_run() -> None:
    refused = [cell for cell in PAIRS if conflict(cell)]
    assert len(refused) <= 0.15 * len(PAIRS)


def check_engines_and_resume(cell: Cell, folder: Path) -> None:
    """Compare a run with one in two workers, and with one that is stopped and goes on."""
    whole = trainer_of(cell)
    whole.fit(*problem(cell))

    in_workers = trainer_of(cell, engine=Processes(workers=2))
    in_workers.fit(*problem(cell))
    assert_same_models(whole, in_workers)

    stopped = trainer_of(cell, rounds=2, folder=folder)
    stopped.fit(*problem(cell))
    resumed = trainer_of(cell, folder=folder)
    resumed.fit(*problem(cell), ckpt_path="last")
    assert_same_models(whole, resumed)


@pytest.mark.parametrize("cell", RUNNING[:60], ids=name)
def test_a_combination_is_the_same_in_workers_and_after_a_resume(
    cell: Cell, tmp_path: Path
) -> None:
    check_engines_and_resume(cell, tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("cells", parted(RUNNING[60:], 60), ids=range(60))
def test_all_combinations_are_the_same_in_workers_and_after_a_resume(
    cells: Sequence[Cell], tmp_path: Path
) -> None:
    for number, cell in enumerate(cells):
        try:
            check_engines_and_resume(cell, tmp_path / str(number))
        except Exception as error:
            raise AssertionError(f"{name(cell)}: {type(error).__name__}: {error}") from error


def test_a_refusal_names_both_parts_and_what_to_change() -> None:
    cell = {**PAIRS[0], "rule": "Krum", "secure_sum": "PairwiseMasks"}
    with pytest.raises(FlsuiteError) as caught:
        trainer_of(cell).fit(*problem(cell))
    assert str(caught.value) == (
        "Krum needs each update, but PairwiseMasks shows the server only a sum; change "
        "trainer.aggregator.rule or trainer.secure_sum"
    )
