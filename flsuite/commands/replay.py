"""Rounds of a run done again, and compared with what its folder says about them."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flsuite.arguments import PositiveInt, Settings, renamed
from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.errors import FlsuiteError
from flsuite.files import load_tensors, replace_file, save_tensors
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.folder import versions
from flsuite.runs.fork import (
    checkpoints_of,
    copy_files,
    kept_rounds,
    parent_settings,
    round_of,
)
from flsuite.runs.run import Run
from flsuite.runs.settings import differences

WEIGHTS_WITHIN, NUMBERS_WITHIN = 1e-3, 0.02
"""Tolerances on other versions or another kind of CPU: of weights relative to their norm, and of
numbers."""

_OPEN = ("fork", "forked_from", "stopping", "rounds", "max_virtual_seconds", "max_client_updates")
_MOST = 5  # faults that are shown of one kind

Row = Mapping[str, str]


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


@dataclass
class Comparison:
    """What a replay has found.

    Attributes:
        faults: What differs, one line each.
        largest: The largest distance of weights, relative to their norm.
        weights: Number of kept states that were compared.
        rows: Number of rows of the tables that were compared.
    """

    faults: list[str]
    largest: float = 0.0
    weights: int = 0
    rows: int = 0


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
    ]


def compare(run: Path, again: Path, start: int, stop: int) -> Comparison:
    """Compare the rounds after ``start`` up to ``stop`` with their replay.

    Args:
        run: The record.
        again: The folder of the replay, see :func:`arguments`.
        start: The round that the replay began at.
        stop: Its last round.
    """
    found = Comparison([])
    _compare_settings(run, again, found)
    measured = {"wall_s"} if (is_virtual := _is_virtual(run)) else {"wall_s", "virtual_s"}
    for name in ("metrics.csv", "timeline.csv") if is_virtual else ("metrics.csv",):
        _compare_rows(run, again, name, range(start + 1, stop + 1), measured, found)
    ours = kept_rounds(again)
    for path in checkpoints_of(run):
        round = round_of(path)
        if start <= round <= stop and round in ours:
            _compare_states(path, ours[round], round, found)
    return found


def first_round(run: Path) -> int:
    """Return the round that a run began at: 0, or that of its fork."""
    return int((parent_settings(run).get("fork") or {"round": 0})["round"])


def adopt(again: Path, run: Path) -> None:
    """Add the last checkpoint of a replay to the kept ones of its run.

    Args:
        again: The folder of the replay.
        run: The folder of the run.
    """
    content = load_checkpoint(again / "checkpoints" / "last.ckpt")
    round = int(content["federation"]["clock"]["round"])
    # Sizes of the run's own tables: the replay's last round may be scored in more detail.
    content["table"] = _size(run / "metrics.csv", lambda row: int(row["round"]) <= round)
    fits = {row["fit"] for row in _rows(again / "timeline.csv")}
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
    for line, row in zip(lines[1:], _rows(path), strict=True):
        if not belongs(row):
            break
        size += len(line)
    return size


def environment_differs(run: Path) -> list[str]:
    """Return the versions and the kind of CPU that differ from those of the record."""
    path = run / "versions.txt"
    then = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    now = versions().splitlines()
    before = {line.split(" ", 1)[0]: line for line in then}
    return [
        f"{before.get(name, f'{name} unknown')} there, {line.split(' ', 1)[1]} here"
        for line in now
        if (name := line.split(" ", 1)[0]) != "platform" and before.get(name) != line
    ]


def last_round(run: Path) -> int:
    """Return the last round in a run's table.

    Raises:
        FlsuiteError: If it has none.
    """
    rounds = [int(row["round"]) for row in _rows(run / "metrics.csv")]
    if not rounds:
        raise FlsuiteError(f"{run} has no finished round; there is nothing to verify")
    return max(rounds)


def _compare_settings(run: Path, again: Path, found: Comparison) -> None:
    written = parent_settings(run)
    for what, other in (
        ("its config.yaml", parent_settings(again)),
        *((path.name, load_checkpoint(path)["settings"]) for path in checkpoints_of(run)),
    ):
        ours, theirs = (
            {k: v for k, v in settings.items() if k not in _OPEN}
            for settings in (written, renamed(other))
        )
        for name, mine, its in list(differences(ours, theirs))[:_MOST]:
            found.faults.append(f"settings.yaml: {name} is {mine!r}, in {what} {its!r}")


def _compare_rows(
    run: Path, again: Path, name: str, rounds: range, measured: set[str], found: Comparison
) -> None:
    """Compare the rows of some rounds, but for measured columns and numbers.

    The last round of a replay may be scored in more detail.
    """
    key = ("scope", "split", "metric") if name == "metrics.csv" else ("fit",)
    theirs, ours = (_by_key(_rows(path / name), key, rounds) for path in (run, again))
    faults = []
    for place, row in theirs.items():
        other = ours.get(place)
        where = f"{name}, round {place[0]}, {' '.join(place[1:])}"
        if other is None:
            faults.append(f"{where}: the replay has no such row")
        elif (fault := _difference(row, other, measured)) is not None:
            faults.append(f"{where}: {fault}")
    may_be_more = name == "metrics.csv" and rounds[-1] < last_round(run)
    closed = rounds[:-1] if may_be_more else rounds
    missing = [place for place in ours if place not in theirs and int(place[0]) in closed]
    faults += [f"{name}, round {' '.join(place)}: missing in the record" for place in missing]
    found.rows += len(theirs)
    found.faults += faults[:_MOST]
    if len(faults) > _MOST:
        found.faults.append(f"{name}: {len(faults) - _MOST} more rows differ")


def _difference(row: Row, other: Row, measured: set[str]) -> str | None:
    for column in row:
        if column not in measured and row[column] != other.get(column):
            return f"{column} is {row[column]}, in the replay {other.get(column)}"
    return None


def _by_key(rows: Iterator[Row], key: Sequence[str], rounds: range) -> dict[tuple[str, ...], Row]:
    return {
        (row["round"], *(row[name] for name in key)): row
        for row in rows
        if row["round"] and int(row["round"]) in rounds and "seconds" not in row.get("metric", "")
    }


def _rows(path: Path) -> Iterator[Row]:
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)


def _is_virtual(run: Path) -> bool:
    """Return whether the times of a run are those of its virtual clock."""
    schedule = parent_settings(run)["schedule"]
    speeds = schedule.get("init_args", {}).get("speeds")
    is_measured = speeds is None or str(speeds.get("class_path", "")).endswith("Measured")
    return not is_measured or str(schedule["class_path"]).endswith("Asynchronous")


def _compare_states(theirs: Path, ours: Path, round: int, found: Comparison) -> None:
    """Compare all tensors and numbers of two checkpoints, and their clients' memories."""
    a, b = (_state_of(path) for path in (theirs, ours))
    found.weights += 1
    faults = [f"{name} is missing" for name in sorted(a.keys() ^ b.keys())]
    for name in sorted(a.keys() & b.keys()):
        if a[name].shape != b[name].shape:
            faults.append(f"{name} has another shape")
        elif not torch.equal(a[name], b[name]):
            distance = float((a[name].double() - b[name].double()).norm())
            relative = distance / max(float(b[name].double().norm()), 1e-12)
            found.largest = max(found.largest, relative if math.isfinite(relative) else math.inf)
            faults.append(f"{name} differs by {relative:.2g} of its norm")
    found.faults += [f"{theirs.name}, round {round}: {fault}" for fault in faults[:_MOST]]


def _state_of(path: Path) -> dict[str, Tensor]:
    content = load_checkpoint(path)["federation"]
    plain = {name: content[name] for name in ("state", "initial", "aggregator")}
    clients: dict[int, int] = content["clients"]
    folder = path.parent.parent / "clients"
    for round in sorted({*clients.values()}):
        memories = load_tensors(folder / f"round-{round:06d}.pt", "restore the folder clients")
        plain |= {f"client {c}": memories[c] for c, at in clients.items() if at == round}
    return {name: value for name, value in _leaves(plain) if "seconds" not in name}


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and numbers of plain data, with their places."""
    if isinstance(tree, (Mapping, list, tuple)):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (int, float)):
        yield name, torch.tensor(float(tree), dtype=torch.float64)
