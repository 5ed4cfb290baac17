"""Curves on every axis, by hand."""

from pathlib import Path

import pandas as pd
import pytest

from flsuite.analysis import curves_figure, find_runs, read_metrics
from flsuite.analysis.panels import AXES, aligned
from flsuite.common.errors import FlsuiteError

HEADER = "round,virtual_s,wall_s,client_updates,bytes,scope,split,metric,value\n"


def series(**points: float) -> pd.Series:
    return pd.Series({float(at.removeprefix("at")): value for at, value in points.items()})


def test_a_table_is_read_with_words_as_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(HEADER + "1,2.5,3.5,4,5,0,test,accuracy,0.5\n")
    assert find_runs([tmp_path]) == [tmp_path.resolve()]
    table = read_metrics(tmp_path)
    assert ",".join(table.columns) + "\n" == HEADER
    assert table.loc[0, ["virtual_s", "scope", "value"]].tolist() == [2.5, "0", 0.5]


def test_a_table_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,loss\n1,2,3\n")
    with pytest.raises(FlsuiteError, match="lacks the columns round"):
        read_metrics(tmp_path)


def test_the_common_grid_has_the_last_value_at_or_before_each_point() -> None:
    one = series(at1=0.1, at3=0.5, at5=0.6, at9=0.7)
    other = series(at2=0.2, at4=0.4, at5=0.3)
    grid = aligned({"one": one, "other": other}, "virtual_s")
    assert grid.index.tolist() == [2.0, 3.0, 4.0, 5.0], "from 2 to 5 there are both"
    assert grid["one"].tolist() == [0.1, 0.5, 0.5, 0.6]
    assert grid["other"].tolist() == [0.2, 0.2, 0.4, 0.3]


def test_an_axis_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match="x must be one of round, virtual_s, wall_s"):
        curves_figure({"run": tmp_path}, x="epoch")


def test_amounts_in_words() -> None:
    assert AXES["bytes"].amount(2_345_678_901) == "2346 MB"
    assert AXES["virtual_s"].amount(12.345) == "12.3 virtual s"
    assert [AXES["round"].amount(n) for n in (1, 2)] == ["1 round", "2 rounds"]
