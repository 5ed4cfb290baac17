"""Everything composes: a combination of parts runs, or is refused before round 1 with a reason."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from flsuite import FlsuiteError
from flsuite.federation import Processes
from tests.aggregators.federations import assert_same_models
from tests.composition.cells import (
    CHOICES,
    Cell,
    conflict,
    covering,
    name,
    outcome,
    pair,
    pairs,
    problem,
    trainer_of,
)
from tests.conftest import mostly_long


def parted(cells: Sequence[Cell], parts: int) -> list[Sequence[Cell]]:
    return [cells[k::parts] for k in range(parts)]


def of_each_mechanism(cells: Sequence[Cell]) -> list[Cell]:
    """Return a few cells that together have every choice of how models travel."""

    def new(cell: Cell) -> set[tuple[str, str]]:
        return {(k, v) for k, v in cell.items() if k not in ("rule", "server_optimizer")} - seen

    chosen, seen = list[Cell](), set[tuple[str, str]]()
    while new(best := max(cells, key=lambda cell: len(new(cell)))):
        chosen.append(best)
        seen |= new(best)
    return chosen


PAIRS = list(pairs())
REFUSED = list({tuple(cell.items()): cell for cell in PAIRS if conflict(cell)}.values())
COVERING = covering()  # together, they have every pair
FEW = of_each_mechanism(COVERING)
OTHERS = [cell for cell in COVERING if cell not in FEW]


def run_each(cells: Sequence[Cell]) -> None:
    """Run each cell for two rounds. The second starts from what the first one leaves."""
    for cell in cells:
        try:
            result = outcome(cell, rounds=2)
        except Exception as error:
            raise AssertionError(f"{name(cell)}: {type(error).__name__}: {error}") from error
        declared = conflict(cell)
        assert declared == (result if isinstance(result, str) else None), name(cell)


def test_every_pair_is_refused_or_in_a_combination_that_runs() -> None:
    covered = {two for cell in COVERING for two in combinations(cell.items(), 2)}
    for (one, first), (other, second) in combinations(
        [(dimension, choice) for dimension, named in CHOICES.items() for choice in named], 2
    ):
        if one != other and ((one, first), (other, second)) not in covered:
            assert conflict(pair(one, first, other, second)), (first, second)
    assert not any(conflict(cell) for cell in COVERING)


@pytest.mark.parametrize(
    "cells", mostly_long({str(n): cells for n, cells in enumerate(parted(REFUSED, 4))}, "0")
)
def test_a_pair_that_does_not_go_together_is_refused(cells: Sequence[Cell]) -> None:
    run_each(cells)


def test_most_pairs_run() -> None:
    refused = [cell for cell in PAIRS if conflict(cell)]
    assert len(refused) <= 0.15 * len(PAIRS)


def check_workers_and_resume(cell: Cell, folder: Path) -> None:
    """Compare a run with one that is stopped, and goes on in two workers."""
    whole = trainer_of(cell, 2)
    whole.fit(*problem(cell))
    assert all(bool(value.double().isfinite().all()) for value in whole.federation.state.values())

    trainer_of(cell, 1, folder=folder).fit(*problem(cell))
    resumed = trainer_of(cell, 2, engine=Processes(workers=2), folder=folder)
    resumed.fit(*problem(cell), ckpt_path="last")
    assert_same_models(whole, resumed)


@pytest.mark.parametrize("cell", FEW, ids=name)
def test_a_combination_goes_on_in_workers_as_if_it_had_never_stopped(
    cell: Cell, tmp_path: Path
) -> None:
    check_workers_and_resume(cell, tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("cells", parted(OTHERS, 20), ids=range(20))
def test_the_combinations_of_all_pairs_go_on_in_workers(
    cells: Sequence[Cell], tmp_path: Path
) -> None:
    for number, cell in enumerate(cells):
        try:
            check_workers_and_resume(cell, tmp_path / str(number))
        except Exception as error:
            raise AssertionError(f"{name(cell)}: {type(error).__name__}: {error}") from error


def test_a_refusal_names_both_parts_and_what_to_change() -> None:
    cell = {**PAIRS[0], "rule": "Krum", "secure_sum": "PairwiseMasks"}
    with pytest.raises(FlsuiteError) as caught:
        trainer_of(cell).fit(*problem(cell))
    for part in ("Krum", "PairwiseMasks", "trainer.aggregator.rule or trainer.secure_sum"):
        assert part in str(caught.value)
