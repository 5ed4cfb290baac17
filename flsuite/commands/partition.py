"""``flsuite partition``: how a config splits the data."""

from pathlib import Path
from typing import Any

import pandas as pd
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]
from lightning.pytorch import LightningDataModule
from matplotlib.figure import Figure
from rich.console import Console

from flsuite.analysis.partition import class_counts, partition_figure, task_plan_figure
from flsuite.commands.parsing import OneLineParser, config_name, plain_errors
from flsuite.common.exports import import_names
from flsuite.common.files import csv_of, make_folder, replace_text
from flsuite.common.score_names import text_table
from flsuite.data.datasets.from_dataset import as_federated
from flsuite.runs.partition import partition_table, samples_table, task_table

_MOST_SHOWN = 30
import_names("flsuite.data")  # a config may use any of them


def partition(args: list[str]) -> None:
    """Write the partition as a picture and as tables, and print the table of classes."""
    parser = OneLineParser()
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_argument("--output", type=str, default=".")
    parser.add_argument("--seed_everything", type=int, default=1)
    parser.add_argument("--plugins", type=Any)
    # Keys of a config for flsuite fit that are ignored here.
    for ignored in ("model", "trainer", "run_dir", "ckpt_path"):
        parser.add_argument(f"--{ignored}", type=Any)
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)

    config = parser.parse_command(args)
    name = config_name(config.config, "data")
    with plain_errors():
        data = as_federated(parser.instantiate(Namespace(data=config.data)).data)

    data.use_seed(config.seed_everything)
    data.setup()

    table = partition_table(data.federated)
    stem = make_folder(Path(config.output)) / name
    _print(table)
    _draw(partition_figure(table), f"{stem}-partition.png")
    _write(csv_of(table), f"{stem}-partition.csv")
    _write(samples_table(data.federated).to_csv(index=False), f"{stem}-samples.csv")
    if data.federated.sequences:
        plan = task_table(data.federated)
        _draw(task_plan_figure(plan), f"{stem}-tasks.png")
        _write(csv_of(plan), f"{stem}-tasks.csv")


def _draw(figure: Figure, path: str) -> None:
    figure.savefig(path)
    print(path)


def _write(text: str, path: str) -> None:
    replace_text(text, Path(path))
    print(path)


def _print(table: pd.DataFrame) -> None:
    counts = class_counts(table)
    headings = ("client", *(str(name)[:12] for name in counts.columns), "all")
    shown = text_table("training samples", headings, (), words=0)
    for client, row in counts.head(_MOST_SHOWN).iterrows():
        shown.add_row(str(client), *(str(n) if n else "·" for n in row), str(row.sum()))

    if len(counts) > _MOST_SHOWN:
        shown.add_row("…", *("…" for _ in counts.columns), "…")
    shown.add_row("all", *(str(n) for n in counts.sum()), str(counts.to_numpy().sum()))
    Console().print(shown)
