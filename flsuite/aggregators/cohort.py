"""The parts of a cohort, which workers train and sum.

A large cohort is cut into parts. A worker that trains a whole part sends the sum of its models, and
not each of them. What a sum rounds to depends on the order of its terms, so that the parts follow
from the cohort alone.
"""

_PARTS = 20  # a number that few workers can share evenly: 1, 2, 4, 5, 10
_LARGEST = 16  # clients, so that a retry after a worker's death repeats few of them


def part_size(cohort: int) -> int:
    """Return the number of clients in each part of a cohort."""
    return min(max(cohort // _PARTS, 1), _LARGEST)
