"""One run of a federation: it evaluates, records, saves and resumes."""

import copy
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger
from torch import nn

from flsuite.client.lr_decay import LRDecay
from flsuite.client.setup import WorkerSetup, has_lightning_hooks
from flsuite.data.federated import FederatedData
from flsuite.engines.base import Engine
from flsuite.errors import FederationError, FlsuiteError, one_line, require_at_least
from flsuite.files import BackgroundTask, is_of_the_disk, replace_file, save_tensors
from flsuite.messages import ClientResult, ClientUpdate, FitRequest, Outcome
from flsuite.runs.budget import Budget
from flsuite.runs.checkpoint import (
    export_model,
    load_checkpoint,
    publish_checkpoint,
    read_frozen,
    refuse_mismatch,
    write_checkpoint,
    write_frozen,
)
from flsuite.runs.folder import RunFolder
from flsuite.runs.reuse import UPDATES, require_plain_training, trained_clients
from flsuite.runs.scoring import score_round
from flsuite.runs.settings import WEIGHTS, with_contents
from flsuite.runs.summary import RunSummary
from flsuite.runs.timeline import timeline_rows
from flsuite.schedules import Clock, Fit
from flsuite.server.evaluation import GLOBAL, Evaluator, Scores, Split
from flsuite.server.federation import Federation
from flsuite.server.update_store import UpdateStore
from flsuite.state import State, clone

__all__ = ["Run", "RunOptions"]

log = logging.getLogger("flsuite")

_HOOKS = (
    "on_federation_start",
    "on_round_start",
    "on_client_end",
    "on_evaluation_end",
    "on_round_end",
    "on_round_recorded",
    "on_federation_end",
)
# Settings that a resumed run may change.
_MAY_DIFFER = (*vars(Budget()), "stopping", *WEIGHTS)
_DECIDE_SCORES = ("seed", "model", "data", "buffers", "aggregator")  # of a given state

Status = Literal["running", "success", "failed"]


@dataclass(frozen=True)
class RunOptions:
    """The options of a run beside training, see :class:`~flsuite.FederatedTrainer`."""

    budget: Budget
    seed: int
    evaluate_every: int = 1
    monitor: str | None = None
    score_clients: int = 100
    lr_decay: LRDecay | None = None
    show: bool = False

    def __post_init__(self) -> None:
        require_at_least("trainer", 1, evaluate_every=self.evaluate_every)
        require_at_least("trainer", 1, score_clients=self.score_clients)


