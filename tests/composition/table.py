"""The tables of pairs: which parts of a federation go together.

The tables have what the parts declare. ``test_matrix.py`` runs every pair, and compares.
``python -m tests.docs.generated`` writes the tables into the pages.
"""

from collections import defaultdict
from itertools import combinations

from tests.composition.cells import CHOICES, conflict, pair

TITLES = {
    "objective": "objective",
    "transforms": "transforms",
    "rule": "rule",
    "server_optimizer": "server optimizer",
    "schedule": "schedule",
    "secure_sum": "secure sum",
}


def reasons(one: str, other: str) -> dict[str, dict[str, str | None]]:
    """Return why choices of two dimensions are refused, or ``None``: by the second, the first."""
    return {
        second: {first: conflict(pair(one, first, other, second)) for first in CHOICES[one]}
        for second in CHOICES[other]
    }


def pairs_table() -> str:
    """Return the table of all pairs in Markdown, with the reason of each refusal."""
    numbers: dict[str, int] = {}
    total = running = 0
    blocks: list[str] = []
    for one, other in combinations(CHOICES, 2):
        rows = defaultdict(list)
        for second, row in reasons(one, other).items():
            for reason in row.values():
                total, running = total + 1, running + (reason is None)
                number = numbers.setdefault(reason, len(numbers) + 1) if reason else 0
                rows[second].append(f"({number})" if reason else "yes")
        blocks.append(f"## {TITLES[one].capitalize()} and {TITLES[other]}\n")
        blocks.append(f"| | {' | '.join(CHOICES[one])} |\n{'|---' * (len(CHOICES[one]) + 1)}|")
        blocks += [f"| {second} | {' | '.join(cells)} |" for second, cells in rows.items()]
        blocks.append("")

    head = f"Of {total} pairs {running} run ({running / total:.0%}).\n"
    why = ["## Reasons\n", *(f"{number}. {reason}" for reason, number in numbers.items())]
    return "\n".join([head, *blocks, *why])


def summary_table() -> str:
    """Return how many pairs of each two dimensions run, of all there are."""
    dimensions = list(CHOICES)
    rows = [
        f"| | {' | '.join(TITLES[name] for name in dimensions[1:])} |",
        f"{'|---' * len(dimensions)}|",
    ]
    for place, one in enumerate(dimensions[:-1]):
        cells = [""] * place
        for other in dimensions[place + 1 :]:
            pairs = [reason for row in reasons(one, other).values() for reason in row.values()]
            cells.append(f"{pairs.count(None)} of {len(pairs)}")
        rows.append(f"| {TITLES[one]} | {' | '.join(cells)} |")
    return "\n".join(rows)
