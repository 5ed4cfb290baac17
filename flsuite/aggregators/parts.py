"""The mean over a cohort, summed part by part.

A large cohort is cut into parts. A worker that trains a whole part sends the sum of its models, and
not each of them. What a sum rounds to depends on the order of its terms, so that the parts follow
from the cohort alone, and the server sums part by part where it has every model too.
"""

from collections.abc import Callable, Iterable
from itertools import groupby

from flsuite.messages import ClientUpdate
from flsuite.state import RunningMean, State

__all__ = ["Weight", "mean_by_parts", "part_size"]

Weight = Callable[[ClientUpdate], float]
"""Returns the weight of an update in the mean."""

_PARTS = 20  # a number that few workers can share evenly: 1, 2, 4, 5, 10
_LARGEST = 16  # clients, so that a retry after a worker's death repeats few of them


def part_size(cohort: int) -> int:
    """Return the number of clients in each part of a cohort."""
    return min(max(cohort // _PARTS, 1), _LARGEST)


def mean_by_parts(
    updates: Iterable[ClientUpdate], weight: Weight
) -> tuple[State, list[ClientUpdate]]:
    """Return the weighted mean of the models, and the updates without them.

    Args:
        updates: The updates of a cohort. Those of one part follow each other.
        weight: Returns the weight of an update.
    """
    total, seen = RunningMean(), []
    for part, members in groupby(updates, key=lambda update: update.part):
        mean = total if part is None else RunningMean()
        for update in members:
            if update.partial is not None:
                mean.merge(update.partial)
            else:
                mean.add(update.state, weight(update))
            seen.append(update.without_tensors())
        if mean is not total:
            total.merge(mean)
    return total.mean(), seen
