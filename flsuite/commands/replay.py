"""Rounds of a run done again."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml

from flsuite.arguments import PositiveInt, Settings
from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.commands.record import Row, ends, round_of_row, rows_of
from flsuite.files import replace_file, save_tensors
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.fork import copy_files, parent_settings
from flsuite.runs.run import Run

log = logging.getLogger("flsuite")


@dataclass(eq=False)
class StopAfter(FederationCallback, Settings):
    """Ends a run after a round, whatever its limits are.

    Args:
        round: The last round.
    """

    affects: ClassVar[Affects] = "rounds"

    round: PositiveInt

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        if round >= self.round:
            run.stop()


def replay(run: Path, start: int | None, stop: int, folder: Path) -> int:
    """Do some rounds of a run again, and return the exit status of ``flsuite fit``.

    A run that ended with one of these rounds, and was extended later, is ended and extended here as
    well: some scores exist only in the last round of a run.

    Args:
        run: The run.
        start: The kept round to begin at. ``None`` is its own start.
        stop: The last round.
        folder: The folder of the replay.
    """
    from flsuite.commands.main import run_command

    between = [round for round in ends(run) if (start or 0) < round < stop]
    with _without_its_origin():
        for number, last in enumerate([*between, stop]):
            go_on = ["--ckpt_path", "last"] if number else []
            if status := run_command("fit", [*arguments(run, start, last, folder), *go_on]):
                return status
    return 0


@contextmanager
def _without_its_origin() -> Iterator[None]:
    """Leave out the line which says that a replay is a fork, as its run may be none."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("forked from")

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def arguments(run: Path, start: int | None, stop: int, folder: Path) -> list[str]:
    """Return the arguments of ``flsuite fit`` that do some rounds of a run again.

    Args:
        run: The run.
        start: The kept round to begin at. ``None`` is its own start.
        stop: The last round.
        folder: The folder of the replay.
    """
    begin = ["--trainer.fork.run", str(run), "--trainer.fork.round", str(start)] if start else []
    return [
        *("--config", str(run / "config.yaml"), "--run_dir", str(folder), *begin),
        *("--trainer.keep_rounds", "1", "--trainer.logger", "false"),
        *("--trainer.enable_progress_bar", "false"),
        *("--trainer.callbacks+", "flsuite.commands.replay.StopAfter"),
        *("--trainer.callbacks.round", str(stop)),
        *engine_of(run),
    ]


def engine_of(run: Path) -> list[str]:
    """Return the arguments that name the engine which ``Auto`` chose for a run, if it did."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    engine = (config.get("trainer") or {}).get("engine") or {}
    asked = engine.get("class_path", "") if isinstance(engine, dict) else str(engine)
    if asked.rpartition(".")[2] != "Auto":
        return []
    chosen = parent_settings(run).get("engine")
    if chosen is None:
        return ["--trainer.engine", "InProcess"]
    clients = str(chosen["init_args"]["clients"])
    return ["--trainer.engine", "Vectorized", "--trainer.engine.clients", clients]


def adopt(again: Path, run: Path) -> None:
    """Add the last checkpoint of a replay to the kept ones of its run.

    Args:
        again: The folder of the replay.
        run: The folder of the run.
    """
    content = load_checkpoint(again / "checkpoints" / "last.ckpt")
    round = int(content["federation"]["clock"]["round"])
    # Sizes of the run's own tables: the replay's last round may be scored in more detail.
    table = run / "metrics.csv"
    content["table"] = _size(table, lambda row: round_of_row(table, row) <= round)
    fits = {row["fit"] for row in rows_of(again / "timeline.csv")}
    content["timeline"] = _size(run / "timeline.csv", lambda row: row["fit"] in fits)
    for folder in ("clients", "in_flight"):
        copy_files(again, run, folder, (path.name for path in (again / folder).glob("*.pt")))
    replace_file(
        lambda path: save_tensors(content, path),
        run / "checkpoints" / f"round-{round:06d}.ckpt",
        flush=True,
    )


def _size(path: Path, belongs: Callable[[Row], bool]) -> int:
    """Return the size of a table's header and of its leading rows that belong to it."""
    lines = path.read_bytes().splitlines(keepends=True)
    size = len(lines[0])
    for line, row in zip(lines[1:], rows_of(path), strict=True):
        if not belongs(row):
            break
        size += len(line)
    return size
