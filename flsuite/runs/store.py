"""A run on disk: the checkpoint of each round, and the way back to it."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flsuite.arguments import renamed
from flsuite.errors import FlsuiteError, one_line
from flsuite.files import BackgroundTask
from flsuite.runs.checkpoint import (
    load_checkpoint,
    publish_checkpoint,
    read_frozen,
    refuse_mismatch,
    write_checkpoint,
    write_frozen,
)
from flsuite.runs.folder import RunFolder
from flsuite.runs.hooks import Hooks
from flsuite.runs.settings import WEIGHTS, with_contents, without_derived
from flsuite.runs.summary import RunSummary
from flsuite.server.federation import Federation

log = logging.getLogger("flsuite")

# Settings that a resumed run may change.
_MAY_DIFFER = ("rounds", "max_virtual_seconds", "max_client_updates", "stopping", *WEIGHTS)
_DECIDE_SCORES = ("seed", "model", "data", "batchnorm", "aggregator")  # of a given state


class StoredRun(Protocol):
    """The part of a :class:`~flsuite.runs.run.Run` that is stored and restored."""

    federation: Federation
    folder: RunFolder
    settings: dict[str, Any]
    callbacks: Hooks
    summary: RunSummary


class RunStore:
    """Writes a run's checkpoints, and takes the run back to one of them.

    Files are flushed to disk and put into place while the next round goes on.

    Args:
        run: The run, before its first round.
    """

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self._best_clients: dict[int, int] = {}
        self._publishing = BackgroundTask()
        self.settle()

    @property
    def versions_in_flight(self) -> set[int]:
        """Return the versions that clients in flight have started from."""
        in_flight = self.run.federation.schedule.in_flight
        return {fit.version for fit in in_flight if fit.outcome == "arrived"}

    def settle(self) -> None:
        """Make this round the one that the run goes back to if a later one fails."""
        federation = self.run.federation
        memory = copy.deepcopy(federation.server.memory)
        self._settled = replace(federation.clock), federation.state, memory

    def roll_back(self) -> None:
        """Go back to the last round that was settled: a half-done round has parts of two states."""
        federation = self.run.federation
        federation.clients.rollback()
        clock, federation.state, memory = self._settled
        federation.clock = replace(clock)
        kept = federation.server.memory
        kept.clear()
        kept.update(memory)

    def create(self) -> None:
        """Write what stays the same for the whole run: the entries that nobody trains."""
        federation, checkpoints = self.run.federation, self.run.folder.checkpoints
        if checkpoints is not None:
            frozen = {name: federation.initial[name] for name in federation.entries.frozen}
            write_frozen(frozen, checkpoints)

    def save(self, is_best: bool) -> None:
        """Write the checkpoint of the round just done, and the memories of its clients.

        Args:
            is_best: Whether it is the round picked on validation data so far.

        Raises:
            FlsuiteError: If the checkpoint could not be read again.
        """
        run = self.run
        federation, folder = run.federation, run.folder
        clients, versions = federation.clients, federation.versions
        in_flight = self.versions_in_flight
        self._publishing.wait()  # the files of the round before are about to be replaced
        written = [*clients.commit(federation.round), *versions.commit(in_flight)]
        sizes = {"table": folder.table.append(), "timeline": folder.timeline.append()}
        self.settle()
        if folder.checkpoints is None:
            return

        # The picked round keeps its clients' memories, for ``--ckpt_path best``.
        if is_best:
            self._best_clients = dict(clients.versions)
        content = {
            "settings": run.settings,
            "federation": federation.state_dict(),
            "callbacks": {c.state_key: c.state_dict() for c in run.callbacks.federation},
            "summary": run.summary.state_dict(),
            "best_clients": self._best_clients,
            "wall_seconds": run.summary.wall_seconds,
            **sizes,
        }
        path = write_checkpoint(content, folder.checkpoints)
        # A kill before the rename leaves the old checkpoint, whose files must still be there.
        needed = [*written, *folder.tables]
        used = dict(clients.versions), dict(self._best_clients)

        def publish() -> None:
            publish_checkpoint(path, is_best, needed)
            clients.remove_unused(*used)
            versions.remove_unused(in_flight)

        self._publishing.start(publish)

    def close(self, must_succeed: bool) -> None:
        """Wait until the last checkpoint is in place.

        Args:
            must_succeed: Whether an error is raised. Otherwise it is logged, because the run has
                failed already and that error is the one to raise.
        """
        try:
            self._publishing.close()
        except Exception as error:
            if must_succeed:
                raise
            log.warning("the last checkpoint was not written: %s", one_line(error))

    def restore(self, checkpoint: Path, to_train: bool) -> dict[str, Any]:
        """Go back to the state of a checkpoint, and return all that the checkpoint holds.

        Args:
            checkpoint: The file.
            to_train: Whether training goes on from it. Scores alone depend on fewer settings.

        Raises:
            FlsuiteError: If the checkpoint cannot be read, or was written with other settings.
        """
        run = self.run
        content = load_checkpoint(checkpoint)
        saved = renamed(content["settings"])
        algorithm = run.settings["aggregator"], saved["aggregator"]
        saved["aggregator"] = without_derived(*algorithm)
        run.settings = with_contents(run.settings, saved)
        # Settings of either side: one that is missing here or there differs.
        names = [
            name
            for name in {**run.settings, **saved}
            if (name not in _MAY_DIFFER if to_train else name in _DECIDE_SCORES)
        ]
        ours, theirs = ({k: s.get(k) for k in names} for s in (run.settings, saved))
        refuse_mismatch(ours, theirs, checkpoint)

        run.federation.load_state_dict(content["federation"])
        run.federation.initial |= read_frozen(run.federation.entries.frozen, checkpoint.parent)
        run.summary.load_state_dict(content["summary"])
        run.summary.continue_clock(content["wall_seconds"])
        self.settle()
        self._best_clients = content["best_clients"]
        for callback in run.callbacks.federation:
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])
        return content

    def resume(self, checkpoint: Path) -> dict[str, Any]:
        """Restore a checkpoint of this run's own folder, to go on in it.

        Raises:
            FlsuiteError: If it belongs to another run, or :meth:`restore` raises.
        """
        run = self.run
        home, own = checkpoint.resolve().parent, run.folder.checkpoints
        if checkpoint.is_file() and (own is None or home != own.resolve()):
            raise FlsuiteError(
                f"{checkpoint} belongs to another run; resume it there, with run_dir {home.parent}"
            )
        content = self.restore(checkpoint, to_train=True)
        run.federation.versions.restore(self.versions_in_flight)
        run.folder.table.resume(content["table"])
        run.folder.timeline.resume(content["timeline"])
        log.info("resumed after round %d from %s", run.federation.round, checkpoint)
        return content
