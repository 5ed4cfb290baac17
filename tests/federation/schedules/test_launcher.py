"""Client sampling: each draw from a version is another one, and the same in every run."""

from flsuite.federation import Clock
from flsuite.federation.schedules.base import Measured
from flsuite.federation.schedules.launcher import Launcher


def launcher(seed: int = 3, clients: int = 50) -> Launcher:
    return Launcher(Measured(), None, [1] * clients, seed, None)


def test_each_draw_from_a_version_is_another_one() -> None:
    draws = [tuple(launcher().draw(5, Clock(2), attempt)) for attempt in range(6)]
    assert len(set(draws)) == 6
    assert draws == [tuple(launcher().draw(5, Clock(2), attempt)) for attempt in range(6)]
    assert tuple(launcher().draw(5, Clock(3), 0)) != draws[0]
    assert tuple(launcher(seed=4).draw(5, Clock(2), 0)) != draws[0]


def test_busy_clients_are_not_drawn() -> None:
    busy = set(range(0, 50, 2))
    drawn = [launcher().draw(10, Clock(1), attempt, busy=busy) for attempt in range(20)]
    assert all(len(set(own)) == 10 and not busy & set(own) for own in drawn)
    assert {client for own in drawn for client in own} == set(range(1, 50, 2))