class Run:
    """One run of a federation, from its folder's first file to its last.

    Args:
        federation: As it is before the first round.
        evaluator: Scores the models of the federation.
        folder: Where the run is recorded.
        options: The options of the run.
        settings: All settings that decide the result, as plain data.
        config: The request of the user, as text or plain data.
        callbacks: Callbacks with the federation's hooks (see
            :class:`~flsuite.callbacks.FederationCallback`), Lightning's own, or both.
        loggers: Lightning loggers.

    Attributes:
        budget: How long the run lasts.
        summary: The scores of the last round and of the picked round.
        status: ``running``, then ``success`` or ``failed``.
        updates: Where the clients' trained models are kept, if they are.
        source: Folder of the run whose trained models stand for the first round, if there is one.
    """

    def __init__(
        self,
        federation: Federation,
        evaluator: Evaluator,
        folder: RunFolder,
        options: RunOptions,
        settings: dict[str, Any],
        config: dict[str, Any] | str,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.federation = federation
        self.evaluator = evaluator
        self.folder = folder
        self.options = options
        self.budget = options.budget
        self.settings = settings
        self.config = config
        self.callbacks = list(callbacks)
        self.loggers = list(loggers)

        self.summary = RunSummary(options.monitor or "accuracy")
        self.status: Status = "running"
        self.updates: UpdateStore | None = None
        self.source: Path | None = None
        self._is_stopping = False
        self._is_useless = False  # a setting was wrong, and nothing has been trained
        self._improved = False
        self._accepting: Iterator[ClientUpdate] = iter(())
        self._best_clients: dict[int, int] = {}
        self._publishing = BackgroundTask()
        self._announced = 0  # the last round whose start callbacks know of
        self._saved = replace(federation.clock), federation.state
        self._wall_before, self._began = 0.0, time.monotonic()

    # State of the run, for the round and for callbacks

    @property
    def round(self) -> int:
        """Return the number of rounds done."""
        return self.federation.round

    @property
    def finished(self) -> bool:
        """Return whether the run ends with the round in progress."""
        return self._is_stopping or self.budget.is_spent(self.clock)

    @property
    def clock(self) -> Clock:
        """Return rounds done, virtual seconds, client updates and bytes."""
        return self.federation.clock

    @property
    def wall_seconds(self) -> float:
        """Return the seconds that the run has taken, including those before a resume."""
        return self._wall_before + time.monotonic() - self._began

    @property
    def state(self) -> State:
        """Return the shared part of the global model."""
        return self.federation.state

    @property
    def model(self) -> LightningModule:
        """Return the resident model, which is free for use between rounds."""
        return self.evaluator.model

    @property
    def data(self) -> FederatedData:
        """Return the data as it is in the last round done."""
        return self.federation.current

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return self.federation.data.clients

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return self.options.seed

    def lightning_callbacks(self) -> tuple[Callback, ...]:
        """Return copies of the callbacks that have a hook of Lightning, as they are now.

        They are copies, so that no client of a round sees what the run changes in them during the
        round.
        """
        own = [callback for callback in self.callbacks if has_lightning_hooks(callback)]
        return tuple(_copied(callback) for callback in own)

    def stop(self) -> None:
        """End the run with the round in progress."""
        self._is_stopping = True

    def log_metric(
        self, metric: str, value: float, scope: str | int = GLOBAL, split: str = "train"
    ) -> None:
        """Add a number to the round in progress, for the table and the loggers."""
        self.folder.table.note(str(scope), split, {metric: value})

    def notify(self, hook: str, *args: Any) -> None:
        """Call a hook of the federation on every callback that has it."""
        for callback in self._run_callbacks():
            if method := getattr(callback, hook, None):
                method(self, *args)

    def use_updates(self, keep: bool, source: str | None) -> None:
        """Keep the clients' trained models, or start from those of another run.

        Args:
            keep: Whether to keep them.
            source: Folder of the other run. It is read when the first round is about to train.

        Raises:
            FlsuiteError: If the algorithm takes part in training, or nothing is written.
        """
        if keep or source is not None:
            require_plain_training(self.federation)
        exchange = self.federation.exchange
        if keep and (exchange.compression or exchange.secure_sum):
            raise FlsuiteError(
                "keep_updates keeps the clients' models as they are, and compression or secure_sum "
                "shows the server others; set trainer.keep_updates to false"
            )
        if (keep or source is not None) and self.federation.attack is not None:
            raise FlsuiteError(
                "keep_updates and from_updates are for models as clients train them, and "
                "trainer.attack changes them; leave out one of these"
            )
        if keep:
            self.updates = UpdateStore(self._path_to_keep() / UPDATES)
        self.source = None if source is None else Path(source)

    @property
    def sums_parts(self) -> bool:
        """Return whether workers add up the models of their clients, which nobody else reads."""
        reads = any(_reads_updates(callback) for callback in self._run_callbacks())
        return self.federation.may_sum_parts and self.updates is None and not reads

    # One round: the steps of FederatedTrainer.fit

    def requests(self, starting: Sequence[Fit]) -> list[FitRequest]:
        """Return the requests of fits that start now.

        Callbacks are notified of the first ones of a round.
        """
        if self._announced <= self.round:
            self._announced = self.round + 1
            clients = [fit.client for fit in starting if fit.version == self.round]
            self.notify("on_round_start", self.round + 1, clients)
        return self.federation.requests(starting, self.lightning_callbacks)

    def accept(self, outcomes: Iterator[Outcome]) -> Iterator[ClientUpdate]:
        """Return the updates that may reach the aggregator, in the order of the outcomes.

        A client that failed, or whose update is faulty, is named in the log and left out.

        Raises:
            FlsuiteError: While it is iterated, if no client can train with these settings.
            FederationError: While it is iterated, if no usable update came back.
        """
        self._accepting = self._accepted(outcomes)
        return self._accepting

    def aggregate(self, updates: Iterator[ClientUpdate]) -> State:
        """Return the next version of the global model, as the algorithm folds the updates."""
        return self.federation.aggregate(updates)

    def advance(self, state: State) -> None:
        """Make this state the next version of the global model.

        Raises:
            FederationError: If it is faulty.
        """
        # An aggregator may leave updates untaken. They still belong to the record of the round.
        for _ in self._accepting:
            pass
        self.federation.advance(state)

    def evaluate(self) -> None:
        """Score the new version if it is due, and call ``on_round_end``.

        See :func:`score_round`.
        """
        self._improved = score_round(self)
        if self.federation.aggregator.grown is not None:
            self._record_grown(self.federation.aggregator.grown)

    def record(self) -> None:
        """Write the numbers of the round into the table and send them to the loggers."""
        federation, table = self.federation, self.folder.table
        for scope, numbers in federation.log.metrics():
            table.note(scope, "train", numbers)
        table.note(GLOBAL, "train", federation.schedule.numbers())
        self.folder.timeline.add(timeline_rows(federation))
        if self.options.lr_decay:
            self.log_metric("lr_factor", self.options.lr_decay.factor(self.round))
        if stage := self.data.stage:
            self.log_metric("task", stage.task)

        self.summary.count_bytes(federation.log)
        named = table.close_round(self.clock, self.wall_seconds)
        of_test = {k.removeprefix("test/"): v for k, v in named.items() if k.startswith("test/")}
        self.summary.note(self.round, of_test)
        of_training = {k.removeprefix("train/"): v for k, v in named.items() if k[:6] == "train/"}
        self.summary.note_privacy(of_training)
        self.notify("on_round_recorded", self.round, named)

    def save(self) -> None:
        """Write the checkpoint and the memories of the clients.

        They are flushed to disk and put into place while the next round goes on.

        Raises:
            FlsuiteError: If the checkpoint could not be read again.
        """
        clients, versions = self.federation.clients, self.federation.versions
        in_flight = self.federation.versions_in_flight
        self._publishing.wait()  # the files of the round before are about to be replaced
        written = [*clients.commit(self.round), *versions.commit(in_flight)]
        sizes = {"table": self.folder.table.append(), "timeline": self.folder.timeline.append()}
        self.settle()
        if self.folder.checkpoints is None:
            return

        # The picked round keeps its clients' memories, for ``--ckpt_path best``.
        if self._improved:
            self._best_clients = dict(clients.versions)
        content = {
            "settings": self.settings,
            "federation": self.federation.state_dict(),
            "callbacks": {c.state_key: c.state_dict() for c in self._run_callbacks()},
            "summary": self.summary.state_dict(),
            "best_clients": self._best_clients,
            "wall_seconds": self.wall_seconds,
            **sizes,
        }
        path = write_checkpoint(content, self.folder.checkpoints)
        # A kill before the rename leaves the old checkpoint, whose files must still be there.
        needed = [*written, *self.folder.tables]
        used, is_best = (dict(clients.versions), dict(self._best_clients)), self._improved

        def publish() -> None:
            publish_checkpoint(path, is_best, needed)
            clients.remove_unused(*used)
            versions.remove_unused(in_flight)

        self._publishing.start(publish)

    def settle(self) -> None:
        """Make this round the one that the run goes back to if a later one fails."""
        self._saved = replace(self.clock), self.state

    # Opening, resuming and closing

    @contextmanager
    def opened(self, ckpt_path: str | None = None) -> Iterator["Run"]:
        """Open the run's folder or resume from a checkpoint, and close the run at the end.

        Args:
            ckpt_path: A checkpoint of this run. ``last`` is the one in its folder, if there is one.

        Raises:
            FlsuiteError: If the request cannot be met. If no round was done, nothing is left.
        """
        is_restart = ckpt_path is not None
        with ExitStack() as stack:
            stack.enter_context(self._naming_the_disk())
            if self.folder.find_checkpoint(ckpt_path) is None:
                self._read_source()
                self.folder.claim(is_restart)
            stack.enter_context(self.folder.locked())
            # Only now: until it had the lock, another process may have written the first one.
            checkpoint = self.folder.find_checkpoint(ckpt_path)
            if checkpoint is None:
                self._create(is_restart)
            else:
                self._resume(checkpoint)
            yield from self._running(is_resumed=checkpoint is not None)

    @contextmanager
    def _naming_the_disk(self) -> Iterator[None]:
        """Name the folder in the error of a disk that is full or read-only.

        Raises:
            FederationError: If the disk is the reason of an error.
        """
        try:
            yield
        except OSError as error:
            if self.folder.path is None or not is_of_the_disk(error):
                raise
            raise FederationError(
                f"cannot write to {self.folder.path} ({error.strerror}); the last checkpoint, if "
                "there is one, is kept: free some space or make the folder writable, and go on "
                "with --ckpt_path last"
            ) from error

    def _read_source(self) -> None:
        """Find the trained models of the other run.

        Raises:
            FlsuiteError: If it has kept none, or its clients train otherwise.
        """
        if self.source is not None:
            self.federation.trained = trained_clients(self.source, self.settings)

    def _path_to_keep(self) -> Path:
        """Return the run's folder, which keeping the clients' models needs."""
        if self.folder.path is None:
            raise FlsuiteError(
                "keep_updates keeps the clients' models in the run's folder, and this run writes "
                "none; set trainer.enable_checkpointing to true, or trainer.keep_updates to false"
            )
        return self.folder.path

    def _create(self, is_restart: bool) -> None:
        """Begin in a new folder, or again in that of a run that was killed in its first round."""
        if is_restart:
            log.info("no checkpoint in %s yet: starting with round 1", self.folder.checkpoints)
        federation = self.federation
        data, attack = federation.data, federation.attack
        self.folder.create(self.config, self.settings, data, is_restart, attack)
        if self.folder.checkpoints is not None:
            frozen = {name: federation.initial[name] for name in federation.frozen}
            write_frozen(frozen, self.folder.checkpoints)
        if self.settings.get("initial_weights"):
            log.warning(
                "the model was built before, perhaps by another fit: the federation starts from "
                "its weights; pass a new model to start from weights that the seed decides"
            )

    def _running(self, is_resumed: bool) -> Iterator["Run"]:
        try:
            self.notify("on_federation_start")
            if self.federation.attack is not None:
                log.info("attack: %s", self.federation.attack.line(self.clients))
            self._say_if_finished()
            # A resumed run may have more rounds. A finished one keeps the record of what it did.
            if is_resumed and not self.finished:
                self.folder.write_request(self.config, self.settings)
            yield self
            self._publishing.close()
            self.status = "success"
        except BaseException as error:
            self.status = "failed"
            self._roll_back()
            # Only a wrong setting, and only before the first round: a later error leaves a run to
            # resume.
            self._is_useless = isinstance(error, FlsuiteError) and not self.round
            raise
        finally:
            self._close()
        if self.options.show:
            self.summary.print(self.wall_seconds, self.folder.path)

    def _roll_back(self) -> None:
        """Go back to the last round that was saved: a half-done round has parts of two states."""
        federation = self.federation
        federation.clients.rollback()
        clock, federation.state = self._saved
        federation.clock = replace(clock)

    def existing_checkpoint(self, ckpt_path: str) -> Path:
        """Return the file that a request means, which must exist.

        Raises:
            FlsuiteError: If there is no checkpoint.
        """
        path = self.folder.find_checkpoint(ckpt_path)
        if path is None:
            raise FlsuiteError(
                f"there is no checkpoint in {self.folder.checkpoints}: fit first, or name one with "
                "ckpt_path"
            )
        return path

    def restore(self, checkpoint: Path, to_train: bool) -> dict[str, Any]:
        """Go back to the state of a checkpoint, and return all that the checkpoint holds.

        Args:
            checkpoint: The file.
            to_train: Whether training goes on from it. Scores alone depend on fewer settings.

        Raises:
            FlsuiteError: If the checkpoint cannot be read, or was written with other settings.
        """
        content = load_checkpoint(checkpoint)
        self.settings = with_contents(self.settings, content["settings"])
        # Settings of either side: one that is missing here or there differs.
        names = [
            name
            for name in {**self.settings, **content["settings"]}
            if (name not in _MAY_DIFFER if to_train else name in _DECIDE_SCORES)
        ]
        ours, theirs = ({k: s.get(k) for k in names} for s in (self.settings, content["settings"]))
        refuse_mismatch(ours, theirs, checkpoint)

        self.federation.load_state_dict(content["federation"])
        self.federation.initial |= read_frozen(self.federation.frozen, checkpoint.parent)
        self.summary.load_state_dict(content["summary"])
        self.settle()
        self._wall_before, self._began = content["wall_seconds"], time.monotonic()
        self._best_clients = content["best_clients"]
        for callback in self._run_callbacks():
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])

        return content

    @contextmanager
    def on(self, engine: Engine, setup: WorkerSetup) -> Iterator[None]:
        """Start the engine, which trains and scores the clients, and stop it at the end.

        Raises:
            FlsuiteError: If the schedule cannot go on this engine.
        """
        self.federation.schedule.require(engine)
        self.evaluator.engine = engine
        try:
            with engine.running(setup):
                yield
        finally:
            self.evaluator.engine = None

    def export(self, path: Path) -> None:
        """Write the global model as an ordinary Lightning checkpoint."""
        self.evaluator.load(self.federation.client_state(None))
        export_model(self.model, path)

    def scores(self, split: Split, clients: Sequence[int], details: bool = False) -> Scores:
        """Score the federation as it is, and these clients."""
        return self.evaluator.scores(self.federation, split, clients, details)

    # Inside

    def _accepted(self, outcomes: Iterator[Outcome]) -> Iterator[ClientUpdate]:
        for outcome in outcomes:
            if not self.federation.awaits(outcome):
                continue
            checked = self.federation.accept(outcome)
            self.notify("on_client_end", checked)
            if isinstance(checked, ClientResult):
                if self.updates is not None:
                    self.updates.write(checked)
                yield checked.update

        # At the end: until the last outcome, a usable update may still come.
        record, schedule = self.federation.log, self.federation.schedule
        if not record.updates and (record.failures or not schedule.may_be_empty):
            raise self.federation.failure()

    def _resume(self, checkpoint: Path) -> None:
        """Restore a checkpoint of this run's folder, and go on in it."""
        home, own = checkpoint.resolve().parent, self.folder.checkpoints
        if checkpoint.is_file() and (own is None or home != own.resolve()):
            raise FlsuiteError(
                f"{checkpoint} belongs to another run; resume it there, with run_dir {home.parent}"
            )
        content = self.restore(checkpoint, to_train=True)
        in_flight = self.federation.versions_in_flight
        self.federation.versions.restore(in_flight)
        # The other run may be gone. Clients of the first version that are still in flight then
        # train, which leads to the same models.
        if self.source is not None and self.source.exists() and 0 in in_flight:
            self._read_source()
        self.folder.table.resume(content["table"])
        self.folder.timeline.resume(content["timeline"])
        log.info("resumed after round %d from %s", self.round, checkpoint)

    def _say_if_finished(self) -> None:
        if not self.finished:
            return
        log.warning(
            "nothing to train: the run is finished after round %d; raise %s%s to extend it",
            self.round,
            self.budget,
            ", or the patience of the callback that stops it," if self._is_stopping else "",
        )

    def _close(self) -> None:
        """Leave the global model in the resident model and on disk, and notify callbacks."""
        try:
            self._publishing.close()
        except Exception as error:  # the run has failed already; that error is the one to raise
            log.warning("the last checkpoint was not written: %s", one_line(error))
        if self.round:
            self._export_model()
        self.notify("on_federation_end")
        if self._is_useless:
            self.folder.discard()

    def _export_model(self) -> None:
        self.evaluator.load(self.federation.client_state(None))
        if self.folder.checkpoints is None:
            return
        try:
            export_model(self.model, self.folder.checkpoints / "model.ckpt")
        except Exception as error:
            if self.status == "success":
                raise
            log.warning("model.ckpt was not written: %s", one_line(error))

    def _record_grown(self, grown: nn.Module) -> None:
        """Score a network with other widths than the model's, and write it beside the model."""
        for name, value in self.evaluator.of_module(grown, self.evaluator.data.test).items():
            self.log_metric(f"grown/{name}", value, split="test")
        if self.folder.checkpoints is not None:
            state = clone(grown.state_dict())
            path = self.folder.checkpoints / "grown.pt"
            replace_file(lambda temporary: save_tensors(state, temporary), path)

    def _run_callbacks(self) -> list[Callback]:
        """Return the callbacks that have a hook of the federation."""
        return [c for c in self.callbacks if any(hasattr(c, hook) for hook in _HOOKS)]


def _reads_updates(callback: Callback) -> bool:
    """Return whether a callback may read the models of clients."""
    if "on_client_end" in vars(callback):
        return True
    for kind in type(callback).__mro__:
        # A subclass with a hook of its own must say for itself that it reads nothing.
        if "on_client_end" in vars(kind) or "reads_updates" in vars(kind):
            return kind.__module__ != "flsuite.callbacks.base" and vars(kind).get(
                "reads_updates", True
            )
    return False


def _copied(callback: Callback) -> Callback:
    try:
        return copy.deepcopy(callback)
    except Exception as error:
        raise FlsuiteError(
            f"trainer.callbacks: {type(callback).__name__} cannot be copied ({one_line(error)}), "
            "and every client's fit works on a copy; open files and connections in its hooks, or "
            "give it __deepcopy__"
        ) from error
