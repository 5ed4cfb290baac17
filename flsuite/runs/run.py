"""One run: it evaluates, records, saves and resumes a federation."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch.loggers import Logger
from torch import nn

from flsuite.common.errors import FederationError, log
from flsuite.common.files import replace_tensors
from flsuite.common.messages import FitRequest, Outcome, Profile, Scores, Split
from flsuite.common.state import clone
from flsuite.federation.engines.base import Engine
from flsuite.federation.schedules.base import Fit
from flsuite.federation.server.evaluation import GLOBAL, Evaluator, adapted_scores
from flsuite.federation.server.federation import Federation
from flsuite.runs.folder import RunFolder
from flsuite.runs.fork import Fork, Reuse
from flsuite.runs.hooks import Hooks
from flsuite.runs.settings import RunOptions
from flsuite.runs.store import RunStore
from flsuite.runs.summary import RunSummary
from flsuite.runs.table import timeline_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST_AT_ONCE = 100  # rounds without virtual time, in addition to the clients in flight
_MOST_SCORED = 10_000  # clients that the last round scores one by one

Status = Literal["running", "success", "failed"]


@dataclass(eq=False, repr=False)
class Run:
    """One run of a federation, from start to end.

    Args:
        federation: The federation before its first round.
        evaluator: Scores the models of the federation.
        folder: The folder of the run.
        options: The options of the run.
        settings: All settings that determine the result, as plain data.
        config: The user's request, as text or plain data.
        callbacks: The callbacks of the run.
        loggers: Lightning loggers.
        reuse: Stores the clients' trained models or reads another run's, if requested.
        keep_rounds: Rounds between two checkpoints that stay. ``None`` keeps none of them.
        parent: The moment of another run that this one begins at, if any.

    Attributes:
        summary: The scores of the last round and of the picked round, and their cost.
        status: ``running``, then ``success`` or ``failed``.
        store: The run's checkpoints.
        engine: Where its clients train, from the start of a fit on.
        pictures: The pictures of the round in progress.
        profile: The sums over the fits since the start of the process, if they are profiled.
    """

    federation: Federation
    evaluator: Evaluator
    folder: RunFolder
    options: RunOptions
    settings: dict[str, Any]
    config: dict[str, Any] | str
    callbacks: Hooks
    loggers: Sequence[Logger]
    reuse: Reuse | None
    keep_rounds: InitVar[int | None]
    parent: InitVar[Fork | None]

    def __post_init__(self, keep_rounds: int | None, parent: Fork | None) -> None:
        self.settings = dict(self.settings)  # shared with the store, which completes them
        self.summary = RunSummary(self.options.monitor or "accuracy")
        self.status: Status = "running"
        own = self.federation, self.folder, self.settings, self.callbacks, self.summary
        self.store = RunStore(*own, keep_rounds, parent)
        self.engine: Engine | None = None
        self.pictures: dict[str, Figure] = {}
        self.profile: Profile = {}
        self._is_stopping = False
        self._improved = False
        self._moved = -1.0, 0  # virtual second, and the first round that ended at it

    # For the round and for callbacks

    @property
    def round(self) -> int:
        """Return the number of rounds done."""
        return self.federation.clock.round

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

    def log_picture(self, name: str, figure: "Figure") -> None:
        """Add a picture to the round in progress, for the loggers."""
        self.pictures[name] = figure

    # One round: the steps of FederatedTrainer.fit

    def begin_round(self) -> list[Fit]:
        """Begin the next round, notify the callbacks, and return the fits that start with it."""
        federation = self.federation
        federation.open_round()
        starting = federation.schedule.start(federation.clock)
        clients = [fit.client for fit in starting if fit.version == self.round]
        self.callbacks.notify("on_round_start", self, self.round + 1, clients)
        return starting

    def requests(self, starting: Sequence[Fit]) -> list[FitRequest]:
        """Return the requests of fits that start now."""
        requests = self.federation.send(starting, self.callbacks.for_clients)
        return [self.reuse.with_trained(r) for r in requests] if self.reuse else requests

    def accept(self, outcome: Outcome) -> None:
        """Check an outcome, notify the callbacks, and add its update to the round.

        A client that failed or sent a faulty update is left out, and named when the round ends.

        Raises:
            FederationError: If it failed, and ``trainer.on_client_error`` is ``raise``.
        """
        checked = self.federation.check(outcome)
        if checked is None:
            return
        self.callbacks.notify("on_client_end", self, checked)
        if not checked.failed:
            if self.reuse and self.reuse.kept:
                self.reuse.kept.write(checked)
            self.federation.add(checked.update)
            for name, (calls, seconds) in checked.profile.items():
                before = self.profile.get(name, (0, 0.0))
                self.profile[name] = before[0] + calls, before[1] + seconds
        elif self.options.on_client_error == "raise":
            self._keep_tracebacks()
            raise FederationError(
                f"round {self.round + 1}: client {checked.client} failed: {checked.reason}; "
                f"trainer.on_client_error is raise; the state of round {self.round} is kept"
            )

    def advance(self) -> None:
        """Make the updates of the round the next version of the global model.

        Raises:
            FlsuiteError: If no client can train with these settings.
            FederationError: If no usable update came back, if the next version is faulty, or if
                virtual time is the only limit and does not advance.
        """
        self._keep_tracebacks()
        self.federation.aggregate()
        self._refuse_standstill()

    def evaluate(self) -> None:
        """Score the new version if it is due, on validation data and then on test data.

        Every evaluation scores the same clients, the first ``score_clients``, so that rounds can be
        compared. The last round also scores all clients, under ``all_clients/...``, if there are at
        most 10,000. This bounds its cost, however many clients are registered.

        ``on_round_end`` is called after the due scores. Numbers can still be
        added to the round, and a callback may still stop the run.
        """
        self._improved = has_details = False
        is_due = self.round % self.options.evaluate_every == 0 or self.finished
        if is_due:
            self._score("val")
            has_details = self.finished  # a callback may stop the run for its validation scores
            self._score("test", details=has_details)
        self.callbacks.notify("on_round_end", self, self.round)

        if self.finished:
            if not is_due:  # a callback has stopped the run just now
                self._score("val")
                self._score("test", details=True)
            elif not has_details:
                scores = self._scores("test", details=True).get(GLOBAL, {})
                by_class = {name: v for name, v in scores.items() if name.startswith("accuracy/")}
                self.folder.table.note(GLOBAL, "test", by_class)
            self._score_all_clients()
            self._score_adapted()
        for name, network in self.federation.server.artifacts.items():
            self._record_artifact(name, network)

    def record(self) -> None:
        """Add the numbers of the round to the table and send them to the loggers."""
        federation, table = self.federation, self.folder.table
        for scope, numbers in federation.log.metrics():
            table.note(scope, "train", numbers)
        table.note(GLOBAL, "train", federation.schedule.metrics())
        self.folder.timeline.add(timeline_rows(federation))
        if self.options.lr_decay:
            self.log_metric("lr_factor", self.options.lr_decay.factor(self.round))
        if stage := federation.data.at(self.round).stage:
            self.log_metric("task", stage.task)

        named = table.close_round(federation.clock, self.summary.wall_seconds)
        self.summary.record(federation.log, named)
        if self.finished:
            self.summary.ends.append(self.round)
        self.callbacks.notify("on_round_recorded", self, self.round, named)
        self.pictures.clear()

    def save(self) -> None:
        """Write the checkpoint. It is renamed into place during the next round."""
        self.store.save(self._improved)

    # Inside

    def _scores(self, split: Split, details: bool = False) -> Scores:
        """Return the scores of the clients that are compared from round to round."""
        clients = self.federation.present()[: self.options.score_clients]
        return self.evaluator.scores(self.federation, split, clients, details, self.engine)

    def _score(self, split: Split, details: bool = False) -> None:
        """Score the round, note whether it is the best so far, and tell the callbacks."""
        scores = self._scores(split, details)
        if split == "test":
            self.summary.score(self.round, scores.get(GLOBAL, {}), self._improved)
        if not scores:
            return
        for scope, numbers in scores.items():
            self.folder.table.note(scope, split, numbers)
        if split == "val":
            # Scores after different tasks cover different classes and cannot be compared.
            stage = self.federation.data.at(self.round).stage
            self._improved = self.summary.is_best(scores[GLOBAL], stage.task if stage else None)
        self.callbacks.notify("on_evaluation_end", self, self.round, split, scores)

    def _score_all_clients(self) -> None:
        """Add the scores of all clients under separate names, if some are not compared."""
        compared, clients = self.options.score_clients, self.federation.data.clients
        if clients <= compared:
            return
        if clients > _MOST_SCORED:
            log.info(
                "the last round scores the first %d clients one by one; flsuite test scores all %d",
                compared,
                clients,
            )
            return

        for split in get_args(Split):
            scores = self.evaluator.scores(
                self.federation, split, self.federation.present(), engine=self.engine
            )
            for scope, numbers in scores.items():
                if scope == GLOBAL:
                    numbers = {f"all_clients/{name}": value for name, value in numbers.items()}
                if scope == GLOBAL or int(scope) >= compared:
                    self.folder.table.note(scope, split, numbers)

    def _score_adapted(self) -> None:
        """Score the clients' models after an adaptation, and clients outside the federation."""
        federation, epochs, engine = self.federation, self.options.adapt_epochs, self.engine
        seen, unseen = federation.data.clients, federation.data.unseen
        few = federation.present()[: self.options.score_clients]
        outside = range(seen, seen + min(self.options.score_clients, unseen))
        score, adapted = self.evaluator.scores, partial(adapted_scores, self.evaluator, federation)
        groups = {"unseen": score(federation, "test", outside, engine=engine)} if unseen else {}
        if epochs and engine:  # Flower's clients do not adapt
            groups["adapted"] = adapted(few, epochs, engine)
        if epochs and engine and unseen:
            groups["unseen_adapted"] = adapted(outside, epochs, engine)

        for group, scores in groups.items():
            for scope, numbers in scores.items():
                named = {f"{group}/{name}": value for name, value in numbers.items()}
                self.folder.table.note(scope, "test", named)

    def _keep_tracebacks(self) -> None:
        """Write the tracebacks of the clients that failed in this round, one per cause."""
        causes = self.federation.log.causes()
        parts = [f"{line}\n\n{failure.details}" for line, failure in causes if failure.details]
        self.folder.keep_error(self.round + 1, "\n".join(parts))

    def _refuse_standstill(self) -> None:
        """Stop a run that would never end because its fits take no virtual time."""
        clock = self.federation.clock
        if clock.seconds > self._moved[0]:
            self._moved = clock.seconds, clock.round
        # Fits that take time arrive at the same second at most once per client in flight.
        still, in_flight = self.round - self._moved[1], len(self.federation.schedule.in_flight)
        if self.options.budget.is_of_time_alone and still > _MOST_AT_ONCE + in_flight:
            raise FederationError(
                f"round {self.round}: {still} rounds have taken no virtual time, and "
                "trainer.max_virtual_seconds is the only limit; set trainer.rounds too, or longer "
                f"fits in trainer.schedule.speeds; the state of round {self.round - 1} is kept"
            )

    def _record_artifact(self, name: str, network: nn.Module) -> None:
        """Score a network that the algorithm has built, and write it next to the model."""
        test = self.federation.data.at(self.round).test
        for metric, value in self.evaluator.of_module(network, test).items():
            self.log_metric(f"{name}/{metric}", value, split="test")
        if self.folder.checkpoints is not None:
            replace_tensors(clone(network.state_dict()), self.folder.checkpoints / f"{name}.pt")
