"""Runs that begin with another run: at a moment of it, or with its clients' trained models."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flsuite.aggregators.attacks.base import Attack
from flsuite.common.arguments import NonNegativeInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import load_tensors, make_folder, replace_tensors, short_hash
from flsuite.common.messages import ClientResult, FitRequest, TrainedFit
from flsuite.common.state import leaves, plain
from flsuite.federation.server.federation import Federation
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.folder import RunFolder
from flsuite.runs.record import LIMITS, first_round, kept_rounds, read_settings
from flsuite.runs.settings import WEIGHTS, differences, refuse_mismatch

UPDATES = "updates"
"""Subfolder of a run with its clients' trained models."""

DECIDE_TRAINING = (
    "seed",
    "model",
    *WEIGHTS,
    "data",
    "client",
    "callbacks",
    "lr_decay",
    "batchnorm",
    "keep_optimizers",
    "channels_last",
)
"""Settings that determine the result of local training in the first round."""

_PRIVATE = {"DPFedAvg", "GaussianMechanism", "DPSGD", "SampleNoise"}
_NOT_TO_FORK = ("data", "seed", "attackers", "callbacks", *WEIGHTS)
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
        moment = {"round": self.round, "parent": short_hash(kept)}
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
        described = {"class_path": data["class_path"], "init_args": arguments}
        return {"data": described, "seed": settings["seed"] if seed is None else seed}

    for name, now, then in differences(of_clients(ours), of_clients(theirs)):
        raise FlsuiteError(
            "trainer.fork: the clients must hold the samples of the parent, but "
            f"{name} is {now!r} here and {then!r} there; leave the data and the seed as they were, "
            "or begin at round 0"
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
    return {
        name: state
        for name, state in empty.items()
        if _classes(ours[name]) != _classes(theirs[name])
    }


def from_training(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a client's memory that come from training, whatever the algorithm."""
    return {name: part for name, part in memory.items() if name in ("model", "optimizers")}


def _classes(described: Any) -> list[str]:
    """Return the classes of a described object and of its arguments."""
    places = leaves(described)
    return [str(leaf) for place, leaf in places if place.split(".")[-1] == "class_path"]


def forking(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    names: Iterable[str],
    checkpoint: Path,
    round: int,
) -> str:
    """Return the advice to fork a run, with the command that continues it with other settings.

    The arguments are those of :func:`~flsuite.runs.settings.refuse_mismatch`.

    Args:
        ours: The wanted settings.
        theirs: Those of the run.
        names: The settings that are compared.
        checkpoint: The checkpoint of the run.
        round: Its round.
    """
    ours, theirs = ({name: side.get(name) for name in names} for side in (ours, theirs))
    options = []
    differing = list(differences(ours, theirs))
    classes = {name for name, *_ in differing}
    for name, now, _ in differing:
        first, _, rest = name.partition(".")
        if now is None and name.rpartition(".")[0] in classes:
            continue  # an argument of the other class
        if first in _NOT_TO_FORK or isinstance(now, (list, Mapping)):
            return "start a new run"
        key = name if first == "model" else f"trainer.{rest if first == 'client' else name}"
        value = "null" if now is None else str(now).lower() if isinstance(now, bool) else str(now)
        options.append(f"--{key} {shlex.quote(value)}")
    run = shlex.quote(str(checkpoint.parent.parent))
    return f"fork it: flsuite fork {run} --at {round} {' '.join(options)}"


@dataclass(frozen=True)
class UpdateStore:
    """Stores one file per fit: ``round-0001/client-00003.pt``.

    Args:
        folder: Folder of the files.
    """

    folder: Path

    def write(self, result: ClientResult) -> None:
        """Store the result of a client's training, unless one from the same version is stored."""
        update, memory = result.update, result.memory
        path = self._path(update.round, update.client)
        if path.exists():  # without rounds, a client may train from one version several times
            return
        content = {
            "state": update.state,
            "memory": from_training(memory),
            "steps": update.steps,
            "metrics": result.training,
            "epochs": result.epochs,
            "seconds": update.seconds - update.metrics.get("after_fit_seconds", 0.0),
        }
        make_folder(path.parent)
        replace_tensors(plain(content, f"the update of client {update.client}"), path)

    def clients(self, round: int) -> list[int]:
        """Return the clients whose results of a round are stored, in order."""
        paths = self._path(round, 0).parent.glob("client-*.pt")
        return sorted(int(path.stem.removeprefix("client-")) for path in paths)

    def read(self, round: int, client: int) -> TrainedFit | None:
        """Return the result of a client's training, or ``None`` if it was not stored.

        Raises:
            FlsuiteError: If the file is damaged, or another kind of file.
            OSError: If the file cannot be opened.
        """
        path = self._path(round, client)
        if not path.exists():
            return None
        remedy = "delete it, so that the client trains again"
        try:
            return TrainedFit(**load_tensors(path, remedy))
        except TypeError as error:  # other fields
            raise FlsuiteError(
                f"{path} cannot be read: it is not a client's trained model; {remedy}"
            ) from error

    def with_trained(self, request: FitRequest) -> FitRequest:
        """Return the request, with the result of the same fit if it is stored."""
        return replace(request, trained=self.read(request.broadcast.round, request.client))

    def _path(self, round: int, client: int) -> Path:
        return self.folder / f"round-{round:04d}" / f"client-{client:05d}.pt"


class Reuse:
    """Keeps a run's trained client models, and reads the models of another run to start from.

    Args:
        federation: The federation before its first round.
        folder: The folder of the run.
        keep: Whether the run keeps its clients' models.
        source: Folder of the other run. It is read just before the first round.
        attack: The attack on the run, if any.

    Attributes:
        kept: The store of this run's models, if they are kept.
        source: Folder of the other run, if there is one.
        trained: The models of the other run, once they are read. They replace training in the first
            round.

    Raises:
        FlsuiteError: If the algorithm changes local training, or nothing is written.
    """

    def __init__(
        self,
        federation: Federation,
        folder: RunFolder,
        keep: bool,
        source: str | None,
        attack: Attack | None,
    ) -> None:
        self.source = None if source is None else Path(source)
        self.trained: UpdateStore | None = None
        self.kept = UpdateStore(folder.path / UPDATES) if keep and folder.path else None
        _require_plain_training(federation)
        if attack is not None:
            raise FlsuiteError(
                "keep_updates and from_updates need models as clients train them, but "
                "trainer.attack changes them; leave out one of these"
            )
        uplink = federation.uplink
        if keep and (uplink.masks or uplink.pipeline.transforms):
            raise FlsuiteError(
                "keep_updates stores the clients' models unchanged, but a transform or secure_sum "
                "changes what the server receives; set trainer.keep_updates to false"
            )
        if keep and self.kept is None:
            raise FlsuiteError(
                "keep_updates needs the run's folder, but this run writes none; set "
                "trainer.enable_checkpointing to true, or trainer.keep_updates to false"
            )

    def read(self, settings: Mapping[str, Any]) -> None:
        """Find the trained models of the other run, if there is one.

        Args:
            settings: Settings of the run that will start from them.

        Raises:
            FlsuiteError: If the other run has kept none, or its clients train differently.
        """
        if self.source is not None:
            self.trained = trained_updates(self.source, settings)

    def with_trained(self, request: FitRequest) -> FitRequest:
        """Return the request, with the result of the same fit in the other run if there is one."""
        # Later rounds start from the model of this run.
        if self.trained is None or request.broadcast.round > 1 or request.repeat:
            return request
        return self.trained.with_trained(request)


def trained_updates(run_dir: Path, settings: Mapping[str, Any]) -> UpdateStore:
    """Return the trained models of a run.

    Args:
        run_dir: The folder of the run.
        settings: Settings of the run that will start from them.

    Raises:
        FlsuiteError: If the run has kept none, or its clients train differently.
    """
    if not (run_dir / "settings.yaml").is_file():
        raise FlsuiteError(f"from_updates: {run_dir} is not the folder of a run")
    if not (run_dir / UPDATES).is_dir():
        raise FlsuiteError(
            f"from_updates: {run_dir} has not kept its clients' models; fit it with "
            "--trainer.keep_updates true, or delete the folder if a sweep made it, which then fits "
            "it again"
        )
    refuse_mismatch(settings, read_settings(run_dir), run_dir, DECIDE_TRAINING)
    return UpdateStore(run_dir / UPDATES)


def _require_plain_training(federation: Federation) -> None:
    """Refuse an algorithm that changes local training."""
    aggregator = federation.aggregator
    if aggregator.pools or aggregator.private:
        fault = "does not train one model per client, so there are none to reuse"
    elif not aggregator.halves.trains_plainly:
        fault = "changes how clients train, so other aggregators cannot reuse their models"
    else:
        return
    raise FlsuiteError(
        f"{aggregator.name} {fault}; set trainer.keep_updates to false, and leave out "
        "from_updates; in a sweep, leave out this method, or name another one in updates_from"
    )
