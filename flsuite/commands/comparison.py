"""A replay compared with the record of its run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.files import load_tensors, number_in
from flsuite.common.state import leaves
from flsuite.models.classifier import read_weights
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.folder import TOGETHER, RunFolder, versions
from flsuite.runs.fork import is_inherited
from flsuite.runs.record import (
    LIMITS,
    Row,
    checkpoints_of,
    ends,
    is_finished,
    is_virtual,
    kept_rounds,
    read_settings,
    round_of,
    round_of_row,
    rows_of,
)
from flsuite.runs.settings import differences

_TIMES = {"virtual_s", "started_s", "ended_s", "merged_s"}
_OPEN = ("fork", "forked_from", "stopping", *LIMITS)

# Tolerances in another environment (versions, threads or CPU).
WEIGHTS = 1e-3  # of the distance between two tensors, relative to their norm
NUMBERS = 1e-2  # of the difference between two scores, absolute or relative


class Mismatch(NamedTuple):
    """A difference between a record and its replay.

    Attributes:
        line: What differs.
        excess: Its size as a multiple of the tolerance. Default: no tolerance covers it.
    """

    line: str
    excess: float = math.inf


@dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        faults: What differs.
        largest: The largest distance of weights, relative to their norm.
        weights: Number of kept states that were compared.
        rows: Number of rows of the tables that were compared.
    """

    faults: list[Mismatch] = field(default_factory=list)
    largest: float = 0.0
    weights: int = 0
    rows: int = 0


def compare(run: Path, again: Path, start: int, stop: int) -> Comparison:
    """Compare the rounds after ``start`` up to ``stop`` with their replay.

    Args:
        run: The record.
        again: The folder of the replay, see :func:`~flsuite.commands.fork.replay`.
        start: The round after which the replay began.
        stop: Its last round.
    """
    found, rounds = Comparison(), range(start + 1, stop + 1)
    found.faults += map(Mismatch, _other_settings(run, again))
    found.faults += map(Mismatch, _changed_tables(run))
    measured = {"wall_s"} | (set() if is_virtual(run) else _TIMES)
    for name in ("metrics.csv", "timeline.csv"):
        _compare_rows(run, again, name, rounds, measured, found)
    for name in ("partition.csv", "tasks.csv", "attackers.json"):
        if _content(run / name) != _content(again / name):
            found.faults.append(Mismatch(f"{name} is not what the settings give"))
    if is_finished(run) and (line := _fault_of_model(run)) is not None:
        found.faults.append(Mismatch(line))
    ours = kept_rounds(again)
    for path in checkpoints_of(run):
        round = round_of(path)
        if start <= round <= stop and round in ours:
            _compare_states(path, ours[round], round, found)
    return found


def environment_differences(run: Path) -> list[str]:
    """Return the versions, threads and kind of CPU that differ from the record.

    A run that trained together with others is done again alone.
    """
    path = run / "versions.txt"
    then = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    now = versions().splitlines()
    before = {line.split(" ", 1)[0]: line for line in then}
    others = [f"{before[TOGETHER]} there, alone here"] if TOGETHER in before else []
    return others + [
        f"{before.get(name, f'{name} unknown')} there, {line.split(' ', 1)[1]} here"
        for line in now
        if (name := line.split(" ", 1)[0]) != "platform" and before.get(name) != line
    ]


def _other_settings(run: Path, again: Path) -> Iterator[str]:
    written = read_settings(run)
    read = ((path.name, load_checkpoint(path)) for path in checkpoints_of(run))
    for what, other in (
        ("its config.yaml", read_settings(again)),
        *((name, one["settings"]) for name, one in read if not is_inherited(one, written)),
    ):
        ours, theirs = (
            {k: v for k, v in settings.items() if k not in _OPEN} for settings in (written, other)
        )
        for name, mine, its in differences(ours, theirs):
            yield f"settings.yaml: {name} is {mine!r}, in {what} {its!r}"


def _changed_tables(run: Path) -> Iterator[str]:
    """Yield a table that was changed after the last checkpoint, in any round."""
    try:
        RunFolder(run).require_tables()
    except FlsuiteError as error:
        yield str(error).partition("; ")[0]


