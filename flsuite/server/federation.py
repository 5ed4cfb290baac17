"""A federation at one moment, and how it gets from one round to the next."""

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from flsuite.aggregators import Aggregator
from flsuite.client.runner import Buffers, buffer_names, private_patterns
from flsuite.data.federated import FederatedData
from flsuite.engines import Engine
from flsuite.engines.base import Outcome
from flsuite.errors import FederationError, FlsuiteError
from flsuite.messages import (
    Broadcast,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    FitAssignment,
    FitRequest,
)
from flsuite.models.base import ClientModel
from flsuite.schedules import Schedule
from flsuite.server.client_store import ClientStore
from flsuite.state import State, StateLayout, clone, matches, mismatch, non_finite, split

__all__ = ["Federation", "RoundLog"]

log = logging.getLogger("flsuite")


class RoundLog:
    """What came back in one round, without the tensors."""

    def __init__(self) -> None:
        self.updates: list[ClientUpdate] = []
        self.failures: list[ClientFailure] = []
        self.server: dict[str, float] = {}

    def metrics(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Scope and numbers: each client, then all of them together."""
        for update in self.updates:
            sizes = {"samples": update.samples, "steps": update.steps, "seconds": update.seconds}
            traffic = {"bytes_up": update.bytes_up, "bytes_down": update.bytes_down}
            yield str(update.client), {**update.metrics, **sizes, **traffic}
        means = {}
        for name in sorted({name for update in self.updates for name in update.metrics}):
            have = [update for update in self.updates if name in update.metrics]
            means[name] = sum(u.samples * u.metrics[name] for u in have) / sum(
                u.samples for u in have
            )
        totals = {
            name: float(sum(getattr(u, name) for u in self.updates))
            for name in ("bytes_up", "bytes_down", "steps")
        }
        yield (
            "global",
            {
                **means,
                **self.server,
                **totals,
                "clients": len(self.updates),
                "failed": len(self.failures),
            },
        )


class Federation:
    """The global model, what server and clients remember, and the rule that moves them on.

    Attributes:
        round: Rounds done.
        state: The shared part of the global model.
        initial: What a fit starts from where nothing else is known: a client's own part before it has trained, and buffers.
        data: Of the whole run.
        current: As it is in the round just done: what clients train on, and are scored on, may change from task to task.
        personal: Whether every client has a model of its own to be scored.
    """

    def __init__(
        self,
        model: ClientModel,
        data: FederatedData,
        aggregator: Aggregator,
        schedule: Schedule,
        buffers: Buffers,
        memories: ClientStore,
        seed: int,
    ) -> None:
        self.data = data
        self.aggregator = aggregator
        self.schedule = schedule
        self.memories = memories
        self.round = 0
        self.virtual_seconds = 0.0
        self.log = RoundLog()
        schedule.configure(data.train_index.lengths().tolist(), seed)
        _refuse_idle_patterns(model)
        whole = clone(model.state_dict())
        self.state, private = split(whole, private_patterns(model, aggregator, buffers))
        self.personal = any(not matches(name, model.training_only) for name in private)
        self.initial = {name: whole[name] for name in (*private, *buffer_names(model))}
        aggregator.configure(_layout(model, self.state, data.clients))

    @property
    def current(self) -> FederatedData:
        return self.data.at(max(self.round, 1))

    def client_state(self, client: int | None) -> State:
        """The whole model of a client: the shared part as it is now, and its own. ``None``: a client that never trained."""
        private = self.memories[client].get("model", {}) if client is not None else {}
        return {**self.initial, **private, **self.state}

    def advance(self, engine: Engine, notify: Callable[..., None]) -> None:
        """One round: draw the cohort, train it, fold what comes back.

        Raises:
            FederationError: If no usable update came back, or the new state is not usable. State and clients' memories are
                as before then.
        """
        broadcast, tasks = self.open_round(notify)
        works = [FitRequest(task, broadcast, self.memories[task.client]) for task in tasks]
        self.close_round(engine.run(works), notify)

    def open_round(self, notify: Callable[..., None]) -> tuple[Broadcast, list[FitAssignment]]:
        """The first half of a round: draw the cohort, and say what it is sent and what it is to do."""
        round = self.round + 1
        cohort = self.schedule.cohort(round)
        notify("on_round_start", round, cohort)
        self.log = RoundLog()
        broadcast = Broadcast(round, self.state, self.aggregator.broadcast())
        data = self.data.at(round)
        return broadcast, self.aggregator.plan(cohort, [data.batches(client) for client in cohort])

    def close_round(self, outcomes: Iterator[Outcome], notify: Callable[..., None]) -> None:
        """The second half: fold what comes back, in the order of the tasks. Raises as :meth:`advance` does."""
        try:
            self._fold(outcomes, notify)
        except BaseException:
            self.memories.forget()
            raise

    def _fold(self, outcomes: Iterator[Outcome], notify: Callable[..., None]) -> None:
        round = self.round + 1
        accepted = self._accept(outcomes, notify)
        first = next(accepted, None)
        if first is None:
            failure = self.log.failures[0]
            raise FederationError(
                f"round {round}: all {len(self.log.failures)} clients failed, client {failure.client} with: {failure.reason}; "
                f"the state of round {self.round} is kept"
            )
        self.aggregator.metrics = self.log.server
        new = self.aggregator.aggregate(self.state, chain([first], accepted))
        for _ in accepted:  # what an aggregator does not look at has been trained all the same
            pass
        if fault := mismatch(new, self.state) or non_finite(new):
            raise FederationError(
                f"round {round}: {type(self.aggregator).__name__} made a bad state ({fault} is not finite, or not as before; "
                f"is its learning rate too high?); the state of round {self.round} is kept"
            )
        self.state = new
        self.round = round
        self.virtual_seconds += self.schedule.elapse(self.log.updates)

    def _accept(
        self, outcomes: Iterator[Outcome], notify: Callable[..., None]
    ) -> Iterator[ClientUpdate]:
        """Updates fit to reach the aggregator; the others are named in the log, and the round goes on without them."""
        for outcome in outcomes:
            checked = self.checked(outcome)
            if isinstance(checked, ClientFailure):
                self.log.failures.append(checked)
                log.warning(
                    "round %d: client %d failed: %s", checked.round, checked.client, checked.reason
                )
                log.debug("%s", checked.details)
                notify("on_client_end", checked)
                continue
            self.memories[checked.update.client] = checked.memory
            self.log.updates.append(checked.update.without_tensors())
            notify("on_client_end", checked)
            yield checked.update

    def checked(self, outcome: Outcome) -> ClientResult | ClientFailure:
        """The outcome, or a failure if its update must not reach the global model."""
        if isinstance(outcome, ClientFailure):
            return outcome
        fault = outcome.update.fault(self.state) or non_finite(outcome.memory.get("model", {}))
        if fault is None:
            return outcome
        return ClientFailure(
            outcome.update.client, outcome.update.round, f"its update was refused: {fault}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "virtual_seconds": self.virtual_seconds,
            "state": self.state,
            "initial": self.initial,
            "aggregator": self.aggregator.state_dict(),
            "schedule": self.schedule.state_dict(),
            "clients": dict(self.memories.versions),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.round = content["round"]
        self.virtual_seconds = content["virtual_seconds"]
        self.state = content["state"]
        self.initial = content["initial"]
        self.aggregator.load_state_dict(content["aggregator"])
        self.schedule.load_state_dict(content["schedule"])
        self.memories.restore(content["clients"])


def _refuse_idle_patterns(model: ClientModel) -> None:
    """A pattern that keeps nothing private would silently make a personalised method a plain one."""
    names = list(model.state_dict())
    for pattern in model.private:
        if not any(matches(name, (pattern,)) for name in names):
            some = ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in names))
            raise FlsuiteError(
                f"model.private: {pattern!r} matches no entry of {type(model).__name__}; it has {some[:300]}"
            )


def _layout(model: ClientModel, state: State, clients: int) -> StateLayout:
    parameters = tuple(
        name for name, _ in model.named_parameters(remove_duplicate=False) if name in state
    )
    groups = {
        group: tuple(name for name in parameters if matches(name, patterns))
        for group, patterns in model.parameter_groups.items()
    }
    return StateLayout(parameters, clients, groups)
