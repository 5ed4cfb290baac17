"""``flsuite schedule``: which clients train when, without training."""

from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from flsuite.analysis.timeline import timeline_figure
from flsuite.commands.fit import build
from flsuite.commands.parsers import parser_of
from flsuite.commands.parsing import config_name
from flsuite.common.files import make_folder
from flsuite.runs.rounds import rehearse
from flsuite.runs.table import TimelineTable


def schedule(args: list[str]) -> None:
    """Write a picture and a table of which clients train when, and print totals."""
    own, rest = parser_of("schedule").parse_known_args(args)
    configs = [argument for path in own.config for argument in ("--config", path)]
    trainer, model, data = build([*configs, *rest])

    # Before the folder is created: a failing request leaves nothing behind.
    run = trainer.prepare(model, data)
    fits = list(rehearse(run))
    name = config_name(own.config, "flsuite")
    folder = make_folder(Path(own.output))
    table = TimelineTable(folder / f"{name}-timeline.csv")
    table.create(overwrite=True)
    table.add(fits)
    table.append()

    types = {"round": "Int64", "staleness": "Int64", "weight": float}
    timeline = pd.DataFrame(fits).astype(types)
    timeline_figure(timeline).savefig(folder / f"{name}-timeline.png")
    _print(timeline, run.federation.data.clients)
    print(f"{folder / name}-timeline.png\n{folder / name}-timeline.csv")


def _print(timeline: pd.DataFrame, clients: int) -> None:
    counts = timeline["outcome"].value_counts()
    merged = timeline[timeline["outcome"] == "merged"]
    per_client = merged["client"].value_counts().reindex(range(clients), fill_value=0)
    rows = {
        "virtual seconds": f"{merged['merged_s'].max():.1f}",
        "aggregations": str(timeline["round"].max()),
        "client updates": str(len(merged)),
        "dropped out": str(counts.get("dropped", 0)),
        "left out": str(counts.get("late", 0)),
        "updates per client": f"{per_client.min()} to {per_client.max()}",
        "staleness, mean and largest": (
            f"{merged['staleness'].mean():.2f}, {merged['staleness'].max():.0f}"
        ),
    }
    shown = Table(title="schedule", title_justify="left", show_header=False)
    for label, value in rows.items():
        shown.add_row(label, value)
    Console().print(shown)
