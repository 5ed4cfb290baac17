"""Suggestions for misspelled names."""

from collections.abc import Iterable

from flsuite.common.errors import likeliest


def nearest(name: str, known: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the likeliest name, if any is likely."""
    return next(iter(likeliest(name, known, 1, cutoff)), None)


def nearest_key(key: str, siblings: Iterable[str], elsewhere: Iterable[str]) -> str | None:
    """Return the likeliest key for an unknown one.

    Args:
        key: The last name of the unknown key.
        siblings: The names that exist in its place.
        elsewhere: Dotted keys of other places. Earlier ones are preferred.
    """
    siblings, elsewhere = list(siblings), list(elsewhere)
    longer = [name for name in siblings if name.startswith(key) and len(key) > 2]
    if longer:  # an abbreviation
        return min(longer, key=len)
    ends = {other: other.rpartition(".")[2] for other in elsewhere}
    same = [other for other, end in ends.items() if end == key]
    if same:
        return same[0]
    near = nearest(key, siblings)
    if near:
        return near
    last = [other for other, end in ends.items() if end.endswith(f"_{key}")]  # epochs: max_epochs
    if last:
        return last[0]
    end = nearest(key, ends.values(), 0.75)
    return next((other for other in elsewhere if ends[other] == end), None)
