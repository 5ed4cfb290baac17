"""Runs that begin at a moment of another run, under changed settings."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flsuite.arguments import NonNegativeInt, Settings
from flsuite.errors import FlsuiteError
from flsuite.files import link_or_copy, load_tensors, read_yaml

log = logging.getLogger("flsuite")

_PRIVATE = {"DPFedAvg", "GaussianMechanism", "DPSGD", "SampleNoise"}
_OF_A_SAMPLE = ("batch_size", "augment", "val_fraction", "seed")
"""Arguments of the data that do not move samples between clients."""
LIMITS = {
    "rounds": "round",
    "max_virtual_seconds": "virtual_s",
    "max_client_updates": "client_updates",
}
"""The limits of a run, and the columns of its table that they limit."""
_NOT_OF_THE_PARENT = (
    *(*LIMITS, "stopping", "forked_from"),
    *("seed", "given_weights", "attackers"),
)
"""Settings that the hash of a parent leaves out. Parents that differ only in their seed have the
same hash."""


@dataclass(eq=False)
class Fork(Settings):
    """The moment of another run that a run begins at.

    Cohorts, batches, noise and speeds are functions of the seed, the round and the client, so
    settings that do not change keep their random draws. A fork without changes ends like its
    parent, bit for bit. The state of an algorithm or a schedule is kept if its classes are the
    parent's. Otherwise it starts anew.

    Args:
        run: The folder of the parent.
        round: The round after which the run begins. 0 is the start of the parent.
    """

    run: str
    round: NonNegativeInt

    @cached_property
    def checkpoint(self) -> Path | None:
        """Return the parent's checkpoint of the round. ``None`` for round 0.

        Raises:
            FlsuiteError: If there is none.
        """
        if self.round == 0:
            return None
        kept = kept_rounds(Path(self.run))
        if self.round not in kept:
            have = ", ".join(map(str, sorted(kept))) or "none"
            raise FlsuiteError(
                f"trainer.fork: {self.run} has no checkpoint of round {self.round} (it has {have})"
                "; flsuite fork makes it by a replay, or set trainer.keep_rounds in the parent"
            )
        return kept[self.round]

    def settings(self, checkpoint: Path | None) -> dict[str, Any]:
        """Return the moment as settings of the run: the round, and a hash of the parent's settings.

        Args:
            checkpoint: The run's own checkpoint, if it is resumed. The parent may then be gone.
        """
        if checkpoint is not None:
            folder = checkpoint.absolute().parent.parent
            if (folder / "settings.yaml").is_file():  # its best.ckpt may be the parent's
                own = read_settings(folder)
            else:
                own = load_tensors(checkpoint, "start a new run")["settings"]
            return {"fork": own.get("fork"), "forked_from": own.get("forked_from")}
        parent = read_settings(Path(self.run))
        kept = {name: value for name, value in parent.items() if name not in _NOT_OF_THE_PARENT}
        text = json.dumps(kept, sort_keys=True, default=str)
        moment = {"round": self.round, "parent": hashlib.sha256(text.encode()).hexdigest()[:8]}
        return {"fork": moment, "forked_from": self.run}


def first_round(settings: Mapping[str, Any]) -> int:
    """Return the first round of a run, from its settings. Earlier ones are its parent's."""
    return int((settings.get("fork") or {"round": 0})["round"]) + 1


