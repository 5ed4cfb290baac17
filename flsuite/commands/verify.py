"""``flsuite verify``: some rounds of a run done again, and compared with its record."""

import errno
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsuite.commands.pack import unpack
from flsuite.commands.parsers import parser_of
from flsuite.commands.request import require_run
from flsuite.common.arguments import PositiveInt, require
from flsuite.common.errors import FederationError, FlsuiteError, one_line
from flsuite.common.files import locked
from flsuite.runs.record import (
    is_asynchronous,
    is_virtual,
    kept_rounds,
    last_round,
    start_round,
    table_fault,
)

if TYPE_CHECKING:
    from flsuite.commands.comparison import Comparison, Mismatch

_MOST = 5  # differences of a file that are shown
_PREFIX = "flsuite-verify-"
_NEW = 60.0  # seconds


def verify(args: list[str]) -> dict[str, Any]:
    """Replay some rounds of a run or of a packed run, and print the differences.

    Returns:
        What was compared and the verdict, for other programs.

    Raises:
        FederationError: If the record differs from the replay. It has the same result.
    """
    request = parser_of("verify").parse_args(args)
    require("verify", PositiveInt | None, **{"--rounds": request.rounds})
    place = Path(request.run)
    with _workplace() as folder, ExitStack() as stack:
        if is_pack := place.is_file():
            place = unpack(place, folder / "run")
        run = require_run("verify", place)
        if is_pack and not request.trust:
            from flsuite.commands.foreign import only_known_classes

            stack.enter_context(only_known_classes(run / "config.yaml"))
        return _verify(run, folder / "again", request.at, request.rounds)


@contextmanager
def _workplace() -> Iterator[Path]:
    """Yield a temporary folder, and remove those that killed processes have left.

    Raises:
        FlsuiteError: If a disk is full or cannot be used. That says nothing about the record.
    """
    try:
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another user's, or another process has removed it
                _remove_left(path)
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, locked(Path(name)):
            yield Path(name)
    except OSError as error:
        raise _no_verdict(error) from error


def _no_verdict(error: OSError) -> FlsuiteError:
    """Return the error of a disk, which says nothing about the record, as one line."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = f"; free some space in {tempfile.gettempdir()}, or set TMPDIR" if is_full else ""
    return FlsuiteError(f"verify: nothing was compared: {one_line(error)}{hint}")


def _remove_left(path: Path) -> None:
    """Remove a folder that no process works in. A new one is not locked for a moment."""
    is_old = time.time() - path.stat().st_mtime >= _NEW
    if is_old and not path.is_symlink():
        with locked(path) as is_ours:
            if is_ours:
                shutil.rmtree(path, ignore_errors=True)


def _verify(run: Path, again: Path, at: int | None, rounds: int) -> dict[str, Any]:
    from flsuite.commands.comparison import compare, environment_differences
    from flsuite.commands.fit import build
    from flsuite.commands.fork import QUIET, repetition, replay, require_same_files

    _require_replayable(run)
    last, starts = last_round(run), _starts(run)
    if at is not None and at not in starts:
        raise FlsuiteError(f"verify: --at must be one of {starts}, got {at}")
    start = random.choice(starts) if at is None else at
    stop = min(start + rounds, last)
    trainer, _, data = build(repetition(run, None, *QUIET))
    require_same_files("verify", run, trainer, data)
    print(f"replaying rounds {start + 1} to {stop} of {last}", file=sys.stderr)
    try:
        replay(run, start, stop, again)
    except FederationError as error:
        if isinstance(error.__cause__, OSError):
            raise _no_verdict(error.__cause__) from error
        raise FederationError(
            f"{run} does not verify: it cannot be done again: {one_line(error)}"
        ) from error

    found, other = compare(run, again, start, stop), environment_differences(run)
    states = f" and {found.weights} states" if found.weights else ""
    what = f"{found.rows} rows{states} of rounds {start + 1} to {stop}"
    later = [round for round in sorted(kept_rounds(run)) if round > start]
    if later and later[0] > stop:
        how = f"--at {start} --rounds {later[0] - start}"
        print(f"no weights were kept in these rounds; {how} compares those of round {later[0]}")
    for line in other:
        print(f"another environment: {line}")
    result = {
        "run": run,
        "rounds": [start + 1, stop],
        "rows": found.rows,
        "states": found.weights,
        "verdict": "equal",
        "differences": [fault.line for fault in found.faults],
        "largest": found.largest,
        "environment": other,
    }
    if not found.faults:
        print(f"verified: {what} are equal, bit for bit")
        return result
    _print(found.faults)
    verdict = _judged(found, bool(other))
    if not other or any(fault.excess > 1 for fault in found.faults):
        refusal = FederationError(f"{run} does not verify: {verdict}")
        refusal.result = result | {"verdict": "different"}
        raise refusal
    print(f"verified within the tolerance: {what}; {verdict}")
    return result | {"verdict": "within the tolerance"}


def _require_replayable(run: Path) -> None:
    """Refuse a run that no replay can repeat.

    Raises:
        FlsuiteError: If measured times have decided its order.
        FederationError: If a table is missing or cut off, or the last checkpoint is missing.
    """
    if not is_virtual(run) and is_asynchronous(run):
        raise FlsuiteError(
            f"verify: measured times have decided the order of {run}, and no replay has them "
            "again; set schedule.speeds to Stragglers in runs that others check"
        )
    last = run / "checkpoints" / "last.ckpt"
    if fault := table_fault(run) or (None if last.is_file() else f"{last.name} is missing"):
        raise FederationError(f"{run} does not verify: {fault}")


def _starts(run: Path) -> list[int]:
    """Return the rounds that a replay can begin after.

    Raises:
        FlsuiteError: If there is none.
    """
    first, last = start_round(run), last_round(run)
    starts = sorted(round for round in {first, *kept_rounds(run)} if first <= round < last)
    if not starts:
        raise FlsuiteError(f"verify: {run} has no round of its own to do again")
    return starts


def _print(faults: "list[Mismatch]") -> None:
    """Print the first differences of each file."""
    for _, group in groupby(faults, key=lambda fault: re.split("[,:]", fault.line)[0]):
        lines = [fault.line for fault in group]
        print("\n".join(lines[:_MOST]))
        if len(lines) > _MOST:
            print(f"... and {len(lines) - _MOST} more")


def _judged(found: "Comparison", is_other: bool) -> str:
    from flsuite.commands.comparison import NUMBERS, WEIGHTS

    if not is_other:
        return "versions, threads and CPU are those of the record, and the lines above differ"
    return (
        f"weights differ by up to {found.largest:.2g} of their norm; where versions, threads or "
        f"CPU are others, {WEIGHTS:g} is allowed, {NUMBERS:g} for a score, and nothing else differs"
    )
