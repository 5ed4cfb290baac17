"""One run of a federation: it evaluates, records, saves and resumes."""

import copy
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from flsuite.files import replace_file, save_tensors
from flsuite.messages import ClientResult, ClientUpdate, FitRequest, Outcome
from flsuite.runs.budget import Budget
from flsuite.runs.folder import RunFolder
from flsuite.runs.reuse import UPDATES, require_plain_training
from flsuite.runs.scoring import score_round
from flsuite.runs.store import RunStore
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
_MOST_AT_ONCE = 100  # rounds at one virtual second, beside the clients in flight

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
        store: Its checkpoints.
        attack: What the attackers among the clients do, if there are any.
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

        self.attack = evaluator.attack
        self.summary = RunSummary(options.monitor or "accuracy")
        self.status: Status = "running"
        self.updates: UpdateStore | None = None
        self.source: Path | None = None
        self.store = RunStore(self)
        self._is_stopping = False
        self._improved = False
        self._accepting: Iterator[ClientUpdate] = iter(())
        self._moved = -1.0, 0  # virtual second, and the first round that ended then
        self._announced = 0  # the last round whose start callbacks know of
        self.continue_clock(0.0)

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

    def continue_clock(self, seconds: float) -> None:
        """Count wall time from now on, after so many seconds before."""
        self._wall_before, self._began = seconds, time.monotonic()

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
        for callback in self.federation_callbacks():
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
        if (keep or source is not None) and self.attack is not None:
            raise FlsuiteError(
                "keep_updates and from_updates are for models as clients train them, and "
                "trainer.attack changes them; leave out one of these"
            )
        uplink = self.federation.uplink
        if keep and (uplink.masks or uplink.chain.transforms):
            raise FlsuiteError(
                "keep_updates keeps the clients' models as they are, and a transform or secure_sum "
                "shows the server others; set trainer.keep_updates to false"
            )
        if keep:
            self.updates = UpdateStore(self._path_to_keep() / UPDATES)
        self.source = None if source is None else Path(source)

    @property
    def sums_parts(self) -> bool:
        """Return whether workers add up the models of their clients, which nobody else reads."""
        reads = any(_reads_updates(callback) for callback in self.federation_callbacks())
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
            FederationError: If it is faulty, or virtual time alone ends the run and stands still.
        """
        # An aggregator may leave updates untaken. They still belong to the record of the round.
        for _ in self._accepting:
            pass
        self.federation.advance(state)
        self._refuse_standstill()

    def evaluate(self) -> None:
        """Score the new version if it is due, and call ``on_round_end``.

        See :func:`score_round`.
        """
        self._improved = score_round(self)
        for name, network in self.federation.artifacts.items():
            self._record_artifact(name, network)

    def record(self) -> None:
        """Write the numbers of the round into the table and send them to the loggers."""
        federation, table = self.federation, self.folder.table
        for scope, numbers in federation.log.metrics():
            table.note(scope, "train", numbers)
        table.note(GLOBAL, "train", federation.schedule.metrics())
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
        """Write the checkpoint. It is put into place while the next round goes on."""
        self.store.save(self._improved)

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
        if not record.updates and (record.failures or not schedule.traits.may_be_empty):
            raise self.federation.failure()

    def _refuse_standstill(self) -> None:
        """Refuse to go on for ever with fits that take no virtual time."""
        if self.clock.seconds > self._moved[0]:
            self._moved = self.clock.seconds, self.round
        # Fits that take any time come back at one second at most once for each client in flight.
        still, in_flight = self.round - self._moved[1], len(self.federation.schedule.in_flight)
        if self.budget.is_of_time_alone and still > _MOST_AT_ONCE + in_flight:
            raise FederationError(
                f"round {self.round}: {still} rounds have taken no virtual time, and "
                "trainer.max_virtual_seconds alone ends the run; set trainer.rounds too, or longer "
                f"fits in trainer.schedule.speeds; the state of round {self.round - 1} is kept"
            )

    def _path_to_keep(self) -> Path:
        """Return the run's folder, which keeping the clients' models needs."""
        if self.folder.path is None:
            raise FlsuiteError(
                "keep_updates keeps the clients' models in the run's folder, and this run writes "
                "none; set trainer.enable_checkpointing to true, or trainer.keep_updates to false"
            )
        return self.folder.path

    def _record_artifact(self, name: str, network: nn.Module) -> None:
        """Score a network that the algorithm has built, and write it beside the model."""
        for metric, value in self.evaluator.of_module(network, self.evaluator.data.test).items():
            self.log_metric(f"{name}/{metric}", value, split="test")
        if self.folder.checkpoints is not None:
            state = clone(network.state_dict())
            path = self.folder.checkpoints / f"{name}.pt"
            replace_file(lambda temporary: save_tensors(state, temporary), path)

    def federation_callbacks(self) -> list[Callback]:
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
