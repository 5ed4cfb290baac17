"""``flsuite verify``: some rounds of a run done again, and compared with its record."""

import random
import sys
import tempfile
from pathlib import Path

from flsuite.commands.arguments import CommandParser
from flsuite.commands.run_folder import require_run
from flsuite.errors import FederationError, FlsuiteError


def verify(args: list[str]) -> None:
    """Replay some rounds of a run, or of a packed one, and say what differs.

    Raises:
        FederationError: If the record is not what the replay gives.
    """
    parser = CommandParser("verify")
    parser.add_argument("run")
    parser.add_argument("--at", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    request = parser.parse_args(args)
    if request.rounds < 1:
        raise FlsuiteError(f"verify: --rounds must be at least 1, got {request.rounds}")
    with tempfile.TemporaryDirectory(prefix="flsuite-verify-") as folder:
        place = Path(request.run)
        if place.is_file():
            from flsuite.runs.packing import unpack

            place = unpack(place, Path(folder) / "run")
        _verify(require_run("verify", place), Path(folder) / "again", request.at, request.rounds)


def _verify(run: Path, again: Path, at: int | None, rounds: int) -> None:
    from flsuite.commands.main import run_command
    from flsuite.commands.replay import (
        arguments,
        compare,
        environment_differs,
        first_round,
        is_asynchronous,
        is_virtual,
        last_round,
    )
    from flsuite.runs.fork import kept_rounds

    if not is_virtual(run) and is_asynchronous(run):
        raise FlsuiteError(
            f"verify: measured times have decided the order of {run}, and no replay has them "
            "again; set schedule.speeds to Stragglers in runs that others check"
        )
    for name in ("metrics.csv", "timeline.csv"):
        if not (run / name).is_file():
            raise FederationError(f"{run} does not verify: {name} is missing")
    last, first, kept = last_round(run), first_round(run), kept_rounds(run)
    starts = sorted(round for round in {first, *kept} if first <= round < last)
    if not starts:
        raise FlsuiteError(f"verify: {run} has no round of its own to do again")
    if at is not None and at not in starts:
        raise FlsuiteError(f"verify: --at must be one of {starts}, the kept rounds, got {at}")
    start = random.choice(starts) if at is None else at
    stop = min(start + rounds, last)
    print(f"replaying rounds {start + 1} to {stop} of {last}", file=sys.stderr)
    begin = start if start in kept else None
    if run_command("fit", arguments(run, begin, stop, again)):
        raise FederationError(f"{run} does not verify: it cannot be done again, as said above")

    found, other = compare(run, again, start, stop), environment_differs(run)
    what = f"{found.rows} rows and {found.weights} states of rounds {start + 1} to {stop}"
    for line in other:
        print(f"another environment: {line}")
    if not found.faults:
        print(f"verified: {what} are equal, bit for bit")
        return
    for fault in found.faults:
        print(fault)
    raise FederationError(f"{run} does not verify: {_judged(found.largest, bool(other))}")


def _judged(largest: float, is_other: bool) -> str:
    if not is_other:
        return "versions and CPU are those of the record, and the lines above differ"
    return (
        f"weights differ by up to {largest:.2g} of their norm; versions or CPU differ too, and "
        "rounding alone may explain differences up to 0.001"
    )
