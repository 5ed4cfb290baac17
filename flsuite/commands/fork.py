"""``flsuite fork``: a run that begins at a moment of another run, under changed settings."""

import shutil
import sys
from pathlib import Path

from flsuite.commands.fit import build
from flsuite.commands.main import dispatch
from flsuite.commands.parsers import parser_of
from flsuite.commands.replay import adopt, engine_of, replay
from flsuite.commands.run_folder import require_run
from flsuite.common.errors import FlsuiteError
from flsuite.runs.folder import RunFolder
from flsuite.runs.record import kept_rounds, last_round, read_settings, start_round


def fork(args: list[str]) -> None:
    """Run the fork. If its round was not kept, replay the parent up to it first."""
    own, rest = parser_of("fork").parse_known_args(args)
    parent = require_run("fork", Path(own.run))
    if own.at < 0:
        raise FlsuiteError(f"fork: --at must be a round, 0 or above, got {own.at}")

    gone = sorted({*own.without, *(read_settings(parent).get("without") or ())})
    without = ["--trainer.without", str(gone)] if gone else []
    config = ["--config", str(parent / "config.yaml")]
    moment = ["--trainer.fork.run", str(parent), "--trainer.fork.round", str(own.at)]
    changes = [*engine_of(parent), *without, *rest]
    if _must_replay(parent, own.at):
        trainer, model, data = build([*config, *changes])
        trainer.prepare(model, data)  # a wrong key or client is refused before the replay
        folder = RunFolder(parent)
        with folder.locked():  # a running parent would remove the replay's files
            folder.require_tables()  # the kept round takes them over
            _keep(parent, own.at)
    dispatch("fit", [*config, *moment, *changes])


def _must_replay(parent: Path, at: int) -> bool:
    """Return whether the parent has no checkpoint of a round.

    Raises:
        FlsuiteError: If no replay can make one.
    """
    first = start_round(parent)
    if at in kept_rounds(parent) or at == 0:
        return False
    if at <= first:
        raise FlsuiteError(
            f"fork: {parent} is a fork that begins at round {first}; fork its parent, "
            f"{read_settings(parent)['forked_from']}"
        )
    if at > (last := last_round(parent)):
        raise FlsuiteError(f"fork: {parent} has {last} rounds; give --at up to {last}")
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
        adopt(again, parent)
    finally:
        shutil.rmtree(again, ignore_errors=True)