def is_inherited(checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint in a fork's folder is the parent's: the round picked so far.

    Args:
        checkpoint: The content of the checkpoint. Its settings are the parent's.
        settings: The settings of the fork.
    """
    round = int(checkpoint["federation"]["clock"]["round"])
    is_other_run = checkpoint["settings"].get("fork") != settings.get("fork")
    return is_other_run and round < first_round(settings)


def may_stop_early(settings: Mapping[str, Any]) -> bool:
    """Return whether a run may end before its limits, from its settings: a callback may stop it."""
    has_limit = any(settings.get(name) is not None for name in LIMITS)
    return bool(settings.get("stopping") or settings.get("callbacks")) or not has_limit


def reached_a_limit(settings: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether a run ends with a row of its ``metrics.csv``, because of one of its limits."""
    limits = ((column, settings.get(name)) for name, column in LIMITS.items())
    return any(limit is not None and float(row[column]) >= limit for column, limit in limits)


def memories_of(federation: Mapping[str, Any]) -> set[str]:
    """Return the files of a run that the state of its federation refers to."""
    clients = {f"clients/round-{round:06d}.pt" for round in federation["clients"].values()}
    return clients | {f"in_flight/version-{n:06d}.pt" for n in versions_in_flight(federation)}


def versions_in_flight(federation: Mapping[str, Any]) -> set[int]:
    """Return the versions that clients in flight had started from."""
    schedule = federation["schedule"] or {}
    fits = schedule.get("schedule", schedule).get("in_flight", [])  # Faults wraps another one
    return {fit["version"] for fit in fits if fit["outcome"] == "arrived"}


def kept_rounds(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their round, also ``last.ckpt`` and ``best.ckpt``."""
    return {round_of(path): path for path in checkpoints_of(run)}


def checkpoints_of(run: Path) -> list[Path]:
    """Return all checkpoints of a run."""
    folder = run / "checkpoints"
    return [
        *sorted(path for path in folder.glob("round-*.ckpt") if path.stem[6:].isdecimal()),
        *(path for name in ("best", "last") if (path := folder / f"{name}.ckpt").is_file()),
    ]


def kept_on_disk(run: Path) -> tuple[int, int]:
    """Return the number of rounds that a run keeps for forks, and their bytes on disk.

    Checkpoints and clients' memories that several rounds share are counted once.
    """
    checkpoints = [path for path in checkpoints_of(run) if path.stem.startswith("round-")]
    files = [*checkpoints, *run.glob("clients/*.pt"), *run.glob("in_flight/*.pt")]
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in (path.stat() for path in files)}
    return len(checkpoints), sum(sizes.values())


def round_of(path: Path) -> int:
    """Return the round of a checkpoint."""
    if path.stem.startswith("round-"):
        return int(path.stem.removeprefix("round-"))
    content: Mapping[str, Any] = load_tensors(path, "restore it or delete it")
    return int(content["federation"]["clock"]["round"])


def read_settings(run: Path) -> dict[str, Any]:
    """Read ``settings.yaml`` of a run: all settings that determine its result.

    Raises:
        FlsuiteError: If the file is missing or does not belong to a run.
    """
    path = run / "settings.yaml"
    if not path.is_file():
        raise FlsuiteError(
            f"{run} has no settings.yaml: it is not the folder of a run; name another one"
        )
    content = read_yaml(path)
    if not isinstance(content, dict) or not _is_seed(content.get("seed")):
        raise FlsuiteError(
            f"{path} does not hold the settings of a run; restore it or leave it out"
        )
    return {str(name): value for name, value in content.items()}


def _is_seed(value: object) -> bool:
    return value is None or (isinstance(value, int) and abs(value) < 1 << 63)


def refuse_other_data(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse a fork whose clients hold other samples than the parent's."""

    def of_clients(settings: Mapping[str, Any]) -> Any:
        data = settings["data"]
        arguments = {k: v for k, v in data["init_args"].items() if k not in _OF_A_SAMPLE}
        seed = data["init_args"].get("seed")
        return data["class_path"], arguments, settings["seed"] if seed is None else seed

    if of_clients(ours) != of_clients(theirs):
        raise FlsuiteError(
            "trainer.fork: the clients must hold the samples of the parent; leave the data and the "
            "seed as they were, or begin at round 0"
        )


def refuse_other_privacy(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse a fork that begins, ends or changes a guarantee of differential privacy.

    Epsilon is counted over all rounds with the same noise, from the same draws.
    """
    names = ("aggregator", "schedule", "callbacks", "data")
    now, then = ({name: s.get(name) for name in names} for s in (ours, theirs))
    kinds = {name.rpartition(".")[2] for name in (*_classes(now), *_classes(then))}
    if kinds & _PRIVATE and (changed := [name for name in names if now[name] != then[name]]):
        raise FlsuiteError(
            "trainer.fork: epsilon counts all rounds with one noise and one way of drawing, but "
            f"{', '.join(changed)} changed; leave it as it was, or begin at round 0"
        )


def anew(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the empty states of an algorithm and a schedule of another class than the parent's.

    Args:
        ours: The settings of the fork.
        theirs: The settings of the parent.
    """
    empty: dict[str, Any] = {"aggregator": {}, "schedule": None}
    return {name: state for name, state in empty.items() if is_other(ours, theirs, name)}


def is_other(ours: Mapping[str, Any], theirs: Mapping[str, Any], part: str) -> bool:
    """Return whether a part of two runs, such as the aggregator, differs in its classes."""
    return [*_classes(ours[part])] != [*_classes(theirs[part])]


def _classes(described: Any) -> Iterator[str]:
    """Yield the classes of a described object and of its arguments."""
    if isinstance(described, Mapping):
        if "class_path" in described:
            yield str(described["class_path"])
        for value in described.values():
            yield from _classes(value)
    elif isinstance(described, list):
        for value in described:
            yield from _classes(value)


def copy_files(parent: Path, own: Path, names: Iterable[str]) -> None:
    """Link or copy files of the parent into the fork's folder. They never change in place."""
    for name in sorted(names):
        source, target = parent / name, own / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            link_or_copy(source, target)
        except FileNotFoundError as error:
            raise FlsuiteError(
                f"{source} is missing; restore the parent's folder, or begin at another round"
            ) from error
