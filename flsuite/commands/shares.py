"""Each client's share in the score of a federation.

Leave-one-out, and truncated Monte-Carlo Shapley values: Ghorbani and Zou 2019, Data Shapley,
arXiv:1904.02868, algorithm 1, with clients in the place of samples.
"""

import sys
from collections.abc import Iterator, Sequence

from flsuite.commands.worlds import Worlds
from flsuite.common.random import numpy_generator
from flsuite.runs.record import read_settings


def leave_one_out(worlds: Worlds, clients: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield each client, and how much higher the score of the run is than without it."""
    whole = worlds.score(frozenset())
    for place, client in enumerate(clients, start=1):
        value = whole - worlds.score(frozenset({client}))
        print(f"{place}/{len(clients)}  without client {client}: {-value:+.4f}", file=sys.stderr)
        yield client, value


def shapley(
    worlds: Worlds, clients: Sequence[int], permutations: int, tolerance: float
) -> Iterator[tuple[int, float]]:
    """Yield the marginal contributions of clients that join in random orders.

    All other clients are always present. Orders share the scores of equal sets.

    Args:
        worlds: The scores.
        clients: The clients that join.
        permutations: Number of orders.
        tolerance: Once the score is this close to the score of the whole run, clients that join
            later count as adding nothing.
    """
    seed = int(read_settings(worlds.run)["seed"])
    whole, nobody = worlds.score(frozenset()), frozenset(clients)
    for number in range(permutations):
        order = numpy_generator(seed, "contribution", number).permutation(list(clients)).tolist()
        absent, before = nobody, worlds.score(nobody)
        for client in order:
            absent = absent - {client}
            is_near = abs(whole - before) <= tolerance
            after = before if is_near else worlds.score(absent)
            yield client, after - before
            before = after
        print(f"{number + 1}/{permutations}  orders, {worlds.made} {worlds.unit}", file=sys.stderr)
