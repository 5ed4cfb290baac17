"""What can go wrong by a user's hand, and what ends a run."""

import math
from collections.abc import Iterable

__all__ = [
    "FederationError",
    "FlsuiteError",
    "require_at_least",
    "require_fraction",
    "require_one_of",
    "require_positive",
]


class FlsuiteError(Exception):
    """A request that cannot be carried out as it stands; the message says what to change.

    The command prints it as one line and exits with status 2, so a message is a single sentence that names the argument,
    and, where there is one, the client and the round. Not a ValueError: parsers catch those to try another reading.
    """


class FederationError(RuntimeError):
    """A run that cannot go on; what it had reached before is kept."""


def require_at_least(owner: str, least: float, **numbers: float | None) -> None:
    """Refuse an argument below ``least``, infinite or NaN; ``None`` is an argument that was left out."""
    for name, value in numbers.items():
        if value is not None and not least <= value < math.inf:
            raise FlsuiteError(f"{owner}: {name} must be at least {least}, got {value}")


def require_positive(owner: str, **numbers: float) -> None:
    """Refuse an argument that is not above zero and finite."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise FlsuiteError(f"{owner}: {name} must be positive, got {value}")


def require_fraction(owner: str, **numbers: float) -> None:
    """Refuse an argument that is not above zero and at most one."""
    for name, value in numbers.items():
        if not 0 < value <= 1:
            raise FlsuiteError(f"{owner}: {name} must be above 0 and at most 1, got {value}")


def require_one_of(owner: str, choices: Iterable[str], **values: str) -> None:
    """Refuse a word that is not among the choices."""
    choices = tuple(choices)
    for name, value in values.items():
        if value not in choices:
            raise FlsuiteError(
                f"{owner}: {name} must be one of {', '.join(choices)}, got {value!r}"
            )
