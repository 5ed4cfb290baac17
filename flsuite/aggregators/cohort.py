"""The parts of a cohort, which workers train and sum.

A large cohort is cut into parts. A worker that trains a whole part sends the sum of its models, and
not each of them. What a sum rounds to depends on the order of its terms, so that the parts follow
from the cohort alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flsuite.messages import ClientUpdate
from flsuite.state import Sums, Tree

__all__ = ["part_size", "sum_by_parts"]

_PARTS = 20  # a number that few workers can share evenly: 1, 2, 4, 5, 10
_LARGEST = 16  # clients, so that a retry after a worker's death repeats few of them


def part_size(cohort: int) -> int:
    """Return the number of clients in each part of a cohort."""
    return min(max(cohort // _PARTS, 1), _LARGEST)


def sum_by_parts(
    sums: Sums,
    updates: Iterable[ClientUpdate],
    contribution: Callable[[ClientUpdate], Tree],
    single: Sequence[str],
    seen: list[ClientUpdate],
) -> None:
    """Add up what clients contribute, part by part of the cohort.

    A worker that trains a whole part sends its sum. What a sum rounds to depends on the order of
    its terms, so that the server sums part by part where it has every update too.

    Args:
        sums: They are added to.
        updates: The updates.
        contribution: Returns what an update adds.
        single: Names of the statistics that are no sums. They are kept.
        seen: Takes the updates without all else.
    """
    part, own = None, sums
    for update in updates:
        if update.part != part:
            if own is not sums:
                sums.merge(own)
            part, own = update.part, sums if update.part is None else Sums()
        if update.partial is not None:
            own.merge(update.partial)
        else:
            own.add(contribution(update))
        extras = {name: update.extras[name] for name in single}
        seen.append(replace(update, state={}, extras=extras, base={}, partial=None))
    if own is not sums:
        sums.merge(own)
