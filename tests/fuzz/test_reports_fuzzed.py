"""Reports on runs with a damaged file are made, or refused in one line."""

import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from flsuite.commands.main import main
from tests.analysis.made_runs import made_grid
from tests.fuzz.settings import fuzzed
from tests.fuzz.test_files_fuzzed import damage, damaged

FILES = ("metrics.csv", "settings.yaml", "partition.csv", "config.yaml")
cells = st.sampled_from([b"", b"abc", b"nan", b"-1", b"1e400", b"9" * 40, b"0,0", b"\xff"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_grid(tmp_path_factory.mktemp("runs"), alphas=(0.3,), seeds=(1, 2))


def with_cell(content: bytes, place: float, cell: bytes) -> bytes:
    """Return the bytes of a table, or of any text, with another cell."""
    parts = content.replace(b"\n", b",\n").split(b",")
    parts[int(place * len(parts))] = cell
    return b",".join(parts).replace(b",\n", b"\n")


def check(runs: Path, name: str, content: bytes) -> None:
    """Check that a report on runs, one of which has this file, ends as it should."""
    file = runs / "FedAvg-0.3" / "seed-1" / name
    whole = file.read_bytes()
    file.write_bytes(content)
    said = io.StringIO()
    quiet = contextlib.redirect_stdout(io.StringIO())
    try:
        with contextlib.redirect_stderr(said), quiet, pytest.raises(SystemExit) as end:
            main(["report", str(runs), "--target", "0.3"])
    finally:
        file.write_bytes(whole)
    status = int(end.value.code or 0)
    assert status in (0, 2) and said.getvalue().count("flsuite: error: ") == (status != 0)


@fuzzed(15)
@given(name=st.sampled_from(FILES), accident=damage)
@example(name="settings.yaml", accident=(0.0, b"seed: x"))
def test_a_report_on_damaged_runs_is_made_or_refused(
    runs: Path, name: str, accident: tuple[float, int | str | bytes]
) -> None:
    whole = (runs / "FedAvg-0.3" / "seed-1" / name).read_bytes()
    check(runs, name, damaged(whole, *accident))


@fuzzed(15)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), cell=cells)
def test_a_report_on_a_table_with_another_cell_is_made_or_refused(
    runs: Path, name: str, place: float, cell: bytes
) -> None:
    whole = (runs / "FedAvg-0.3" / "seed-1" / name).read_bytes()
    check(runs, name, with_cell(whole, place, cell))
