"""Rounds of a run done again, and compared with what its folder says about them."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
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

_TIMES = {"virtual_s", "started_s", "ended_s", "merged_s"}
_OF_AN_END = (
    *("accuracy/", "all_clients/", "adapted/", "unseen"),
    *("probe_", "detection/", "forest/", "realigned_"),
)
"""Beginnings of scores that only a run's last round has, also of a run that was extended later."""
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


def compare(run: Path, again: Path, start: int, stop: int) -> Comparison:
    """Compare the rounds after ``start`` up to ``stop`` with their replay.

    Args:
        run: The record.
        again: The folder of the replay, see :func:`arguments`.
        start: The round that the replay began at.
        stop: Its last round.
    """
    found, rounds = Comparison([]), range(start + 1, stop + 1)
    _compare_settings(run, again, found)
    measured = {"wall_s"} | (set() if is_virtual(run) else _TIMES)
    for name in ("metrics.csv", "timeline.csv"):
        _compare_rows(run, again, name, rounds, measured, found)
    for name in ("partition.csv", "tasks.csv", "attackers.json"):
        if _content(run / name) != _content(again / name):
            found.faults.append(f"{name} is not what the settings give")
    if is_finished(run) and (fault := _of_the_model(run)) is not None:
        found.faults.append(fault)
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
    table = run / "metrics.csv"
    content["table"] = _size(table, lambda row: _number(table, row) <= round)
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
    path = run / "metrics.csv"
    rounds = [_number(path, row) for row in _rows(path)]
    if not rounds:
        raise FlsuiteError(f"{run} has no finished round; there is nothing to verify")
    return max(rounds)


def is_finished(run: Path) -> bool:
    """Return whether a run has come to its end, rather than being killed on the way there."""
    last, rounds = last_round(run), parent_settings(run).get("rounds")
    ends = (row["metric"] for row in _rows(run / "metrics.csv") if row["round"] == str(last))
    return (rounds is not None and last >= rounds) or any(m.startswith(_OF_AN_END) for m in ends)


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
    faults: list[str] = []
    theirs, ours = (_by_key(path / name, key, rounds, faults) for path in (run, again))
    for place, row in theirs.items():
        other, where = ours.get(place), f"{name}, round {place[0]}, {' '.join(place[1:])}"
        if other is None and not _is_of_an_end(place):
            faults.append(f"{where}: the replay has no such row")
        elif other is not None and (fault := _difference(row, other, measured)) is not None:
            faults.append(f"{where}: {fault}")
    is_end = rounds[-1] == last_round(run) and is_finished(run)
    may_be_more = name == "metrics.csv" and not is_end
    closed = rounds[:-1] if may_be_more else rounds
    missing = [place for place in ours if place not in theirs and int(place[0]) in closed]
    faults += [f"{name}, round {' '.join(place)}: missing in the record" for place in missing]
    found.rows += len(theirs)
    found.faults += faults[:_MOST]
    if len(faults) > _MOST:
        found.faults.append(f"{name}: {len(faults) - _MOST} more rows differ")


def _is_of_an_end(place: tuple[str, ...]) -> bool:
    """Return whether a score belongs to the end of a run, which may have been extended since."""
    return place[-1].startswith(_OF_AN_END)


def _difference(row: Row, other: Row, measured: set[str]) -> str | None:
    if row.keys() != other.keys():
        return f"columns are {', '.join(row)}, in the replay {', '.join(other)}"
    for column in row:
        if column not in measured and row[column] != other[column]:
            return f"{column} is {row[column]}, in the replay {other[column]}"
    return None


def _by_key(
    path: Path, key: Sequence[str], rounds: range, faults: list[str]
) -> dict[tuple[str, ...], Row]:
    """Return the rows of some rounds by their key. A key that occurs twice is a fault."""
    found: dict[tuple[str, ...], Row] = {}
    for row in _rows(path):
        if row["round"] and _number(path, row) not in rounds:
            continue
        if not row["round"] or "seconds" in row.get("metric", ""):
            continue
        place = (row["round"], *(row.get(name) or "" for name in key))
        if place in found:
            faults.append(f"{path.name}, round {' '.join(place)}: occurs twice")
        found[place] = row
    return found


def _number(path: Path, row: Row) -> int:
    """Return the round of a row.

    Raises:
        FlsuiteError: If it is not a number of at least 1.
    """
    if not str(row["round"]).isdecimal() or int(row["round"]) < 1:
        raise FlsuiteError(f"{path} has a row of round {row['round']!r}; restore the file")
    return int(row["round"])


def _rows(path: Path) -> Iterator[Row]:
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _of_the_model(run: Path) -> str | None:
    """Return what is wrong with ``model.ckpt``, the global model after the last round."""
    path, last = run / "checkpoints" / "model.ckpt", run / "checkpoints" / "last.ckpt"
    if not path.is_file() or not last.is_file():
        return None
    exported = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    federation = load_checkpoint(last)["federation"]
    for name, value in {**federation["initial"], **federation["state"]}.items():
        if name in exported and not torch.equal(exported[name], value):
            return f"model.ckpt: {name} is not that of last.ckpt"
    return None


def is_virtual(run: Path) -> bool:
    """Return whether the times of a run are those of its virtual clock."""
    schedule = parent_settings(run)["schedule"]
    while "schedule" in schedule.get("init_args", {}):  # Faults wraps another one
        schedule = schedule["init_args"]["schedule"]
    speeds = schedule.get("init_args", {}).get("speeds")
    if speeds is None:
        return is_asynchronous(run)  # whose default is a virtual clock
    return not str(speeds.get("class_path", "")).endswith("Measured")


def is_asynchronous(run: Path) -> bool:
    """Return whether a run has no rounds."""
    return "Asynchronous" in str(parent_settings(run)["schedule"])


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
    plain = {name: content[name] for name in ("state", "initial", "aggregator", "clock")}
    if is_virtual(path.parent.parent):
        plain["schedule"] = content["schedule"]
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
