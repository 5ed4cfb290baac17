"""The tables of pairs: which parts of a federation go together.

The tables have what the parts declare. ``test_matrix.py`` runs every pair, and compares.
``python -m tests.docs.generated`` writes the tables into the pages.
"""

from collections import defaultdict
from itertools import combinations, product

from tests.composition.cells import CHOICES, conflict, pair

TITLES = {
    "objective": "objective",
    "transforms": "transforms",
    "rule": "rule",
    "server_optimizer": "server optimizer",
    "schedule": "schedule",
    "secure_sum": "secure sum",
}


def reasons(one: str, other: str) -> dict[tuple[str, str], str | None]:
    """Return why each pair of choices of two dimensions is refused, or ``None``."""
    pairs = product(CHOICES[one], CHOICES[other])
    return {(a, b): conflict(pair(one, a, other, b)) for a, b in pairs}


def pairs_table() -> str:
    """Return the table of all pairs in Markdown, with the reason of each refusal."""
    numbers: dict[str, int] = {}
    total = running = 0
    blocks: list[str] = []
    for one, other in combinations(CHOICES, 2):
        rows = defaultdict(list)
        for (_, second), reason in reasons(one, other).items():
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
            pairs = list(reasons(one, other).values())
            cells.append(f"{pairs.count(None)} of {len(pairs)}")
        rows.append(f"| {TITLES[one]} | {' | '.join(cells)} |")
    return "\n".join(rows)
