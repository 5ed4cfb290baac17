"""The tables of a run: what is written is what is read, also after a kill."""

import csv
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flsuite.analysis import read_metrics, read_timeline
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import csv_of, escaped
from flsuite.federation import Clock
from flsuite.runs.table import MetricsTable, TimelineRow, TimelineTable, _AppendedTable

ROWS = [
    TimelineRow(0, 4, 0, 0.0, 1.5, "merged", 1, 1.75, 0, 0.25),
    TimelineRow(2, 1, 0, 0.0, 2.0, "merged", 2, 2.0, 1),
    TimelineRow(1, 3, 0, 0.0, 2.25, "dropped"),
    TimelineRow(3, 4, 1, 1.5, 2.5, "late"),
    TimelineRow(4, 0, 1, 1.5, 2.5, "failed"),
]


def metrics(path: Path) -> MetricsTable:
    table = MetricsTable(path / "metrics.csv")
    table.create()
    return table


def close(table: MetricsTable, round: int) -> dict[str, float]:
    table.note("global", "test", {"accuracy": round / 8})
    table.note("3", "train", {"loss": 1 / 3})
    clock = Clock(round, seconds=1.25 * round, client_updates=5 * round, bytes=10**10 * round)
    return table.close_round(clock, wall=0.5 * round)


def test_metrics_are_read_as_they_were_noted(tmp_path: Path) -> None:
    table = metrics(tmp_path)
    assert close(table, 1) == {"test/accuracy": 0.125, "client/3/train/loss": 1 / 3}
    close(table, 2)
    assert table.append() == (tmp_path / "metrics.csv").stat().st_size

    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "round,virtual_s,wall_s,client_updates,bytes,scope,split,metric,value",
        "1,1.25,0.500,5,10000000000,global,test,accuracy,0.125",
        "1,1.25,0.500,5,10000000000,3,train,loss,0.333333333",
        "2,2.5,1.000,10,20000000000,global,test,accuracy,0.25",
        "2,2.5,1.000,10,20000000000,3,train,loss,0.333333333",
    ]
    read = read_metrics(tmp_path)
    assert tuple(read.columns) == MetricsTable.columns
    assert read["bytes"].tolist() == [row.bytes for row in table.rows]
    assert read["scope"].tolist() == ["global", "3"] * 2


def test_the_digest_is_of_what_was_written_without_reading_it_again(tmp_path: Path) -> None:
    table, path = metrics(tmp_path), tmp_path / "metrics.csv"
    for round in (1, 2):
        close(table, round)
        size = table.append()
        assert table.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    resumed = MetricsTable(path)
    resumed.resume(size, table.digest)
    for each in (table, resumed):
        close(each, 3)
    written = path.read_bytes()
    resumed.append()
    path.write_bytes(written)
    table.append()
    assert table.digest == resumed.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes().replace(b"accuracy", b"accurate"))
    digest = table.digest
    close(table, 4)
    size = table.append()
    assert table.digest != digest
    with pytest.raises(FlsuiteError, match=r"metrics\.csv was changed after"):
        MetricsTable(path).resume(size, table.digest)


TEXTS = ["=1+1", "+a", "-a", "@a", "\t=a", "'=a", "''-a", "-1", "+3", "'a", "a=b", "", "accuracy"]


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_is_a_formula_to_a_spreadsheet_and_all_are_read_as_they_were(
    text: str, tmp_path: Path
) -> None:
    table = metrics(tmp_path)
    for scope, split, name in (
        (text, "train", "a"),
        ("global", text, "a"),
        ("global", "test", text),
    ):
        table.note(scope, split, {name: -1.0})
    table.close_round(Clock(1, seconds=1.0), wall=0.5)
    size = table.append()

    is_formula = text[:1] in "=+-@\t" and text not in ("", "-1", "+3")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        (_, first, second, third) = csv.reader(file)
    for cell in (first[5], second[6], third[7]):
        assert (cell == f"'{text}") == (is_formula or text in ("'=a", "''-a"))
    resumed = MetricsTable(tmp_path / "metrics.csv")
    resumed.resume(size, table.digest)
    assert resumed.rows == table.rows
    if text:  # pandas takes an empty cell for a missing one
        assert read_metrics(tmp_path)["metric"].tolist() == ["a", "a", text]

    frame = pd.DataFrame({text: [text, 0], "n": [-1, 2]})
    cells = list(csv.reader(csv_of(frame).splitlines()))
    assert [cells[0][0], cells[1][0]] == [escaped(text)] * 2 and cells[1][1] == "-1"


