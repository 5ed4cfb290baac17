"""Seconds of fits from files, by hand, and the files that are refused."""

from pathlib import Path

import numpy as np
import pytest

from flsuite import FlsuiteError
from flsuite.federation import Fit, Trace
from flsuite.runs.settings import describe

FITS = "client,seconds\n1,5\n0,1.5\n1,7\n"
TIMED = "client,start,end\n1,2,3\n0,4,9\n0,0,1\n1,8,12\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def configured(file: Path, content: str, clients: int = 2, seed: int = 0) -> Trace:
    file.write_text(content)
    made = Trace(str(file))
    made.configure(clients, seed)
    return made


def seconds(speeds: Trace, client: int, number: int = 0, started: float = 0.0) -> float | None:
    return speeds.seconds(Fit(number, client, 0, 0, started, samples=1, bytes_down=1, bytes_up=1))


# client, seconds


def test_a_client_with_one_row_takes_its_seconds(trace: Path) -> None:
    speeds = configured(trace, FITS)
    assert [seconds(speeds, 0, number) for number in range(20)] == [1.5] * 20
    assert type(seconds(speeds, 0)) is float


def test_of_several_rows_one_is_drawn_per_fit(trace: Path) -> None:
    speeds = configured(trace, FITS)
    drawn = [seconds(speeds, 1, number) for number in range(1000)]
    assert {*drawn} == {5.0, 7.0}
    assert np.mean(drawn) == pytest.approx(6.0, abs=0.1)


def test_a_draw_is_a_function_of_seed_client_and_number(trace: Path) -> None:
    rows = "".join(f"{client},{10 * client + k}\n" for k in range(10) for client in range(3))
    speeds = configured(trace, "client,seconds\n" + rows, clients=3)
    fits = [(client, number) for client in range(3) for number in range(50)]
    expected = {fit: seconds(speeds, *fit) for fit in fits}
    np.random.rand(3)
    assert {fit: seconds(speeds, *fit) for fit in reversed(fits)} == expected

    speeds.configure(3, seed=1)
    assert {fit: seconds(speeds, *fit) for fit in fits} != expected
    rows_drawn = np.array(list(expected.values())).reshape(3, 50) % 10
    assert len({tuple(client) for client in rows_drawn}) == 3


# client, start, end


@pytest.mark.parametrize(
    ("client", "started", "expected"),
    [
        (0, 0.0, 1.0),  # the row that starts at this time
        (0, 0.5, 5.0),  # the first one after it, although it comes first in the file
        (0, 4.0, 5.0),
        (0, 4.1, 1.0),  # none is left, so the trace repeats
        (0, 12.0, 1.0),  # the trace lasts until 12, the last end of all clients
        (0, 12.5, 5.0),
        (1, 2.5, 4.0),
        (1, 8.5, 1.0),
        (1, 12.0, 1.0),
        (1, 24.0 + 2.5, 4.0),
    ],
)
def test_the_row_is_the_first_one_that_starts_then_or_later(
    client: int, started: float, expected: float, trace: Path
) -> None:
    speeds = configured(trace, TIMED)
    assert [seconds(speeds, client, number, started) for number in range(3)] == [expected] * 3


def test_rows_with_the_same_start_keep_their_order(trace: Path) -> None:
    speeds = configured(trace, "client,start,end\n0,1,3\n0,1,2\n0,0,9\n", clients=1)
    assert seconds(speeds, 0, started=0.5) == 2.0


# Files


def test_columns_may_have_any_order_and_spaces(trace: Path) -> None:
    speeds = configured(trace, "end, client , start\n4, 0, 1\n\n9, 1, 3\n")
    assert [seconds(speeds, client) for client in range(2)] == [3.0, 6.0]


def test_a_trace_is_described_by_its_content(trace: Path) -> None:
    speeds = configured(trace, FITS)
    description = describe(speeds)
    assert description == {
        "class_path": "flsuite.federation.Trace",
        "init_args": {"path": f"trace.csv, content {speeds.content_digests['path']}"},
    }
    moved = trace.parent / "elsewhere"
    moved.mkdir()
    (moved / "trace.csv").write_text(trace.read_text())
    assert describe(Trace(str(moved / "trace.csv"))) == description
    (moved / "trace.csv").write_text(trace.read_text().replace("1", "3", 1))
    assert describe(Trace(str(moved / "trace.csv"))) != description


def test_a_missing_file_is_named(trace: Path) -> None:
    with pytest.raises(FlsuiteError, match=r"there is no file .*trace\.csv"):
        Trace(str(trace))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"trace\.csv is empty"),
        ("client,seconds\n", r"trace\.csv has a header but no rows"),
        ("client,speed\n0,1\n", r"trace\.csv: expected .* got client, speed$"),
        ("client,client\n0,1\n", "more than one column named 'client'"),
        ("client,seconds\n0,1\n0,1,2\n", r"trace\.csv cannot be read as CSV"),
        ("client,seconds\n0,1\n0,1\n0,1\n0,1\n0,x\n", r"row 5, column 'seconds'.*got 'x'$"),
        ("client,seconds\n0,1\n0,\n", "row 2, column 'seconds'.*got a missing value"),
        ("client,seconds\n0,inf\n", "row 1, column 'seconds'.*got inf$"),
        ("client,seconds\n0,True\n", "row 1, column 'seconds'.*got 'True'$"),
        ("client,seconds\n0,1\n0,-2.5\n", "row 2, column 'seconds'.*got -2.5$"),
        ("client,seconds\na,1\n", "row 1, column 'client'.*got 'a'$"),
        ("client,seconds\n0.5,1\n", "row 1, column 'client'.*got 0.5$"),
        ("client,start,end\n0,1,2\n0,5,3\n", "row 2, column 'end'.*got 3$"),
        ("client,start,end\n0,-1,2\n", "row 1, column 'start': expected a number"),
        ("client,start,end\n0,0,0\n", r"trace\.csv: the last end must be above 0"),
        ("client,seconds\n0,1\n7,1\n1,1\n", r"trace\.csv: row 2, column 'client': .*got 7$"),
        ("client,seconds\n0,1\n1e300,1\n", "row 2, column 'client': expected a number"),
        ("client,seconds\n0,1\n0,2\n", r"trace\.csv has no row for client 1"),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_line(content: str, message: str, trace: Path) -> None:
    with pytest.raises(FlsuiteError, match=message) as refused:
        configured(trace, content)
    assert str(trace) in str(refused.value) and "\n" not in str(refused.value)
