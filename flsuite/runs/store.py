"""The state of a run on disk, from which it continues as if it had never stopped."""

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flsuite.common.errors import FlsuiteError, log, one_line
from flsuite.common.files import link_or_copy, load_tensors, replace_file, replace_tensors
from flsuite.common.state import State, mismatch
from flsuite.federation.server.federation import Federation
from flsuite.runs.checkpoint import (
    BackgroundTask,
    KeptTensors,
    copy_files,
    load_checkpoint,
    load_own_parts,
    publish_checkpoint,
    write_checkpoint,
)
from flsuite.runs.folder import RunFolder
from flsuite.runs.fork import (
    Fork,
    anew,
    forking,
    from_training,
    is_inherited,
    refuse_other_data,
    refuse_other_privacy,
)
from flsuite.runs.hooks import Hooks
from flsuite.runs.record import (
    LIMITS,
    checkpoints_of,
    kept_rounds,
    memories_of,
    round_of,
    versions_in_flight,
)
from flsuite.runs.settings import WEIGHTS, refuse_mismatch, with_contents
from flsuite.runs.summary import RunSummary
from flsuite.runs.table import MetricsTable, mark_of

_FROZEN = "frozen.pt"

# Settings that a resumed run may change.
_MAY_DIFFER = (*LIMITS, "stopping", "forked_from", *WEIGHTS)
_DECIDE_SCORES = ("seed", "model", "data", "batchnorm", "aggregator")  # for a given state


