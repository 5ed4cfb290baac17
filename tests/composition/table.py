"""Writes the table of pairs, see configs/composition/README.md.

    python -m tests.composition.table > configs/composition/tables.md

The table has what the parts declare. ``test_matrix.py`` runs every pair, and compares.
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


def table() -> str:
    """Return the table of all pairs in Markdown, with the reason of each refusal."""
    reasons: dict[str, int] = {}
    total = running = 0
    blocks: list[str] = []
    for one, other in combinations(CHOICES, 2):
        rows = defaultdict(list)
        for first in CHOICES[one]:
            for second in CHOICES[other]:
                reason = conflict(pair(one, first, other, second))
                total, running = total + 1, running + (reason is None)
                number = reasons.setdefault(reason, len(reasons) + 1) if reason else 0
                rows[second].append(f"({number})" if reason else "yes")
        blocks.append(f"## {TITLES[one].capitalize()} and {TITLES[other]}\n")
        blocks.append(f"| | {' | '.join(CHOICES[one])} |\n{'|---' * (len(CHOICES[one]) + 1)}|")
        blocks += [f"| {second} | {' | '.join(cells)} |" for second, cells in rows.items()]
        blocks.append("")

    head = "# What goes together\n\nPairs of [the parts of a federation](README.md). "
    head += f"Of {total} pairs {running} run ({running / total:.0%}).\n"
    why = ["## Reasons\n", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join([head, *blocks, *why]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
