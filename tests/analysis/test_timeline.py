"""Pictures of who trained when."""

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flsuite.analysis import read_timeline, timeline_figure
from flsuite.common.errors import FlsuiteError
from flsuite.runs.table import TimelineRow, TimelineTable

# A round that gives up its last client after 2 seconds, and a round of those that remain.
SYNCHRONOUS = [
    TimelineRow(0, 0, 0, 0.0, 0.5, "merged", 1, 2.0, 0, 0.5),
    TimelineRow(1, 1, 0, 0.0, 1.0, "dropped"),
    TimelineRow(2, 2, 0, 0.0, 2.0, "late"),
    TimelineRow(3, 0, 1, 2.0, 2.5, "merged", 2, 3.5, 0, 0.5),
    TimelineRow(4, 1, 1, 2.0, 3.0, "failed"),
    TimelineRow(5, 2, 1, 2.0, 3.5, "merged", 2, 3.5, 0, 0.5),
]
# Fits of 1, 2 and 5 virtual seconds; each update is merged when it arrives.
ASYNCHRONOUS = [
    TimelineRow(0, 0, 0, 0.0, 1.0, "merged", 1, 1.0, 0, 1.0),
    TimelineRow(1, 1, 0, 0.0, 2.0, "merged", 2, 2.0, 1, 1.0),
    TimelineRow(3, 0, 1, 1.0, 2.0, "merged", 3, 2.0, 1, 1.0),
    TimelineRow(5, 0, 3, 2.0, 3.0, "merged", 4, 3.0, 0, 1.0),
    TimelineRow(4, 1, 3, 2.0, 4.0, "merged", 5, 4.0, 1, 1.0),
    TimelineRow(6, 0, 4, 3.0, 4.0, "merged", 6, 4.0, 1, 1.0),
    TimelineRow(2, 2, 0, 0.0, 5.0, "merged", 7, 5.0, 6, 1.0),
]


def frame(rows: list[TimelineRow]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(TimelineTable.columns))
    return table.astype({"round": "Int64", "staleness": "Int64", "weight": float})


def bars(panel: Axes) -> dict[tuple[float, float, float], Rectangle]:
    """Return the bars by line, start and end."""
    return {
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_x() + bar.get_width()): bar
        for bar in panel.patches
        if isinstance(bar, Rectangle)
    }


def aggregations(panel: Axes) -> list[float]:
    """Return where there are vertical lines."""
    lines = [list(line.get_xdata()) for line in panel.lines if line.get_marker() != "x"]
    return [start for start, end in lines if start == end]


def drawn(figure: Figure) -> Figure:
    """Return the figure after it was rendered, which lays it out."""
    figure.canvas.draw()
    return figure


def test_a_round_is_drawn_with_those_that_it_waited_for() -> None:
    figure = drawn(timeline_figure(frame(SYNCHRONOUS)))
    (panel,) = figure.axes  # no staleness, no panel for it and no color bar
    assert set(bars(panel)) == {(row.client, row.started_s, row.ended_s) for row in SYNCHRONOUS}
    assert aggregations(panel) == [2.0, 3.5], "the first round ends when it gives up client 2"

    (cross,) = [line for line in panel.lines if line.get_marker() == "x"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([1.0], [1])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "merged",
        "dropped",
        "late",
        "failed",
        "aggregation",
    ]
    looks = {key: (bar.get_facecolor(), bar.get_hatch()) for key, bar in bars(panel).items()}
    assert len(set(looks.values())) == 4 and looks[(1, 0.0, 1.0)][1], "a dropped fit is hatched"
    assert panel.get_xlabel() == "virtual seconds"


def test_the_color_of_a_merge_is_its_staleness() -> None:
    above, panel, colors = drawn(timeline_figure(frame(ASYNCHRONOUS))).axes
    found = bars(panel)
    assert set(found) == {(row.client, row.started_s, row.ended_s) for row in ASYNCHRONOUS}
    color = {
        row.fit: found[(row.client, row.started_s, row.ended_s)].get_facecolor()
        for row in ASYNCHRONOUS
    }
    assert color[0] == color[5] and color[1] == color[3] == color[4] == color[6]
    assert len(set(color.values())) == 3
    assert sum(color[2][:3]) < sum(color[1][:3]) < sum(color[0][:3]), "the staler, the darker"
    assert list(colors.get_yticks()) == list(range(7))

    assert aggregations(panel) == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0]
    assert list(above.lines[0].get_xdata()) == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 5.0]
    assert list(above.lines[0].get_ydata()) == [0, 1, 1, 0, 1, 1, 6]
    assert above.get_xlim() == panel.get_xlim()
    assert above.get_position().x1 == pytest.approx(panel.get_position().x1), "times are aligned"


def many(clients: int, fits: int) -> pd.DataFrame:
    """Return fits of one second each, on each client one after the other."""
    return frame(
        [
            TimelineRow(n * clients + k, k, n, float(n), n + 1.0, "merged", n + 1, n + 1.0, 0)
            for n in range(fits)
            for k in range(clients)
        ]
    )


def test_of_a_large_run_the_first_clients_and_seconds_are_drawn() -> None:
    figure = timeline_figure(many(clients=50, fits=100))
    (panel,) = figure.axes
    assert len(panel.patches) == 400 and panel.get_xlim()[1] == pytest.approx(10, rel=0.01)
    assert {line for line, _, _ in bars(panel)} == set(range(40))
    assert figure.get_suptitle() == (
        "who trains when: first 40 of 50 clients, first 10 of 100 virtual seconds"
    )


def test_clients_and_seconds_can_be_chosen() -> None:
    figure = timeline_figure(many(clients=50, fits=100), clients=2, seconds=70)
    assert len(figure.axes[0].patches) == 140
    assert not aggregations(figure.axes[0]), "so many lines would hide the bars"
    title = "who trains when: first 2 of 50 clients, first 70 of 100 virtual seconds"
    assert figure.get_suptitle() == title

    whole = timeline_figure(many(clients=2, fits=3), seconds=70)
    assert whole.get_suptitle() == "who trains when: 2 clients, 3 virtual seconds"
    assert len(aggregations(whole.axes[0])) == 3


def test_bad_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match="nothing to draw"):
        timeline_figure(frame([]))
    with pytest.raises(FlsuiteError, match="clients must be at least 1, got 0"):
        timeline_figure(frame(SYNCHRONOUS), clients=0)
    with pytest.raises(FlsuiteError, match="seconds must be positive, got 0"):
        timeline_figure(frame(SYNCHRONOUS), seconds=0)
    with pytest.raises(FlsuiteError, match="is not the folder of a run"):
        read_timeline(tmp_path)
