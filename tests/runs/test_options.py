"""How long a run lasts: the first limit that is reached ends it."""

import pytest

from flsuite import FlsuiteError
from flsuite.federation import Clock
from flsuite.runs.settings import Budget

SPENT = Clock(round=5, seconds=2.5, client_updates=20, bytes=10**9)


@pytest.mark.parametrize(
    ("budget", "spent", "share"),
    [
        (Budget(rounds=6), False, 5 / 6),
        (Budget(rounds=5), True, 1.0),
        (Budget(rounds=1), True, 1.0),
        (Budget(max_virtual_seconds=2.500001), False, 2.5 / 2.500001),
        (Budget(max_virtual_seconds=2.5), True, 1.0),
        (Budget(max_client_updates=21), False, 20 / 21),
        (Budget(max_client_updates=20), True, 1.0),
        (Budget(rounds=10, max_virtual_seconds=10.0, max_client_updates=25), False, 0.8),
        (Budget(rounds=10, max_virtual_seconds=3.0, max_client_updates=100), False, 2.5 / 3),
        (Budget(rounds=10, max_virtual_seconds=2.0, max_client_updates=100), True, 1.0),
        (Budget(), False, 0.0),
    ],
)
def test_the_first_limit_counts(budget: Budget, spent: bool, share: float) -> None:
    assert budget.is_spent(SPENT) is spent
    assert budget.share(SPENT) == pytest.approx(share)
    assert not budget.is_spent(Clock()) and budget.share(Clock()) == 0.0


def test_ten_rounds_unless_another_limit_is_given() -> None:
    assert Budget.of(None, None, None) == Budget(rounds=10)
    assert Budget.of(3, None, None) == Budget(rounds=3)
    assert Budget.of(None, 2.0, None) == Budget(max_virtual_seconds=2.0)
    assert Budget.of(None, None, 7) == Budget(max_client_updates=7)
    assert Budget.of(3, 2.0, 7) == Budget(3, 2.0, 7)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"rounds": 0}, "trainer: rounds must be at least 1, got 0"),
        ({"rounds": -3}, "trainer: rounds must be at least 1, got -3"),
        ({"rounds": float("inf")}, "trainer: rounds must be a whole number, got inf"),
        ({"max_client_updates": 0}, "trainer: max_client_updates must be at least 1, got 0"),
        ({"max_virtual_seconds": 0.0}, "trainer: max_virtual_seconds must be positive, got 0.0"),
        ({"max_virtual_seconds": -1.0}, "trainer: max_virtual_seconds must be positive, got -1.0"),
        ({"max_virtual_seconds": float("nan")}, "max_virtual_seconds must be positive, got nan"),
        ({"max_virtual_seconds": float("inf")}, "max_virtual_seconds must be positive, got inf"),
    ],
)
def test_a_limit_that_cannot_be_met_is_named(limits: dict[str, float], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        Budget(**limits)  # type: ignore[arg-type]


def test_as_text_it_says_what_to_raise() -> None:
    assert str(Budget(rounds=3)) == "trainer.rounds (now 3)"
    assert str(Budget(3, 2.5, 4_000_000)) == (
        "trainer.rounds (now 3), trainer.max_virtual_seconds (now 2.5), "
        "trainer.max_client_updates (now 4000000)"
    )
