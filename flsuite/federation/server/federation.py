"""The federation: its state, and the step from one version of the global model to the next."""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from lightning.pytorch import LightningModule

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.exchange.secure import SecureAggregation
from flsuite.aggregators.objectives.checks import own_entries_of
from flsuite.aggregators.part import (
    Named,
    Server,
    ServerTools,
    model_and_data,
    named,
    refuse_conflicts,
)
from flsuite.aggregators.state_check import StateCheck
from flsuite.aggregators.uplink import Uplink, part_size
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import POOLED, Broadcast, ClientUpdate, FitRequest, Outcome
from flsuite.common.state import State, clone, load_, mismatch, nbytes, non_finite
from flsuite.data.federated import FederatedData
from flsuite.data.loader import batch_bounds
from flsuite.federation.client.entries import Entries, layout_of
from flsuite.federation.engines.base import EngineChoice
from flsuite.federation.schedules.base import Clock, Fit, Schedule
from flsuite.federation.server.arrivals import Arrivals, RoundLog
from flsuite.federation.server.devices import Devices
from flsuite.federation.server.stores import ClientStore, CopyCallbacks, VersionStore

TrainOnServer = Callable[["Federation", State, int], State]
"""Returns the shared state after a fit on the server's own samples, in a round."""


class Federation:
    """The global model, the memories of server and clients, and how they are updated.

    Args:
        model: Its weights are the first version of the global model.
        data: The samples of all clients, for the whole run.
        aggregator: The algorithm.
        schedule: Who trains when.
        entries: Which entries of the model are shared and which are private.
        clients: The clients' memories between rounds.
        seed: The run's seed.
        versions: The older versions that clients in flight started from.
        fit_samples: Returns the samples that a fit processes, given the client's sample count.
        tools: The tools that the server offers to the aggregator.
        secure_sum: The secure aggregation protocol, if any.
        train: Trains the shared state on the server's own samples, in a round.
        max_share: Largest share of all training samples that a client may claim. Default: that of
            the largest client.
        absent: Clients that are drawn like all others but never train.
        engine: Where clients train, if it is known.

    Attributes:
        clock: Rounds, virtual seconds, client updates and bytes so far.
        state: The shared part of the global model.
        initial: Initial values of entries that a fit receives from nowhere else, see
            :class:`~flsuite.federation.client.setup.WorkerSetup`.
        first_round: The first round that this run trains itself. A fork begins later.
        log: The updates and failures of the current round.
        uplink: Packs and unpacks the updates that clients send.
    """

    def __init__(
        self,
        model: LightningModule,
        data: FederatedData,
        aggregator: Aggregator,
        schedule: Schedule,
        entries: Entries,
        clients: ClientStore,
        seed: int,
        versions: VersionStore,
        fit_samples: Callable[[int], int],
        tools: ServerTools,
        secure_sum: SecureAggregation | None,
        train: TrainOnServer,
        max_share: float | None = None,
        absent: Collection[int] = (),
        engine: EngineChoice | None = None,
    ) -> None:
        self.data = data
        self.aggregator = aggregator
        self.schedule = schedule
        self.entries = entries
        self.clients = clients
        self.versions = versions
        self.clock = Clock()
        self.first_round = 1
        self.log = RoundLog()
        self._fit_samples = fit_samples
        self._resident = model

        whole = clone(model.state_dict())
        self.state = {name: whole[name] for name in entries.shared}
        untrained = (*entries.private, *entries.frozen, *entries.buffers)
        self.initial = {name: whole[name] for name in untrained}

        sizes = data.train.rows.lengths()[: data.clients].tolist()
        _refuse_absent(absent, data.clients, aggregator)
        self._absent = absent
        needs_chain = "a chain of Conv2d and Linear" in aggregator.rule.needs
        layout = layout_of(model, entries, data.spec.shape, sizes, needs_chain)
        schedule.configure(sizes, seed, self._work, absent)
        own = None if "train" in tools.missing else partial(train, self)
        tools = replace(tools, sampling=schedule.client_sampling, train=own)
        self._server = Server({}, layout, tools)  # its state and round are set on access
        self._refuse_conflicts(secure_sum, engine)
        aggregator.prepare(self.server)
        self._state_check = StateCheck(aggregator)
        expected = schedule.expected_updates
        if expected and (fault := aggregator.rule.too_few(expected)):
            raise FlsuiteError(fault)

        masks = secure_sum is not None
        most = max(sizes) if max_share is None else math.ceil(max_share * sum(sizes))
        classes = data.spec.num_classes
        self.uplink = Uplink(aggregator, layout, self.state, classes, masks, most)
        self._bytes_up = self.uplink.pipeline.bytes_up
        self._devices: Devices | None = None
        if secure_sum is not None:
            self._devices = Devices(secure_sum)
            secure_sum.configure(self.uplink.unmasked, schedule.cohort)
            self._bytes_up = self.uplink.bytes_clear + secure_sum.size()
        self._arrivals = Arrivals(self.uplink, schedule, self._devices)

    @property
    def server(self) -> Server:
        """Return the server's view of the current round, for the algorithm."""
        round, metrics = self.clock.round + 1, self.log.server
        return replace(self._server, state=self.state, round=round, metrics=metrics)

    def client_state(self, client: int | None) -> State:
        """Return a client's whole model: the current shared part and its private part.

        ``None`` stands for a client without private entries.
        """
        own = self.own_entries(client) if client is not None else {}
        # In order of precedence: initial entries, then the server's, then the client's.
        return {**self.initial, **self.state, **own}

    def own_entries(self, client: int) -> State:
        """Return the entries in which a client's own model differs from the global model."""
        private, notes = self.clients.private(client), self.clients[client].get("objective", {})
        if not self.entries.has_own_models:
            return private
        received = self.aggregator.broadcast(self.server).get("objective", {})
        model, read = {**self.initial, **self.state}, (self.state, received, notes)
        return {**private, **own_entries_of(self.aggregator.objective, *read, model)}

    def open_round(self) -> None:
        """Begin the record of the next round, and the algorithm's part in it."""
        round, schedule = self.clock.round + 1, self.schedule
        self.log = RoundLog(round, schedule.is_asynchronous, is_first=round == self.first_round)
        self._extras = self.aggregator.broadcast(self.server)
        self._traffic = nbytes(self.state) + nbytes(self._extras), self._bytes_up
        self._sent: Broadcast | None = None
        self._reduction = self.aggregator.begin(self.server)
        self._arrived: list[ClientUpdate] = []  # under secure aggregation

    def send(self, starting: Sequence[Fit], callbacks: CopyCallbacks = tuple) -> list[FitRequest]:
        """Return the requests of fits that start now.

        Args:
            starting: The fits. Fits that were in flight before a resume start from an older
                version.
            callbacks: Returns copies of the user's Lightning callbacks for the fits.
        """
        requests: list[FitRequest] = []
        for version, fits in groupby(starting, key=lambda fit: fit.version):
            requests += self._requests(list(fits), self._broadcast(version, callbacks))
        for request in requests:
            self._arrivals.expect(request)
        return requests

    def check(self, outcome: Outcome) -> Outcome | None:
        """Return an outcome as the server reads it. Record it, and keep the client's memory.

        A faulty update becomes a failure. The log names the client and the reason.

        Returns:
            ``None`` for a message that the server does not wait for, such as a second copy.
        """
        checked = self._arrivals.receive(outcome, self.log)
        if checked is None:
            return None
        start, outcome = checked
        if not outcome.failed:
            update = outcome.update
            update.base = self._base(start.broadcast)
            self.clients[update.client] = outcome.memory
            self.clock.client_updates += start.stands_for
            self.clock.bytes += update.bytes_up + update.bytes_down
        return outcome

    def add(self, update: ClientUpdate) -> None:
        """Add a checked update to the round."""
        if self._devices is None:
            self._reduction.add(update)
        else:
            self._arrived.append(update)  # without its model, until the sum is unmasked

    def aggregate(self) -> None:
        """Make the updates of the round the next version of the global model.

        Raises:
            FlsuiteError: If no client can train with the user's settings.
            FederationError: If no usable update arrived, too few for the algorithm, or if the next
                state is faulty.
        """
        self._arrivals.require_updates(self.log)
        if self._devices is not None:
            for update in self._unmasked(self._devices):
                self._reduction.add(update)
        state = self.aggregator.finish(self.server, self._reduction)
        del self._reduction  # its sums would stay until the next round
        self._state_check.check("at the server", "server.memory")
        self._refuse_faulty(state)

        # Dropped and late clients received the model too. Failures are already counted.
        counted = {failure.number for failure in self.log.failures}
        lost = sum(f.outcome != "arrived" and f.number not in counted for f in self.schedule.ended)
        self.log.lost_down += lost * self._traffic[0]
        self.clock.bytes += self.log.lost_down + self.log.lost_up
        self.state = state
        self.clock.round += 1

    def _unmasked(self, devices: Devices) -> Iterator[ClientUpdate]:
        """Yield the updates of the round, whose last one carries the unmasked sum."""
        # With an in-process engine, the resident model still holds the last client's weights.
        load_(self._resident.state_dict(), {**self.initial, **self.state})
        before = self.log.bytes
        gone = {fit.client for fit in self.schedule.ended if fit.fault == "gone"}
        masked, report = devices.sums([update.client for update in self._arrived], gone)
        self.log.count(report)
        self.clock.bytes += self.log.bytes - before
        return self.uplink.summed(masked, self._arrived)

    def _refuse_faulty(self, state: State) -> None:
        """Refuse a next state that is not a state of this model, or not finite."""
        fault = mismatch(state, self.state)
        if fault is None and (bad := non_finite(state)):
            fault = f"{bad} is not finite; lower its learning rate"
        if fault is not None:
            done, name = self.clock.round, self.aggregator.name
            raise FederationError(
                f"round {done + 1}: {name} returned a faulty state: {fault}; the state of round "
                f"{done} is kept"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return all state that is needed to continue from here.

        The clients' memories and the frozen entries, which never change, are not included.
        """
        return {
            "clock": dict(vars(self.clock)),
            "state": self.state,
            "initial": {k: v for k, v in self.initial.items() if k not in self.entries.frozen},
            "aggregator": self._server.memory,
            "schedule": self.schedule.state_dict(),
            "clients": dict(self.clients.versions),
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.clock = Clock(**content["clock"])
        self.log = RoundLog()
        self._arrivals.forget()
        self.state = content["state"]
        self.initial |= content["initial"]
        self._server = replace(self._server, memory=content["aggregator"])
        if content["schedule"] is not None:  # a fork with another schedule
            self.schedule.load_state_dict(content["schedule"])
        self.clients.restore(content["clients"])

    def _work(self, client: int) -> tuple[int, int, int]:
        """Return the samples, bytes down and bytes up of a fit from the current version."""
        samples = self._fit_samples(self.data.at(self.clock.round + 1).samples(client))
        return samples, *self._traffic

    def _base(self, broadcast: Broadcast) -> State:
        """Return the state from which a client's change is measured."""
        reset = self._server.layout.reset
        if broadcast.state is self.state or not reset:
            return broadcast.state
        # Buffers that every fit resets do not depend on the old version. Their change is taken
        # from the current buffers, so that they become the clients' mean.
        return {**broadcast.state, **{name: self.state[name] for name in reset}}

    def present(self, below: int | None = None) -> Sequence[int]:
        """Return the clients that are part of the run.

        Args:
            below: Only clients with a lower number. Default: all.
        """
        everyone = self._present
        return everyone if below is None else everyone[: bisect_left(everyone, below)]

    @cached_property
    def _present(self) -> Sequence[int]:
        clients, absent = range(self.data.clients), self._absent
        return [client for client in clients if client not in absent] if absent else clients

    def first_requests(self, callbacks: CopyCallbacks, most: int) -> list[FitRequest]:
        """Return fits of some clients from the current version, to measure their time.

        They do not start: the schedule and the clock do not know of them.

        Args:
            callbacks: Copies the callbacks of a fit.
            most: Maximum number of fits, of clients at even distances.
        """
        extras = self.aggregator.broadcast(self.server)
        broadcast = Broadcast(self.clock.round + 1, self.state, extras, callbacks())
        present = self.present()
        clients = present[:: max(1, len(present) // most)][:most]
        return [FitRequest(n, client, broadcast, {}) for n, client in enumerate(clients)]

    def _requests(self, fits: list[Fit], broadcast: Broadcast) -> list[FitRequest]:
        """Return the requests of fits that start from the same version."""
        if self.aggregator.pools:
            return [self._pooled_request(fits, broadcast)]
        size = part_size(len(fits))
        is_asynchronous = self.schedule.is_asynchronous
        return [
            FitRequest(
                fit.number,
                fit.client,
                broadcast,
                self.clients[fit.client],
                repeat=fit.repeat,
                part=None if is_asynchronous else place // size,
                fault=fit.fault,
            )
            for place, fit in enumerate(fits)
        ]

    def _pooled_request(self, fits: list[Fit], broadcast: Broadcast) -> FitRequest:
        """Return one fit on the samples of all clients, with the batches of the cohort."""
        data = self.data.at(broadcast.round)
        # As many steps as the whole cohort, for a comparison at equal numbers of steps.
        batches = sum(len(batch_bounds(data.samples(fit.client), data.batch_size)) for fit in fits)
        return FitRequest(fits[0].number, POOLED, broadcast, {}, batches, stands_for=len(fits))

    def _refuse_conflicts(
        self, secure_sum: SecureAggregation | None, engine: EngineChoice | None
    ) -> None:
        """Refuse parts of the run that cannot be combined."""
        refuse_conflicts(
            [
                named("trainer.schedule", self.schedule),
                *self.aggregator.named_parts(),
                *model_and_data(self._server),
                named("trainer.secure_sum", secure_sum) if secure_sum else _UNMASKED,
                named("trainer.engine", engine),
            ]
        )

    def _broadcast(self, version: int, callbacks: CopyCallbacks) -> Broadcast:
        """Return the broadcast of a version, the same object for all clients that start from it."""
        if version == self.clock.round:
            if self._sent is None:
                self._sent = Broadcast(version + 1, self.state, self._extras, callbacks())
                if self.log.is_asynchronous:  # clients in flight will need it
                    self.versions.add(self._sent)
            return self._sent
        broadcast = self.versions.get(version, callbacks)
        assert broadcast is not None, f"version {version} is not kept"
        return broadcast


def _refuse_absent(absent: Collection[int], clients: int, aggregator: Aggregator) -> None:
    """Refuse absent clients that do not exist, that are all, or whose samples are used anyway."""
    if absent and aggregator.pools:
        raise FlsuiteError(
            f"trainer.without: {aggregator.name} trains on the samples of all clients; leave it out"
        )
    if strangers := [client for client in absent if not 0 <= client < clients]:
        raise FlsuiteError(
            f"trainer.without: there is no client {strangers[0]}; there are 0 to {clients - 1}"
        )
    if clients == len({*absent}):
        raise FlsuiteError("trainer.without: no client is left; name fewer")


_UNMASKED = Named(
    "trainer.secure_sum",
    "the server",
    withholds={"secure aggregation": "sees every update; set trainer.secure_sum to PairwiseMasks"},
)