@dataclass(eq=False, repr=False)
class RunStore:
    """Writes a run's checkpoints, and restores them.

    Files are flushed to disk and renamed into place during the next round.

    Args:
        federation: The federation before its first round.
        folder: The folder of the run.
        settings: All settings that determine the result. A resume fills in missing file digests.
        callbacks: The callbacks of the run.
        summary: The scores so far.
        keep_rounds: Rounds between two checkpoints that stay. ``None`` keeps none of them.
        parent: The moment of another run that this one begins at, if any.
    """

    federation: Federation
    folder: RunFolder
    settings: dict[str, Any]
    callbacks: Hooks
    summary: RunSummary
    keep_rounds: int | None
    parent: Fork | None

    def __post_init__(self) -> None:
        # What the checkpoints that stay need: memories of clients, and versions in flight.
        self._needed: dict[str, tuple[dict[int, int], set[int]]] = {}
        self._tensors = KeptTensors()
        self._publishing = BackgroundTask()
        self.settle()

    @property
    def versions_in_flight(self) -> set[int]:
        """Return the versions that clients in flight have started from."""
        in_flight = self.federation.schedule.in_flight
        return {fit.version for fit in in_flight if fit.outcome == "arrived"}

    def settle(self) -> None:
        """Make this round the one to return to if a later round fails."""
        federation = self.federation
        memory = copy.deepcopy(federation.server.memory)
        self._settled = replace(federation.clock), federation.state, memory

    def roll_back(self) -> None:
        """Return to the last settled round, because a half-done round mixes two states."""
        federation = self.federation
        federation.clients.rollback()
        clock, federation.state, memory = self._settled
        federation.clock = replace(clock)
        current = federation.server.memory
        current.clear()
        current.update(memory)

    def create(self) -> None:
        """Write the entries that are never trained. They stay the same for the whole run."""
        federation, checkpoints = self.federation, self.folder.checkpoints
        frozen = {name: federation.initial[name] for name in federation.entries.frozen}
        if checkpoints is not None and frozen:
            checkpoints.mkdir(parents=True, exist_ok=True)
            replace_tensors(frozen, checkpoints / _FROZEN, flush=True)

    def save(self, is_best: bool) -> None:
        """Write the checkpoint of the round just done, and the memories of its clients.

        Args:
            is_best: Whether it is the round picked on validation data so far.

        Raises:
            FlsuiteError: If the checkpoint would not be readable.
        """
        federation, folder = self.federation, self.folder
        clients, versions, round = federation.clients, federation.versions, federation.clock.round
        in_flight = self.versions_in_flight
        self._publishing.wait()  # the previous round's files are replaced next
        written = [*clients.commit(round), *versions.commit(in_flight)]
        sizes = {name: table.append() for name, table in folder.tables.items()}
        self.settle()
        if folder.checkpoints is None:
            return

        content = {
            "settings": self.settings,
            "federation": federation.state_dict(),
            "callbacks": {c.state_key: c.state_dict() for c in self.callbacks.federation},
            "summary": self.summary.state_dict(),
            **sizes,
            "digests": {name: table.digest for name, table in folder.tables.items()},
        }
        path = write_checkpoint(content, folder.checkpoints)
        needed = [*written, *(table.path for table in folder.tables.values() if table.path)]
        others = {"best.ckpt": path} if is_best else {}
        if self.keep_rounds is not None and round % self.keep_rounds == 0:
            name, whole = f"round-{round:06d}.ckpt", content["federation"]
            shared, others[name] = self._tensors.shared(whole, name), path
            if shared is not whole:
                content["federation"] = shared
                others[name] = write_checkpoint(content, folder.checkpoints, name)

        # A kill before the rename leaves the old checkpoint, whose files must still be there.
        now = dict(clients.versions), in_flight
        self._needed |= dict.fromkeys(others, now)
        used, started = zip(now, *self._needed.values(), strict=True)

        def publish() -> None:
            publish_checkpoint(path, others, needed)
            clients.remove_unused(*used)
            versions.remove_unused(set[int]().union(*started))

        self._publishing.start(publish)

    def close(self, must_succeed: bool) -> None:
        """Wait until the last checkpoint is in place.

        Args:
            must_succeed: Raise an error if it fails. Otherwise only log it, because the run has
                already failed with another error.
        """
        try:
            self._publishing.close()
        except Exception as error:
            if must_succeed:
                raise
            log.warning("the last checkpoint was not written: %s", one_line(error))

    def restore(self, checkpoint: Path, to_train: bool) -> dict[str, Any]:
        """Restore the state of a checkpoint, and return the checkpoint's content.

        Args:
            checkpoint: The file.
            to_train: Whether training continues from it. Scoring depends on fewer settings.

        Raises:
            FlsuiteError: If the checkpoint cannot be read, or was written with other settings.
        """
        content = load_checkpoint(checkpoint)
        saved, before = content["settings"], content["federation"]
        self.settings.update(with_contents(self.settings, saved))
        names = {*self.settings, *saved} - {*_MAY_DIFFER} if to_train else {*_DECIDE_SCORES}
        if is_inherited(content, self.settings):
            if to_train:
                round, parent = before["clock"]["round"], self.settings["forked_from"]
                raise FlsuiteError(
                    f"{checkpoint} is round {round} of {parent}, which this run was forked from; "
                    f"to train from there, fork it: flsuite fork {parent} --at {round}"
                )
            # Scores need neither the parent's algorithm nor its training.
            refuse_other_data(self.settings, saved)
            names, before = {"batchnorm"}, {**before, **anew(self.settings, saved)}
        remedy = "start a new run"
        if to_train:
            remedy = forking(self.settings, saved, names, checkpoint, before["clock"]["round"])
        refuse_mismatch(self.settings, saved, checkpoint, names, remedy)
        # Settings may not describe the whole network.
        if fault := mismatch(before["state"], self.federation.state):
            raise FlsuiteError(
                f"the model is not that of {checkpoint}: {fault}; use the run's model, or start a "
                "new run"
            )
        self._load(content, before, checkpoint)
        return content

    def _load(self, content: dict[str, Any], state: dict[str, Any], checkpoint: Path) -> None:
        """Restore a state of the federation, and what else a checkpoint holds."""
        federation = self.federation
        federation.load_state_dict(state)
        if federation.entries.frozen:
            federation.initial |= _frozen(checkpoint.parent / _FROZEN, federation.entries.frozen)
        self.summary.load_state_dict(content["summary"])
        self.settle()
        for callback in self.callbacks.federation:
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])

    def resume(self, checkpoint: Path) -> None:
        """Restore a checkpoint from this run's folder, to continue there.

        Raises:
            FlsuiteError: If it belongs to another run, or :meth:`restore` raises.
        """
        home, own = checkpoint.resolve().parent, self.folder.checkpoints
        if checkpoint.is_file() and (own is None or home != own.resolve()):
            raise FlsuiteError(
                f"{checkpoint} belongs to another run; resume it there, with run_dir {home.parent}"
            )
        content = self.restore(checkpoint, to_train=True)
        if own is not None and checkpoint.name != "last.ckpt":
            # The next round cuts off the rows of later rounds, which another last.ckpt would need.
            replace_file(lambda twin: link_or_copy(checkpoint, twin), own / "last.ckpt")
            best = own / "best.ckpt"
            if best.is_file() and round_of(best) > self.federation.clock.round:
                self._take_best(own.parent)
        self.federation.versions.restore(self.versions_in_flight)
        for name, table in self.folder.tables.items():
            table.resume(*mark_of(content, name))
        for kept in checkpoints_of(self.folder.path) if self.folder.path else ():
            # Later ones belong to rounds that are repeated.
            if kept.stem == "last" or round_of(kept) > self.federation.clock.round:
                continue
            before = load_own_parts(kept)["federation"]
            self._needed[kept.name] = before["clients"], versions_in_flight(before)
            if kept.stem != "best":
                self._tensors.shared(before, kept.name)
        log.info("resumed after round %d from %s", self.federation.clock.round, checkpoint)

    def fork(self) -> None:
        """Begin at the moment of the parent, in the folder of a new run.

        Raises:
            FlsuiteError: If this run cannot begin there.
        """
        if self.parent is None or (path := self.parent.checkpoint) is None:
            return
        content, home = load_checkpoint(path), Path(self.parent.run)
        theirs, federation = content["settings"], self.federation
        refuse_other_data(self.settings, theirs)
        refuse_other_privacy(self.settings, theirs)
        fresh = anew(self.settings, theirs)
        for name in fresh:
            log.info("fork: %s starts anew, because it was another one", name)
        state = {**content["federation"], **fresh}
        if fault := mismatch(state["state"], federation.state):
            raise FlsuiteError(f"trainer.fork: the model is not the parent's: {fault}")
        if self.folder.path is not None:
            copy_files(home, self.folder.path, memories_of(state))
        self._load(content, state, path)
        if "aggregator" in fresh:
            for client in list(federation.clients.versions):
                federation.clients[client] = from_training(federation.clients[client])
        federation.first_round = federation.clock.round + 1
        if self.settings.get("monitor") != theirs.get("monitor"):
            parents = MetricsTable(home / "metrics.csv")
            parents.resume(*mark_of(content, "table"))
            self.summary.pick_again(parents.by_round())
        self._take_best(home)
        federation.versions.restore(self.versions_in_flight)
        for name, table in self.folder.tables.items():
            if table.path is not None:
                size, digest = mark_of(content, name)
                table.path.write_bytes(type(table)(home / table.path.name).content(size, digest))
                table.resume(size, digest)
        log.info("forked from %s after round %d", home, federation.clock.round)

    def _take_best(self, home: Path) -> None:
        """Take the round picked so far from a run's folder, until a later one is better.

        Args:
            home: The folder of the parent, or of this run if it repeats the round of its best.
        """
        best, own = self.summary.best.get("round"), self.folder.checkpoints
        if own is None:
            return
        path = None if best is None else kept_rounds(home).get(int(best))
        if path is None:
            (own / "best.ckpt").unlink(missing_ok=True)
            if best is not None:
                log.warning(
                    "%s has not kept round %d, which validation data picks so far: this run has no "
                    "best.ckpt until a later round is better",
                    home,
                    best,
                )
            return
        content = load_checkpoint(path)
        federation = content["federation"]
        self._needed["best.ckpt"] = federation["clients"], versions_in_flight(federation)
        if home != own.parent:
            copy_files(home, own.parent, memories_of(federation))
        own.mkdir(parents=True, exist_ok=True)
        replace_tensors(content, own / "best.ckpt")


def _frozen(path: Path, names: Collection[str]) -> State:
    """Read the untrained entries that :meth:`RunStore.create` wrote."""
    frozen: State = load_tensors(path, "restore the frozen weights, or start a new run")
    if set(frozen) != set(names):
        raise FlsuiteError(
            f"{path} has {len(frozen)} frozen entries, but the model has {len(names)}; freeze "
            "the same parameters as the run did, or start a new run"
        )
    return frozen