def _compare_rows(
    run: Path, again: Path, name: str, rounds: range, measured: set[str], found: Comparison
) -> None:
    """Compare the rows of some rounds, without measured columns and numbers."""
    key = ("scope", "split", "metric") if name == "metrics.csv" else ("fit",)
    theirs, ours = (_by_key(path / name, key, rounds, found) for path in (run, again))
    for place, row in theirs.items():
        where = f"{name}, round {place[0]}, {' '.join(place[1:])}"
        if place not in ours:
            found.faults.append(Mismatch(f"{where}: the replay has no such row"))
        elif (fault := _difference(row, ours[place], measured)) is not None:
            found.faults.append(fault._replace(line=f"{where}: {fault.line}"))
    # The last round of a replay is an end, and has scores that the run may lack in that round.
    may_be_more = name == "metrics.csv" and rounds[-1] not in ends(run)
    closed = rounds[:-1] if may_be_more else rounds
    found.faults += [
        Mismatch(f"{name}, round {' '.join(place)}: missing in the record")
        for place in ours
        if place not in theirs and int(place[0]) in closed
    ]
    found.rows += len(theirs)


def _difference(row: Row, other: Row, measured: set[str]) -> Mismatch | None:
    if row.keys() != other.keys():
        return Mismatch(f"columns are {', '.join(row)}, in the replay {', '.join(other)}")
    different = [c for c in row if c not in measured and row[c] != other[c]]
    if not different:
        return None
    column = different[0]
    excess = _excess(row["value"], other["value"]) if different == ["value"] else math.inf
    return Mismatch(f"{column} is {row[column]}, in the replay {other[column]}", excess)


def _excess(ours: str, theirs: str) -> float:
    """Return the distance of two numbers as a multiple of their tolerance."""
    a, b = number_in(ours), number_in(theirs)
    if a is None or b is None:
        return math.inf
    excess = abs(a - b) / max(abs(b), 1.0) / NUMBERS
    return excess if math.isfinite(excess) else math.inf


def _by_key(
    path: Path, key: Sequence[str], rounds: range, found: Comparison
) -> dict[tuple[str, ...], Row]:
    """Return the rows of some rounds by their key. A key that occurs twice is a fault."""
    named: dict[tuple[str, ...], Row] = {}
    for row in rows_of(path):
        is_in_rounds = row["round"] and round_of_row(path, row) in rounds
        if not is_in_rounds or "seconds" in row.get("metric", ""):
            continue
        place = (row["round"], *(row.get(name) or "" for name in key))
        if place in named:
            found.faults.append(Mismatch(f"{path.name}, round {' '.join(place)}: occurs twice"))
        named[place] = row
    return named


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _fault_of_model(run: Path) -> str | None:
    """Return what is wrong with ``model.ckpt``, the global model after the last round."""
    path, last = run / "checkpoints" / "model.ckpt", run / "checkpoints" / "last.ckpt"
    if not path.is_file():
        return f"model.ckpt is missing; flsuite resume {run} writes it again"
    exported = read_weights(str(path))
    federation = load_checkpoint(last)["federation"]
    for name, value in {**federation["initial"], **federation["state"]}.items():
        if name in exported and not torch.equal(exported[name], value):
            return f"model.ckpt: {name} is not that of last.ckpt"
    return None


def _compare_states(theirs: Path, ours: Path, round: int, found: Comparison) -> None:
    """Compare all tensors and numbers of two checkpoints, including their clients' memories."""
    a, b = (_state_of(path) for path in (theirs, ours))
    where = f"{theirs.name}, round {round}"
    found.weights += 1
    found.faults += [
        Mismatch(f"{where}: {name} is missing") for name in sorted(a.keys() ^ b.keys())
    ]
    for name in sorted(a.keys() & b.keys()):
        if a[name].shape != b[name].shape:
            found.faults.append(Mismatch(f"{where}: {name} has another shape"))
        elif not torch.equal(a[name], b[name]):
            distance = float((a[name].double() - b[name].double()).norm())
            relative = distance / max(float(b[name].double().norm()), 1e-12)
            relative = relative if math.isfinite(relative) else math.inf
            found.largest = max(found.largest, relative)
            line = f"{where}: {name} differs by {relative:.2g} of its norm"
            found.faults.append(Mismatch(line, relative / WEIGHTS))


def _state_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors and numbers of a checkpoint by their places."""
    content = load_checkpoint(path)["federation"]
    plain = {name: content[name] for name in ("state", "initial", "aggregator", "clock")}
    if is_virtual(path.parent.parent):
        plain["schedule"] = content["schedule"]
    clients: dict[int, int] = content["clients"]
    folder = path.parent.parent / "clients"
    for round in sorted({*clients.values()}):
        memories = load_tensors(folder / f"round-{round:06d}.pt", "restore the folder clients")
        plain |= {f"client {c}": memories[c] for c, at in clients.items() if at == round}
    return {
        name: leaf if isinstance(leaf, Tensor) else torch.tensor(float(leaf), dtype=torch.float64)
        for name, leaf in leaves(plain)
        if isinstance(leaf, (Tensor, int, float)) and "seconds" not in name
    }
