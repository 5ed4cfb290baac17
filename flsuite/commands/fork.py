"""``flsuite fork``: a run repeated from a round on, with changes; and a replay, without changes."""

import hashlib
import itertools
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.commands.fit import build
from flsuite.commands.main import dispatch
from flsuite.commands.parsers import parser_of
from flsuite.commands.request import require_run
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.errors import FlsuiteError, log
from flsuite.common.files import read_yaml, replace_tensors
from flsuite.runs.checkpoint import copy_files, load_checkpoint
from flsuite.runs.folder import RunFolder
from flsuite.runs.record import (
    Row,
    ends,
    kept_rounds,
    last_round,
    memories_of,
    read_settings,
    round_of_row,
    rows_of,
    start_round,
)
from flsuite.runs.run import Run
from flsuite.runs.settings import describe, differences

QUIET = ("--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
"""Arguments for a repetition that the user does not look at."""


def repetition(run: Path, at: int | None, *changes: str) -> list[str]:
    """Return the arguments of ``flsuite fit`` that repeat a run.

    Args:
        run: The run.
        at: The kept round to begin after. ``None`` is the run's own start.
        changes: More arguments, which win over the run's config.
    """
    arguments = ["--config", str(run / "config.yaml")]
    if at is not None:
        arguments += ["--trainer.fork.run", str(run), "--trainer.fork.round", str(at)]
    return [*arguments, *_engine_of(run), *changes]


def _engine_of(run: Path) -> list[str]:
    """Return the arguments that name the engine which ``Auto`` chose for a run, if it did.

    An engine that is chosen anew, by timing, may round otherwise.
    """
    trainer = read_yaml(run / "config.yaml").get("trainer") or {}
    engine = trainer.get("engine") or ""
    asked = engine if isinstance(engine, str) else engine.get("class_path", "")
    if asked.rpartition(".")[2] != "Auto":
        return []
    chosen = read_settings(run).get("engine")
    if chosen is None:
        return ["--trainer.engine", "InProcess"]
    clients = str(chosen["init_args"]["clients"])
    return ["--trainer.engine", "Vectorized", "--trainer.engine.clients", clients]


def fork(args: list[str]) -> None:
    """Run the fork. If its round was not kept, replay the parent up to it first."""
    own, rest = parser_of("fork").parse_known_args(args)
    parent = require_run("fork", Path(own.run))
    if own.at < 0:
        raise FlsuiteError(f"fork: --at must be a round, 0 or above, got {own.at}")

    gone = sorted({*own.without, *(read_settings(parent).get("without") or ())})
    changes = [*(["--trainer.without", str(gone)] if gone else []), *rest]
    if _must_replay("fork", parent, own.at):
        trainer, model, data = build(repetition(parent, None, *changes))
        require_same_files("fork", parent, trainer, data)
        trainer.prepare(model, data)  # a wrong key or client is refused before the replay
    keep("fork", parent, own.at)
    dispatch("fit", repetition(parent, own.at, *changes))


def require_same_files(owner: str, run: Path, trainer: Any, data: Any) -> None:
    """Refuse a repetition that would read other files, which says nothing of the record.

    Args:
        owner: The command, for the message.
        run: The folder of the run.
        trainer: The trainer of the repetition.
        data: Its data module.
    """
    record = read_settings(run)
    of_data = record["data"]["init_args"]
    theirs = {"schedule": record["schedule"], "data.partition": of_data.get("partition")}
    ours = {"schedule": trainer.schedule, "data.partition": getattr(data, "partition", None)}
    if hasattr(data, "content_digests"):  # others may need all samples for a description
        theirs["data"], ours["data"] = record["data"], data
    for name, then, now in differences(theirs, describe(ours)):
        file, content, _ = str(then).partition(", content ")
        if content and str(now).startswith(file + content):
            raise FlsuiteError(
                f"{owner}: {name} is {now}, but the run has read {then}; restore the file"
            )


def keep(owner: str, parent: Path, at: int) -> None:
    """Make a checkpoint of a round by a replay, if a run has none.

    Args:
        owner: The command that needs it, for messages.
        parent: The folder of the run.
        at: The round.

    Raises:
        FlsuiteError: If no replay can make one.
    """
    if _must_replay(owner, parent, at):
        folder = RunFolder(parent)
        with folder.locked():  # a running parent would remove the replay's files
            folder.require_tables()  # the kept round takes them over
            _keep(parent, at)


def _must_replay(owner: str, parent: Path, at: int) -> bool:
    """Return whether the parent has no checkpoint of a round.

    Raises:
        FlsuiteError: If no replay can make one.
    """
    first = start_round(parent)
    if at in kept_rounds(parent) or at == 0:
        return False
    if at <= first:
        raise FlsuiteError(
            f"{owner}: {parent} is a fork that begins at round {first}; {owner} its parent, "
            f"{read_settings(parent)['forked_from']}"
        )
    if at > (last := last_round(parent)):
        raise FlsuiteError(f"{owner}: {parent} has {last} rounds; give --at up to {last}")
    return True


def _keep(parent: Path, at: int) -> None:
    """Make a checkpoint of a round by a replay."""
    first = start_round(parent)
    start = max((round for round in kept_rounds(parent) if first <= round < at), default=first)
    print(f"round {at} was not kept: replaying it from round {start}", file=sys.stderr)
    again = parent / ".replay"
    shutil.rmtree(again, ignore_errors=True)
    try:
        replay(parent, start, at, again)
        _adopt(again, parent)
    finally:
        shutil.rmtree(again, ignore_errors=True)


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

    def is_shown(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("forked from")  # the run itself may not be a fork

    moment = start if start in kept_rounds(run) else None
    lasts = [*(round for round in ends(run) if start < round < stop), stop]
    log.addFilter(is_shown)
    try:
        for number, last in enumerate(lasts):
            changes = [
                *("--run_dir", str(folder), *QUIET, "--trainer.keep_rounds", "1"),
                *("--trainer.callbacks+", f"{__name__}.StopAfter"),
                *("--trainer.callbacks.round", str(last)),
                *(("--ckpt_path", "last") if number else ()),
            ]
            dispatch("fit", repetition(run, moment, *changes))
    except KeyboardInterrupt:  # the folder of the replay, which it names, is removed
        raise KeyboardInterrupt("the same command does the rounds again") from None
    finally:
        log.removeFilter(is_shown)


def _adopt(again: Path, run: Path) -> None:
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
    """Return the header of a table, and its rows before the first one that does not belong."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = itertools.takewhile(belongs, rows_of(path))
    return b"".join(lines[: 1 + sum(1 for _ in rows)])
