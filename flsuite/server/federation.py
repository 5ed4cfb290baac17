"""The federation: its state, and the step from one version of the global model to the next."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from flsuite.aggregators import Aggregator
from flsuite.aggregators.part import Named, Server, refuse_conflicts
from flsuite.aggregators.parts import part_size
from flsuite.aggregators.rules import CohortRule
from flsuite.aggregators.tools import ServerTools
from flsuite.aggregators.uplink import Uplink
from flsuite.client.setup import BatchNorm, buffer_names, entries_of
from flsuite.data.federated import FederatedData
from flsuite.errors import FederationError, FlsuiteError, one_line
from flsuite.exchange.secure import SecureAggregation
from flsuite.messages import (
    POOLED,
    Broadcast,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    FitRequest,
    Outcome,
    TrainedFit,
)
from flsuite.models.layers import read_chain, read_layers
from flsuite.models.traits import parameter_groups, training_only
from flsuite.schedules import Clock, Fit, Schedule, Work
from flsuite.server.client_store import ClientStore
from flsuite.server.devices import Devices
from flsuite.server.round_log import RoundLog
from flsuite.server.update_store import UpdateStore
from flsuite.server.version_store import CopyCallbacks, VersionStore
from flsuite.state import (
    State,
    StateLayout,
    clone,
    load_,
    matches,
    mismatch,
    nbytes,
    non_finite,
)

__all__ = ["Federation"]

log = logging.getLogger("flsuite")


class Federation:
    """The global model, what server and clients remember, and the rules that change them.

    Args:
        model: Its weights are the first version of the global model.
        data: The samples of all clients, of the whole run.
        aggregator: The algorithm.
        schedule: Who trains when.
        batchnorm: What happens to buffers, see :class:`~flsuite.client.setup.WorkerSetup`.
        clients: What clients keep between their rounds.
        seed: The run's seed.
        versions: The older versions that clients in flight started from. Default: in memory.
        fit_samples: Returns the samples that a fit processes, given those of the client. Default:
            one pass.
        tools: What the server offers to the aggregator. Default: nothing.
        secure_sum: How the clients' contributions are masked. Default: not at all.

    Attributes:
        clock: Rounds done, virtual seconds, client updates and bytes.
        state: The shared part of the global model.
        initial: Entries for which a fit has no other value, see
            :class:`~flsuite.client.setup.WorkerSetup`.
        log: The updates and failures of the round in progress.
        layout: Names and groups of the entries that travel.
        memory: What the server half of the algorithm keeps, by part.
        artifacts: Networks that the algorithm has built beside the global model, by name.
        uplink: The way of updates from clients to the server.
        personal: Whether every client has a model of its own to be scored.
        frozen: Names of the entries that nobody trains.
        trained: The clients' models of another run. They stand for training in the first round.
    """

    def __init__(
        self,
        model: LightningModule,
        data: FederatedData,
        aggregator: Aggregator,
        schedule: Schedule,
        batchnorm: BatchNorm,
        clients: ClientStore,
        seed: int,
        versions: VersionStore | None = None,
        fit_samples: Callable[[int], int] = int,
        tools: ServerTools | None = None,
        secure_sum: SecureAggregation | None = None,
    ) -> None:
        self.data = data
        self.aggregator = aggregator
        self.schedule = schedule
        self.clients = clients
        self.seed = seed
        self.versions = versions or VersionStore(None)
        self.clock = Clock()
        self.log = RoundLog()
        self._fit_samples = fit_samples
        self._stands_for = 1  # clients per fit: more if a cohort is pooled
        self._started: dict[int, FitRequest] = {}
        self.trained: UpdateStore | None = None
        self.memory: dict[str, Any] = {}
        self.artifacts: dict[str, nn.Module] = {}
        self._devices = None if secure_sum is None else Devices(secure_sum)

        self._resident = model
        whole = clone(model.state_dict())
        shared, private, frozen = entries_of(model, aggregator, batchnorm)
        self.state = {name: whole[name] for name in shared}
        # Entries that predictions do not read leave the model the same for all clients.
        self.personal = any(not matches(name, training_only(model)) for name in private)
        self.frozen = frozen
        is_reset = batchnorm == "reset"
        self._reset = [name for name in buffer_names(model) if is_reset and name in self.state]
        self.initial = {name: whole[name] for name in (*private, *frozen, *buffer_names(model))}
        sizes = data.train_index.lengths().tolist()
        self.layout = _layout(model, self.state, data.spec.shape, sizes)
        self._tools = tools or ServerTools()
        schedule.configure(sizes, seed, self.work)
        self._tools = replace(self._tools, sampling=schedule.client_sampling)
        self._refuse_conflicts(secure_sum)
        aggregator.prepare(self.server)
        rule, awaited = aggregator.rule, schedule.awaited
        fault = rule.too_few(awaited) if awaited and isinstance(rule, CohortRule) else None
        if fault is not None:
            raise FlsuiteError(fault)

        classes = data.spec.num_classes
        masks = secure_sum is not None
        self.uplink = Uplink(aggregator, self.layout, self.state, classes, masks)
        self._bytes_up = self.uplink.chain.bytes_up
        if secure_sum is not None:
            held = self.uplink.held(self.state)
            secure_sum.configure(held, schedule.cohort)
            self._bytes_up = self.uplink.bytes_clear + secure_sum.size()

    @property
    def round(self) -> int:
        """Return the number of rounds done."""
        return self.clock.round

    @property
    def current(self) -> FederatedData:
        """Return the data as it is in the last round done.

        It may change from task to task.
        """
        return self.data.at(max(self.round, 1))

    def client_state(self, client: int | None) -> State:
        """Return a client's whole model: the shared part as it is now, and its own part.

        ``None`` is a client that never trained.
        """
        private = self.private(client) if client is not None else {}
        # The shared part last: it overrides the initial values of entries that travel.
        return {**self.initial, **private, **self.state}

    def private(self, client: int) -> State:
        """Return a client's private entries, none if it never trained."""
        private: State = self.clients[client].get("model", {})
        return private

    def work(self, client: int, number: int, started: float) -> Work:
        """Return the work of a fit that starts from the current version."""
        self.begin_round()
        samples = self._fit_samples(self.data.at(self.round + 1).samples(client))
        return Work(client, number, started, samples, *self._traffic)

    @property
    def may_sum_parts(self) -> bool:
        """Return whether a worker may add up what the clients of a part contribute."""
        return self.uplink.sums_parts and not self.schedule.is_asynchronous

    @property
    def server(self) -> Server:
        """Return what the server half of the algorithm sees in the round in progress."""
        return Server(
            self.state,
            self.layout,
            self._tools,
            self.round + 1,
            self.memory,
            self.log.server,
            self.artifacts,
        )

    def begin_round(self) -> None:
        """Begin the record of the next round, unless it has begun."""
        if self.log.round == self.round + 1:
            return
        self.log = RoundLog(self.round + 1, self.schedule.is_asynchronous)
        self._extras = self.aggregator.broadcast(self.server)
        size = nbytes(self.state)
        self._traffic = size + nbytes(self._extras), self._bytes_up

    def requests(
        self, starting: Sequence[Fit], callbacks: CopyCallbacks = tuple
    ) -> list[FitRequest]:
        """Return the requests of fits that start now.

        Args:
            starting: The fits. Those that were in flight before a resume start from an older
                version.
            callbacks: Returns the user's Lightning callbacks, as every fit is to see them.
        """
        self.begin_round()
        requests: list[FitRequest] = []
        for version, fits in groupby(starting, key=lambda fit: fit.version):
            requests += self._requests(list(fits), self._broadcast(version, callbacks))
        return requests

    def awaits(self, outcome: Outcome) -> bool:
        """Return whether the server waits for the outcome of this fit.

        A message that comes a second time, or after its round was closed, is named in the log.
        """
        sender = outcome.update if isinstance(outcome, ClientResult) else outcome
        # A message may claim anything, such as a client that is no number.
        number = sender.number if type(sender.number) is int else None
        start = self._started.get(sender.client) if type(sender.client) is int else None
        if start is not None and start.number == number:
            return True

        is_second = any(update.number == number for update in self.log.updates)
        log.warning(
            "round %d: a message of client %s was refused: %s",
            self.round + 1,
            sender.client,
            "it came a second time"
            if is_second
            else f"it came too late, after its fit of round {sender.round} was closed",
        )
        self._count_refused(sender)
        return False

    def accept(self, outcome: Outcome) -> Outcome:
        """Check an outcome that the server waits for, and record it.

        A faulty update becomes a failure, which names the client and the reason in the log.
        """
        sender = outcome.update if isinstance(outcome, ClientResult) else outcome
        start = self._started.pop(sender.client)
        outcome = self.check(outcome, start.broadcast)
        if isinstance(outcome, ClientResult) and self._devices is not None:
            fits = (*self.schedule.ended, *self.schedule.in_flight)
            outcome = self._devices.take(outcome, {fit.client for fit in fits})
        if isinstance(outcome, ClientFailure):
            outcome.number = start.number
            self._count_lost(start, sender)
            self.log.failures.append(outcome)
            log.warning(
                "round %d: client %d failed: %s", outcome.round, outcome.client, outcome.reason
            )
            log.debug("%s", outcome.details)
            return outcome

        update = outcome.update
        # 0 in a synchronous round, which is still in progress when its updates arrive.
        update.staleness = self.round - (start.broadcast.round - 1)
        update.number, update.base = start.number, self._base(start.broadcast)
        update.part = start.part
        self.clients[update.client] = outcome.memory
        self.clock.client_updates += self._stands_for
        self.clock.bytes += update.bytes_up + update.bytes_down
        self.log.updates.append(update.without_tensors())
        return outcome

    def check(self, outcome: Outcome, broadcast: Broadcast) -> Outcome:
        """Return the outcome unpacked, or a failure if its update must not reach the aggregator.

        Args:
            outcome: What came back.
            broadcast: The version that the client started from.
        """
        if isinstance(outcome, ClientFailure):
            return outcome

        # Checked before the aggregator sees it: one NaN would spoil the mean of all clients.
        update = outcome.update
        try:
            fault = update.fault(reads_numbers=False)
            if fault is None and update.partial is None:
                update = self.uplink.unpack(update, broadcast.state, broadcast.extras)
                outcome = replace(outcome, update=update)
            fault = fault or outcome.fault()
        except ValueError as error:
            fault = one_line(error)
        except (AttributeError, TypeError, RuntimeError) as error:  # tensors of a foreign kind
            fault = f"it cannot be read ({one_line(error, 200)})"
        if fault is None:
            return outcome
        if fault.startswith("extras"):
            fault += f" ({self.aggregator.name} says what clients send, by its parts' statistics)"
        steps = update.steps if type(update.steps) is int and update.steps > 0 else 0
        reason = f"its update was refused: {fault}"
        return ClientFailure(update.client, update.round, reason, steps=steps)

    def failure(self) -> Exception:
        """Return the error of a round in which no client came back.

        The user's settings are to blame if every client of the first round failed before its first
        step. After that round, it is known that clients can train.
        """
        failures = self.log.failures
        if self._devices is not None and (error := self._devices.failure(held=0)):
            return error
        if not failures:
            return FederationError(f"round {self.round + 1}: no client took part")

        first = failures[0]
        if not self.round and all(failure.before_first_step for failure in failures):
            return FlsuiteError(
                f"no client can train: client {first.client} failed before its first step with "
                f"{first.reason}"
            )
        return FederationError(
            f"round {first.round}: all {len(failures)} clients failed, client {first.client} with: "
            f"{first.reason}; the state of round {self.round} is kept"
        )

    def aggregate(self, updates: Iterator[ClientUpdate]) -> State:
        """Return the next global state, from the updates or from their sum alone.

        Raises:
            FederationError: If too few clients came back for secure aggregation.
        """
        if self._devices is None:
            return self.aggregator.aggregate(self.server, updates, self.uplink.summed)

        arrived = list(updates)
        # In this process clients train on the resident model, which still is the last one's.
        load_(self._resident.state_dict(), {**self.initial, **self.state})
        before = self.log.bytes
        gone = {fit.client for fit in self.schedule.ended if fit.fault == "gone"}
        masked = self._devices.sums([update.client for update in arrived], self.log, gone)
        self.clock.bytes += self.log.bytes - before
        sums = self.uplink.sums(masked, arrived, self.state)
        return self.aggregator.aggregate_sums(self.server, sums, arrived)

    def advance(self, state: State) -> None:
        """Make this the next version of the global model.

        Raises:
            FederationError: If it is not a state of this model, or not finite.
        """
        name = self.aggregator.name
        fault = mismatch(state, self.state)
        if fault is None and (bad := non_finite(state)):
            fault = f"{bad} is not finite; lower its learning rate"
        if fault is not None:
            raise FederationError(
                f"round {self.round + 1}: {name} returned a faulty state: {fault}; the state of "
                f"round {self.round} is kept"
            )

        # Who dropped out or came too late has received the model too. A failure has been counted.
        counted = {failure.number for failure in self.log.failures}
        lost = sum(f.outcome != "arrived" and f.number not in counted for f in self.schedule.ended)
        self.log.lost_down += lost * self._traffic[0]
        self.clock.bytes += self.log.lost_down + self.log.lost_up
        self.state = state
        self.clock.round += 1

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on from here.

        What clients keep and the frozen entries, which never change, are not in it.
        """
        return {
            "clock": dict(vars(self.clock)),
            "state": self.state,
            "initial": {k: v for k, v in self.initial.items() if k not in self.frozen},
            "aggregator": self.memory,
            "schedule": self.schedule.state_dict(),
            "clients": dict(self.clients.versions),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.clock = Clock(**content["clock"])
        self.log, self._started = RoundLog(), {}
        self.state = content["state"]
        self.initial |= content["initial"]
        self.memory = content["aggregator"]
        self.schedule.load_state_dict(content["schedule"])
        self.clients.restore(content["clients"])

    @property
    def versions_in_flight(self) -> set[int]:
        """Return the versions that clients in flight have started from."""
        return {fit.version for fit in self.schedule.in_flight if fit.outcome == "arrived"}

    def _count_lost(self, start: FitRequest, sender: ClientUpdate | ClientFailure) -> None:
        """Count the traffic of a client whose update is not used."""
        self.log.lost_down += nbytes(start.broadcast.state) + nbytes(start.broadcast.extras)
        self._count_refused(sender)

    def _count_refused(self, sender: ClientUpdate | ClientFailure) -> None:
        """Count the bytes of an update that has arrived and was refused, if they are a number."""
        if isinstance(sender, ClientUpdate) and isinstance(sender.bytes_up, int):
            self.log.lost_up += max(sender.bytes_up, 0)

    def _base(self, broadcast: Broadcast) -> State:
        """Return the state that a client's change is measured from."""
        if broadcast.state is self.state or not self._reset:
            return broadcast.state
        # Buffers that every fit resets have not moved from those of the old version. Their change
        # is the one from the buffers as they are now, so that they take the clients' mean.
        return {**broadcast.state, **{name: self.state[name] for name in self._reset}}

    def _requests(self, fits: list[Fit], broadcast: Broadcast) -> list[FitRequest]:
        """Return the requests of fits that start from one version."""
        if self.aggregator.pools:
            return [self._pooled_request(fits, broadcast)]
        requests, size = [], part_size(len(fits))
        for place, fit in enumerate(fits):
            part = None if self.schedule.is_asynchronous else place // size
            memory = self.clients.request_memory(fit.client)
            request = FitRequest(
                fit.number,
                fit.client,
                broadcast,
                memory,
                repeat=fit.repeat,
                part=part,
                fault=fit.fault,
            )
            self._started[fit.client] = replace(request, memory={})
            requests.append(replace(request, trained=self._trained(request)))
        return requests

    def _pooled_request(self, fits: list[Fit], broadcast: Broadcast) -> FitRequest:
        """Return one fit on the samples of all clients, with the batches of the cohort."""
        data = self.data.at(broadcast.round)
        # As many steps as the cohort takes together: the comparison is at equal numbers of steps.
        batches = sum(data.batches(fit.client) for fit in fits)
        request = FitRequest(fits[0].number, POOLED, broadcast, {}, batches)
        self._started[POOLED], self._stands_for = request, len(fits)
        return request

    def _refuse_conflicts(self, secure_sum: SecureAggregation | None) -> None:
        """Refuse parts of the run that do not go together."""
        parts = [
            Named("trainer.schedule", self.schedule),
            *self.aggregator.parts(),
            Named("model", _Travelling(self.layout)),
        ]
        parts.append(Named("trainer.secure_sum", secure_sum or _Unmasked()))
        refuse_conflicts(parts)

    def _trained(self, request: FitRequest) -> TrainedFit | None:
        """Return what this fit has led to in another run, if it is the same fit."""
        # Later rounds start from the model of this run.
        if self.trained is None or request.broadcast.round > 1 or request.repeat:
            return None
        return self.trained.read(1, request.client)

    def _broadcast(self, version: int, callbacks: CopyCallbacks) -> Broadcast:
        """Return what clients that start from a version receive, the same object for all."""
        broadcast = self.versions.get(version, callbacks)
        if broadcast is None:
            assert version == self.round, f"version {version} is not kept"
            broadcast = Broadcast(version + 1, self.state, self._extras, callbacks())
            self.versions.add(broadcast)
        return broadcast


