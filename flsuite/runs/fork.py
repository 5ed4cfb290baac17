"""Runs that begin at a moment of another run, under changed settings."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from flsuite.common.arguments import NonNegativeInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import link_or_copy, replace_file
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.record import LIMITS, first_round, kept_rounds, read_settings

log = logging.getLogger("flsuite")

_PRIVATE = {"DPFedAvg", "GaussianMechanism", "DPSGD", "SampleNoise"}
_OF_A_SAMPLE = ("batch_size", "augment", "val_fraction", "seed")
"""Arguments of the data that do not move samples between clients."""
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
                own = load_checkpoint(checkpoint)["settings"]
            return {"fork": own.get("fork"), "forked_from": own.get("forked_from")}
        parent = read_settings(Path(self.run))
        kept = {name: value for name, value in parent.items() if name not in _NOT_OF_THE_PARENT}
        text = json.dumps(kept, sort_keys=True, default=str)
        moment = {"round": self.round, "parent": hashlib.sha256(text.encode()).hexdigest()[:8]}
        return {"fork": moment, "forked_from": self.run}


def is_inherited(checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint in a fork's folder is the parent's: the round picked so far.

    Args:
        checkpoint: The content of the checkpoint. Its settings are the parent's.
        settings: The settings of the fork.
    """
    round = int(checkpoint["federation"]["clock"]["round"])
    is_other_run = checkpoint["settings"].get("fork") != settings.get("fork")
    return is_other_run and round < first_round(settings)


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
        try:
            replace_file(partial(link_or_copy, source), target)
        except FileNotFoundError as error:
            raise FlsuiteError(
                f"{source} is missing; restore the parent's folder, or begin at another round"
            ) from error
