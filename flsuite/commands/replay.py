"""Repeating rounds of a finished run."""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.commands.main import dispatch
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.files import read_yaml, replace_tensors
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.fork import copy_files
from flsuite.runs.record import (
    Row,
    ends,
    kept_rounds,
    memories_of,
    read_settings,
    round_of_row,
    rows_of,
)
from flsuite.runs.run import Run

log = logging.getLogger("flsuite")


@dataclass(eq=False)
class StopAfter(FederationCallback, Settings):
    """Ends a run after a round, regardless of its limits.

    Args:
        round: The last round.
    """

    affects: ClassVar[Affects] = "rounds"

    round: PositiveInt

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        if round >= self.round:
            run.stop()


def replay(run: Path, start: int, stop: int, folder: Path) -> None:
    """Do some rounds of a run again, by ``flsuite fit`` in this process.

    A run that ended with one of these rounds, and was extended later, is ended and extended here as
    well: some scores exist only in the last round of a run.

    Args:
        run: The run.
        start: The round to begin after: a kept one, or the start of the run.
        stop: The last round.
        folder: The folder of the replay.

    Raises:
        FlsuiteError: If the settings cannot be met, for example because a package is missing.
        FederationError: If the replay fails.
        KeyboardInterrupt: If it is interrupted. The message says how to continue.
    """
    moment = start if start in kept_rounds(run) else 0
    lasts = [*(round for round in ends(run) if start < round < stop), stop]
    with _without_its_origin():
        for number, last in enumerate(lasts):
            request = [
                *arguments(run, moment, folder),
                *("--trainer.keep_rounds", "1"),
                *("--trainer.callbacks+", "flsuite.commands.replay.StopAfter"),
                *("--trainer.callbacks.round", str(last)),
                *(("--ckpt_path", "last") if number else ()),
            ]
            try:
                dispatch("fit", request)
            except KeyboardInterrupt:  # the folder of the replay, which it names, is removed
                raise KeyboardInterrupt("the same command does the rounds again") from None


@contextmanager
def _without_its_origin() -> Iterator[None]:
    """Hide the message that a replay is forked, because the run itself may not be a fork."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("forked from")

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def arguments(run: Path, at: int, folder: Path) -> list[str]:
    """Return the arguments of ``flsuite fit`` that repeat a run, without its logger and its bar.

    Args:
        run: The run.
        at: The kept round to begin after. 0 is the run's own start.
        folder: The folder of the repetition.
    """
    moment = ["--trainer.fork.run", str(run), "--trainer.fork.round", str(at)] if at else []
    return [
        *("--config", str(run / "config.yaml"), "--run_dir", str(folder), *moment),
        *("--trainer.logger", "false", "--trainer.enable_progress_bar", "false"),
        *engine_of(run),  # an engine chosen by timing may round otherwise
    ]


def engine_of(run: Path) -> list[str]:
    """Return the arguments that name the engine which ``Auto`` chose for a run, if it did."""
    config = read_yaml(run / "config.yaml")
    engine = (config.get("trainer") or {}).get("engine") or {}
    asked = engine.get("class_path", "") if isinstance(engine, dict) else str(engine)
    if asked.rpartition(".")[2] != "Auto":
        return []
    chosen = read_settings(run).get("engine")
    if chosen is None:
        return ["--trainer.engine", "InProcess"]
    clients = str(chosen["init_args"]["clients"])
    return ["--trainer.engine", "Vectorized", "--trainer.engine.clients", clients]


def adopt(again: Path, run: Path) -> None:
    """Add the last checkpoint of a replay to the kept checkpoints of its run.

    Args:
        again: The folder of the replay.
        run: The folder of the run.
    """
    content = load_checkpoint(again / "checkpoints" / "last.ckpt")
    round = int(content["federation"]["clock"]["round"])
    # The tables are the run's own: the replay's last round may be scored in more detail.
    table = run / "metrics.csv"
    fits = {row["fit"] for row in rows_of(again / "timeline.csv")}
    starts = {
        "table": _start(table, lambda row: round_of_row(table, row) <= round),
        "timeline": _start(run / "timeline.csv", lambda row: row["fit"] in fits),
    }
    content |= {name: len(start) for name, start in starts.items()}
    content["digests"] = {n: hashlib.sha256(start).hexdigest() for n, start in starts.items()}
    copy_files(again, run, memories_of(content["federation"]))
    replace_tensors(content, run / "checkpoints" / f"round-{round:06d}.ckpt", flush=True)


def _start(path: Path, belongs: Callable[[Row], bool]) -> bytes:
    """Return a table's header and its leading rows that belong."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = itertools.takewhile(belongs, rows_of(path))
    return b"".join(lines[: 1 + sum(1 for _ in rows)])