class _Unmasked:
    """The absence of secure aggregation, as a part of the run."""

    name = "the server"
    withholds = {"secure aggregation": "sees every update"}


class _Travelling:
    """The entries of a model that travel, as a part of the run."""

    name = "the model"

    def __init__(self, layout: StateLayout) -> None:
        self.withholds = {}
        if not layout.parameters:
            self.withholds["shared parameters"] = "keeps all of them with the clients"
        if layout.buffers:
            self.withholds["parameters alone"] = (
                f"sends {layout.buffers[0]}, which is a buffer, and noise would spoil it"
            )


def _layout(
    model: LightningModule, state: State, shape: tuple[int, ...], sizes: list[int]
) -> StateLayout:
    # Tied weights travel under each of their names, as the state dict has them.
    named = model.named_parameters(remove_duplicate=False)
    parameters = tuple(name for name, _ in named if name in state)
    groups = {
        group: tuple(name for name in parameters if matches(name, patterns))
        for group, patterns in parameter_groups(model).items()
    }
    layers, others = read_layers(model, state.keys())
    chain, no_chain = read_chain(model, shape)
    if not {layer.name for layer in chain} <= {layer.name for layer in layers}:
        chain, no_chain = (), "a part of it stays with the clients, or two layers share weights"
    buffers = tuple(name for name in state if name not in parameters)
    return StateLayout(
        parameters, len(sizes), groups, sum(sizes), layers, others, chain, no_chain, buffers
    )
