"""One run of a federation: it evaluates, records, saves and resumes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from torch import nn

from flsuite.arguments import PositiveFloat, PositiveInt, Settings
from flsuite.client.lr_decay import LRDecay
from flsuite.errors import FederationError
from flsuite.files import replace_file, save_tensors
from flsuite.messages import ClientResult, ClientUpdate, FitRequest, Outcome
from flsuite.runs.folder import RunFolder
from flsuite.runs.hooks import Hooks
from flsuite.runs.reuse import Reuse
from flsuite.runs.scoring import score_round
from flsuite.runs.store import RunStore
from flsuite.runs.summary import RunSummary
from flsuite.runs.table import TimelineRow
from flsuite.schedules import Clock, Fit
from flsuite.server.evaluation import GLOBAL, Evaluator
from flsuite.server.federation import Federation
from flsuite.state import State, clone

_MOST_AT_ONCE = 100  # rounds at one virtual second, beside the clients in flight

Status = Literal["running", "success", "failed"]


@dataclass(frozen=True)
class Budget(Settings):
    """The limits of a run, which ends with the first round that reaches one of them.

    Attributes:
        rounds: Rounds.
        max_virtual_seconds: Virtual seconds.
        max_client_updates: Aggregated client updates.
    """

    owner = "trainer"

    rounds: PositiveInt | None = None
    max_virtual_seconds: PositiveFloat | None = None
    max_client_updates: PositiveInt | None = None

    @classmethod
    def of(cls, rounds: int | None, seconds: float | None, updates: int | None) -> "Budget":
        """Return these limits, and 10 rounds where none is given."""
        is_open = rounds is None and seconds is None and updates is None
        return cls(10 if is_open else rounds, seconds, updates)

    @property
    def is_of_time_alone(self) -> bool:
        """Return whether virtual time is the only limit."""
        others = self.rounds, self.max_client_updates
        return self.max_virtual_seconds is not None and others == (None, None)

    def is_spent(self, clock: Clock) -> bool:
        """Return whether a limit is reached."""
        return any(limit is not None and spent >= limit for spent, limit in self._pairs(clock))

    def share(self, clock: Clock) -> float:
        """Return the share that is spent of the limit that comes first, in [0, 1]."""
        shares = [spent / limit for spent, limit in self._pairs(clock) if limit is not None]
        return min(max(shares, default=0.0), 1.0)

    def __str__(self) -> str:
        given = {name: limit for name, limit in vars(self).items() if limit is not None}
        return ", ".join(f"trainer.{name} (now {limit})" for name, limit in given.items())

    def _pairs(self, clock: Clock) -> list[tuple[float, float | None]]:
        return [
            (clock.round, self.rounds),
            (clock.seconds, self.max_virtual_seconds),
            (clock.client_updates, self.max_client_updates),
        ]


@dataclass(frozen=True)
class RunOptions(Settings):
    """The options of a run beside training, see :class:`~flsuite.FederatedTrainer`."""

    owner = "trainer"

    budget: Budget
    seed: int
    evaluate_every: PositiveInt = 1
    monitor: str | None = None
    score_clients: PositiveInt = 100
    lr_decay: LRDecay | None = None
    show: bool = False


class Run:
    """One run of a federation, from its folder's first file to its last.

    Args:
        federation: As it is before the first round.
        evaluator: Scores the models of the federation.
        folder: Where the run is recorded.
        options: The options of the run.
        settings: All settings that decide the result, as plain data.
        config: The request of the user, as text or plain data.
        callbacks: What looks on, or acts too.
        loggers: Lightning loggers.
        reuse: The clients' trained models that are kept, and those that it starts from, if any.

    Attributes:
        summary: The scores of the last round and of the picked round, and what they cost.
        status: ``running``, then ``success`` or ``failed``.
        store: Its checkpoints.
    """

    def __init__(
        self,
        federation: Federation,
        evaluator: Evaluator,
        folder: RunFolder,
        options: RunOptions,
        settings: dict[str, Any],
        config: dict[str, Any] | str,
        callbacks: Hooks,
        loggers: Sequence[Logger],
        reuse: Reuse | None = None,
    ) -> None:
        self.federation = federation
        self.evaluator = evaluator
        self.folder = folder
        self.options = options
        self.settings = settings
        self.config = config
        self.callbacks = callbacks
        self.loggers = list(loggers)
        self.reuse = reuse

        self.summary = RunSummary(options.monitor or "accuracy")
        self.status: Status = "running"
        self.store = RunStore(self)
        self._is_stopping = False
        self._improved = False
        self._accepting: Iterator[ClientUpdate] = iter(())
        self._moved = -1.0, 0  # virtual second, and the first round that ended then
        self._announced = 0  # the last round whose start callbacks know of

    # For the round and for callbacks

    @property
    def round(self) -> int:
        """Return the number of rounds done."""
        return self.federation.round

    @property
    def finished(self) -> bool:
        """Return whether the run ends with the round in progress."""
        return self._is_stopping or self.options.budget.is_spent(self.federation.clock)

    def stop(self) -> None:
        """End the run with the round in progress."""
        self._is_stopping = True

    def log_metric(
        self, metric: str, value: float, scope: str | int = GLOBAL, split: str = "train"
    ) -> None:
        """Add a number to the round in progress, for the table and the loggers."""
        self.folder.table.note(str(scope), split, {metric: value})

    # One round: the steps of FederatedTrainer.fit

    def requests(self, starting: Sequence[Fit]) -> list[FitRequest]:
        """Return the requests of fits that start now.

        Callbacks are notified of the first ones of a round.
        """
        if self._announced <= self.round:
            self._announced = self.round + 1
            clients = [fit.client for fit in starting if fit.version == self.round]
            self.callbacks.notify("on_round_start", self, self.round + 1, clients)
        requests = self.federation.requests(starting, self.callbacks.for_clients)
        return [self.reuse.with_trained(r) for r in requests] if self.reuse else requests

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
        for name, network in self.federation.server.artifacts.items():
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
        if stage := federation.data.at(self.round).stage:
            self.log_metric("task", stage.task)

        self.summary.count_bytes(federation.log)
        named = table.close_round(federation.clock, self.summary.wall_seconds)
        of_test = {k.removeprefix("test/"): v for k, v in named.items() if k.startswith("test/")}
        self.summary.note(self.round, of_test)
        of_training = {k.removeprefix("train/"): v for k, v in named.items() if k[:6] == "train/"}
        self.summary.note_privacy(of_training)
        self.callbacks.notify("on_round_recorded", self, self.round, named)

    def save(self) -> None:
        """Write the checkpoint. It is put into place while the next round goes on."""
        self.store.save(self._improved)

    # Inside

    def _accepted(self, outcomes: Iterator[Outcome]) -> Iterator[ClientUpdate]:
        for outcome in self.federation.accept(outcomes):
            self.callbacks.notify("on_client_end", self, outcome)
            if isinstance(outcome, ClientResult):
                if self.reuse:
                    self.reuse.keep(outcome)
                yield outcome.update

    def _refuse_standstill(self) -> None:
        """Refuse to go on for ever with fits that take no virtual time."""
        clock = self.federation.clock
        if clock.seconds > self._moved[0]:
            self._moved = clock.seconds, clock.round
        # Fits that take any time come back at one second at most once for each client in flight.
        still, in_flight = self.round - self._moved[1], len(self.federation.schedule.in_flight)
        if self.options.budget.is_of_time_alone and still > _MOST_AT_ONCE + in_flight:
            raise FederationError(
                f"round {self.round}: {still} rounds have taken no virtual time, and "
                "trainer.max_virtual_seconds alone ends the run; set trainer.rounds too, or longer "
                f"fits in trainer.schedule.speeds; the state of round {self.round - 1} is kept"
            )

    def _record_artifact(self, name: str, network: nn.Module) -> None:
        """Score a network that the algorithm has built, and write it beside the model."""
        for metric, value in self.evaluator.of_module(network, self.evaluator.data.test).items():
            self.log_metric(f"{name}/{metric}", value, split="test")
        if self.folder.checkpoints is not None:
            state = clone(network.state_dict())
            path = self.folder.checkpoints / f"{name}.pt"
            replace_file(lambda temporary: save_tensors(state, temporary), path)


def timeline_rows(federation: Federation) -> Iterator[TimelineRow]:
    """Yield the fits that have ended in the round just done, in the order of the clock.

    A pooled fit is not that of a client, and has no row.
    """
    if federation.aggregator.pools:
        return
    updates = {update.number: update for update in federation.log.updates}
    for fit in federation.schedule.ended:
        assert fit.ended is not None
        what = fit.number, fit.client, fit.version, fit.started, fit.ended
        update = updates.get(fit.number)
        if update is not None:
            clock, weight = federation.clock, update.metrics.get("weight")
            merged = clock.round, clock.seconds, update.staleness, weight
            yield TimelineRow(*what, "merged", *merged)
        else:
            # What has arrived and is not among the updates was refused, or never was an update.
            yield TimelineRow(*what, "failed" if fit.outcome == "arrived" else fit.outcome)
