"""Client availability and dropout."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from flsuite import FlsuiteError
from flsuite.federation import Always, Availability, Bernoulli, OnOff

# Client 0 from 1 to 4 and from 6 to 8, client 1 from 2 to 10 in three pieces, client 2 never.
INTERVALS = "client,start,end\n1,5,10\n0,6,8\n1,2,4\n0,1,4\n1,3,5\n0,9,9\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def on_off(
    file: Path, content: str = INTERVALS, clients: int = 3, period: float | None = None
) -> OnOff:
    file.write_text(content)
    made = OnOff(str(file), period)
    made.configure(clients, seed=0)
    return made


def available(availability: Availability, seconds: float) -> list[int]:
    is_available = availability.available(seconds)
    assert is_available is not None and is_available.dtype == bool
    return np.flatnonzero(is_available).tolist()


def leaves(availability: Availability, client: int, started: float, seconds: float) -> float | None:
    return availability.leaves(client, 0, started, seconds)


def test_a_client_is_not_there_for_less_than_the_clock_shows(trace: Path) -> None:
    """The end of the interval in the second period is one rounding above 7.983."""
    made = on_off(trace, "client,start,end\n0,3.196,3.983\n", clients=1, period=4.0)
    assert available(made, 7.983) == [] and leaves(made, 0, 7.983, 0.3) == 7.983
    assert made.next_start(7.983) == pytest.approx(11.196)


# Always, Bernoulli


def test_all_clients_are_there_without_a_trace() -> None:
    for availability in (Always(), Bernoulli(0.5)):
        availability.configure(3, seed=0)
        assert availability.available(5.0) is None and availability.next_start(5.0) is None
    assert leaves(Always(), 1, 5.0, 2.0) is None


def test_the_share_of_dropouts_and_their_times() -> None:
    availability = Bernoulli(0.3)
    availability.configure(1, seed=0)
    times = [availability.leaves(0, number, 10.0, 4.0) for number in range(5000)]
    left = np.array([time for time in times if time is not None])

    assert len(left) / len(times) == pytest.approx(0.3, abs=0.02)
    assert left.min() >= 10 and left.max() < 14
    assert np.quantile(left, [0.25, 0.5, 0.75]) == pytest.approx([11, 12, 13], abs=0.15)
    assert all(type(time) is float for time in times if time is not None)


def test_a_dropout_is_a_function_of_seed_client_and_number() -> None:
    availability = Bernoulli(0.5)
    availability.configure(5, seed=0)
    fits = list(product(range(5), range(40)))
    expected = {fit: availability.leaves(*fit, 0.0, 1.0) for fit in fits}
    np.random.rand(3)
    assert {fit: availability.leaves(*fit, 0.0, 1.0) for fit in reversed(fits)} == expected
    # The share of the seconds is the same, whatever they are and whenever the fit starts.
    for fit, left in expected.items():
        later = availability.leaves(*fit, 8.0, 2.0)
        assert later == (None if left is None else pytest.approx(8.0 + 2.0 * left))

    availability.configure(5, seed=1)
    assert {fit: availability.leaves(*fit, 0.0, 1.0) for fit in fits} != expected


# OnOff without a period


@pytest.mark.parametrize(
    ("client", "started", "seconds", "expected"),
    [
        (0, 1.0, 2.0, None),
        (0, 1.0, 3.0, None),  # the fit ends when the interval does
        (0, 1.0, 3.5, 4.0),
        (0, 3.0, 5.0, 4.0),  # the client returns before the fit would end, but has dropped out
        (1, 2.0, 8.0, None),  # through two joints
        (1, 2.0, 8.5, 10.0),
        (0, 2.0, 0.0, None),  # seconds that are measured
        (0, 4.5, 1.0, 4.5),  # not available at the start
        (2, 4.5, 1.0, 4.5),
    ],
)
def test_when_a_client_drops_out(
    client: int, started: float, seconds: float, expected: float | None, trace: Path
) -> None:
    assert leaves(on_off(trace), client, started, seconds) == expected


def test_a_trace_in_which_nobody_is_ever_there(trace: Path) -> None:
    for period in (None, 5.0):
        availability = on_off(trace, "client,start,end\n0,2,2\n", period=period)
        assert available(availability, 2.0) == [] and availability.next_start(0.0) is None
        assert leaves(availability, 0, 2.0, 1.0) == 2.0


# OnOff with a period


def test_an_interval_goes_on_where_the_trace_starts_again(trace: Path) -> None:
    content = "client,start,end\n0,0,3\n0,7,10\n1,0,6\n1,6,10\n2,7,10\n"
    availability = on_off(trace, content, period=10.0)
    assert leaves(availability, 0, 8.0, 100.0) == 13.0
    assert leaves(availability, 0, 8.0, 5.0) is None
    assert leaves(availability, 0, 11.0, 100.0) == 13.0
    assert leaves(availability, 1, 8.0, 1e6) is None  # always there
    assert leaves(availability, 2, 8.0, 100.0) == 10.0


@pytest.mark.parametrize("period", [0.3, 0.7, 1.1])
def test_at_the_next_start_a_client_is_available_however_sums_are_rounded(
    period: float, trace: Path
) -> None:
    """Check that a schedule that waits for the next start does not have to wait again."""
    availability = on_off(trace, "client,start,end\n0,0.1,0.15\n1,0.2,0.3\n", 2, period)
    seconds, expected = 0.0, [0, 1]
    for number in range(800):
        following = availability.next_start(seconds)
        assert following is not None and following > seconds
        assert following == pytest.approx((number // 2) * period + 0.1 * (number % 2 + 1))
        assert available(availability, following) == [expected[number % 2]]
        left = leaves(availability, number % 2, following, 10 * period)
        assert left is not None and left > following
        seconds = following


@pytest.mark.parametrize("period", [0.1, 1 / 3, 86400.3])
def test_a_trace_that_starts_with_an_interval_starts_again_on_time(
    period: float, trace: Path
) -> None:
    availability = on_off(trace, f"client,start,end\n0,0,{period / 2}\n", 1, period)
    seconds = 0.0
    for number in range(1, 600):
        following = availability.next_start(seconds)
        assert following == number * period and following > seconds
        assert available(availability, following) == [0]
        assert available(availability, np.nextafter(following, 0)) == []
        seconds = following


@pytest.mark.parametrize("period", [None, 30.0])
def test_many_intervals_agree_with_a_search_one_by_one(period: float | None, trace: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(int(c), int(s), int(s + d)) for c, s, d in rng.integers(0, [15, 20, 10], (60, 3))]
    lines = "".join(f"{client},{start},{end}\n" for client, start, end in rows)
    availability = on_off(trace, "client,start,end\n" + lines, clients=15, period=period)

    open_at = np.zeros((15, 90), dtype=bool)  # client, whole second
    for client, start, end in rows:
        for offset in (0, 30, 60) if period else (0,):
            open_at[client, start + offset : end + offset] = True
    starting = open_at[:, 1:] & ~open_at[:, :-1]
    for second in range(55):
        assert available(availability, second + 0.5) == np.flatnonzero(open_at[:, second]).tolist()
        later = np.flatnonzero(starting.any(0)[second:])
        expected = float(second + 1 + later[0]) if len(later) else None
        if period is None or (second + 1) % 30:  # a start at 0 need not be one after a joint
            assert availability.next_start(second + 0.5) == expected
        for client in np.flatnonzero(open_at[:, second]).tolist():
            end = second + int(open_at[client, second:].argmin())
            assert leaves(availability, client, second + 0.5, 1000.0) == end


# Arguments and files


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_a_dropout_out_of_range_is_named(dropout: float) -> None:
    with pytest.raises(FlsuiteError, match=r"Bernoulli: dropout must be in \[0, 1\), got"):
        Bernoulli(dropout)


def test_a_period_out_of_range_is_named(trace: Path) -> None:
    with pytest.raises(FlsuiteError, match="OnOff: period must be positive, got 0"):
        on_off(trace, period=0.0)
    with pytest.raises(FlsuiteError, match=r"period must be at least 10, the last end"):
        on_off(trace, period=9.5)
    on_off(trace, period=10.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("client,seconds\n0,1\n", r"expected the columns client, start, end"),
        ("client,start,end\n0,3,2\n", "row 1, column 'end': expected at least"),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_line(content: str, message: str, trace: Path) -> None:
    with pytest.raises(FlsuiteError, match=message):
        on_off(trace, content)
    trace.unlink()
    with pytest.raises(FlsuiteError, match=r"there is no file .*trace\.csv"):
        OnOff(str(trace))