def test_tables_of_earlier_versions_are_read_as_they_are(tmp_path: Path) -> None:
    header = ",".join(MetricsTable.columns)
    (tmp_path / "metrics.csv").write_text(f"{header}\n1,0,0,0,0,=a,-b,'c,1\n")
    row = read_metrics(tmp_path).iloc[0]
    assert [row["scope"], row["split"], row["metric"]] == ["=a", "-b", "'c"]


def test_work_is_written_in_whole_numbers(tmp_path: Path) -> None:
    table = metrics(tmp_path)
    table.note("global", "test", {"accuracy": 0.5})
    table.close_round(Clock(1, 0.0, client_updates=np.int64(3), bytes=7.0), 0.0)  # type: ignore[arg-type]
    table.append()
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1].split(",")[3:5] == ["3", "7"]


def test_what_a_killed_run_wrote_later_is_cut_off_with_the_next_round(tmp_path: Path) -> None:
    killed = metrics(tmp_path)
    close(killed, 1)
    size = killed.append()
    close(killed, 2)
    killed.append()
    whole = (tmp_path / "metrics.csv").read_bytes()

    resumed = MetricsTable(tmp_path / "metrics.csv")
    resumed.resume(size)
    assert (tmp_path / "metrics.csv").read_bytes() == whole, "nothing is lost until a round is done"
    assert [row.round for row in resumed.rows] == [1, 1]
    close(resumed, 2)
    resumed.append()
    assert (tmp_path / "metrics.csv").read_bytes() == whole
    assert [row.round for row in resumed.rows] == [1, 1, 2, 2]


def test_a_timeline_is_read_as_it_was_added(tmp_path: Path) -> None:
    table = TimelineTable(tmp_path / "timeline.csv")
    table.create()
    table.add(ROWS[:2])
    table.append()
    table.add(iter(ROWS[2:]))
    assert table.append() == (tmp_path / "timeline.csv").stat().st_size

    read = read_timeline(tmp_path)
    assert tuple(read.columns) == TimelineTable.columns
    for got, row in zip(read.itertuples(index=False), ROWS, strict=True):
        assert [None if pd.isna(value) else value for value in got] == list(row)
    assert str(read["staleness"].dtype) == "Int64"


def test_fits_that_end_at_the_same_time_still_do_when_they_are_read(tmp_path: Path) -> None:
    table = TimelineTable(tmp_path / "timeline.csv")
    table.create()
    end = 1000 / 3
    table.add(TimelineRow(n, n, 0, 0.0, end + n // 2 * 1e-5, "late") for n in range(4))
    table.append()
    ends = read_timeline(tmp_path)["ended_s"]
    assert ends[0] == ends[1] != ends[2] == ends[3] and abs(ends[0] - end) < 1e-6


def test_a_timeline_forgets_what_it_has_written(tmp_path: Path) -> None:
    written, unwritten = TimelineTable(tmp_path / "timeline.csv"), TimelineTable(None)
    written.create()
    for table in (written, unwritten):
        table.add(ROWS)
        size = table.append()
        held = [value for value in vars(table).values() if isinstance(value, list)]
        assert held == [[]] and (size > 0) == (table.path is not None)


@pytest.mark.parametrize("kind", [MetricsTable, TimelineTable])
def test_a_table_that_is_there_is_replaced_only_on_request(
    kind: type[_AppendedTable], tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text("mine\n")
    with pytest.raises(FileExistsError):
        kind(path).create()
    assert path.read_text() == "mine\n"
    kind(path).create(overwrite=True)
    assert path.read_text() == ",".join(kind.columns) + "\n"


def test_a_table_of_an_earlier_version_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("round,virtual_s,wall_s,scope,split,metric,value\n1,0,0,global,test,a,1\n")
    before = path.read_bytes()
    with pytest.raises(FlsuiteError, match="the version that started it"):
        MetricsTable(path).resume(len(before))
    assert path.read_bytes() == before
