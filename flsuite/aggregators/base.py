"""The base class of the aggregators."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from lightning.pytorch import Callback
from torch import nn

from flsuite.aggregators.tools import ServerTools
from flsuite.messages import ClientContext, ClientUpdate, FitAssignment
from flsuite.state import State, StateLayout, clone

__all__ = ["Aggregator"]


class Aggregator(ABC):
    """A federated algorithm: how updates become the next global model, and how its clients train.

    A subclass takes its parameters in ``__init__`` and keeps each under its own name.

    The server half is :meth:`plan`, :meth:`broadcast`, :meth:`expected_extras` and
    :meth:`aggregate`. The client half is :meth:`client_callbacks`. The client half may run in
    another process or on another machine, and :attr:`memory` stays with the server: the client half
    must not read it. It has the aggregator's parameters, :attr:`layout`, and what the server
    broadcasts.

    Attributes:
        private: Entries that this algorithm keeps with the client, beside those that the model
            declares.
        pooled: Whether one fit on the data of all clients replaces the clients' fits. Then nothing
            stays with a client.
        accepts_stale: Whether updates may come from clients that started from an older version of
            the global model. The server half must then read ``update.base`` or mix with the global
            state: a mean of stale models would replace it. The federation refuses an asynchronous
            schedule for an aggregator that does not accept stale updates.
        clear_extras: Names of the extras that are sent as they are beside a secure sum.
        psd_extras: Names of the extras whose matrices are symmetric positive semidefinite.
        extras_from_steps: Whether the extras follow from the trained model and the optimizer's
            steps alone. Noise on the steps, as that of ``DPSGD``, then covers them.
        memory: State of the server half from one round to the next: nested dicts of tensors and
            numbers. The checkpoint stores it, and no other attribute.
        metrics: Numbers about the current round, for the log. It is empty at the start of each
            round.
        layout: Names and groups of the entries that travel. :meth:`configure` sets it.
        grown: A network with other widths than the model's, which :meth:`aggregate` has built
            beside the global state. The run scores it and writes it to disk.
        tools: The other things that the server offers to :meth:`aggregate`. The federation sets
            them before :meth:`configure`. Clients do not have them.
    """

    private: ClassVar[tuple[str, ...]] = ()
    pooled: ClassVar[bool] = False
    accepts_stale: ClassVar[bool] = False
    clear_extras: tuple[str, ...] = ()
    psd_extras: tuple[str, ...] = ()
    extras_from_steps: ClassVar[bool] = False
    grown: nn.Module | None = None
    tools: ServerTools = ServerTools()
    layout: StateLayout
    memory: dict[str, Any]
    metrics: dict[str, float]

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model.

        It is called once, before the first round and before the memory of a checkpoint is loaded.
        """
        self.layout = layout
        # A new run of the same object must not see what an earlier run has left.
        self.memory = {}
        self.metrics = {}

    def plan(self, cohort: Sequence[int], batches: Sequence[int]) -> list[FitAssignment]:
        """Return the fits of a round.

        Args:
            cohort: Clients of the round, ascending.
            batches: Batches per local epoch of each of them.
        """
        return [FitAssignment(client) for client in cohort]

    def broadcast(self) -> dict[str, Any]:
        """Return what every client of the round receives beside the model.

        Its bytes count as traffic.
        """
        return {}

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        """Return a template of the extras that every update must carry.

        It is nested dicts of tensors and numbers. The server refuses an update whose extras differ
        from it in keys, shapes or dtypes.
        """
        # Nothing: an algorithm without a client half sends the model alone.
        return {}

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the client half of the algorithm: callbacks for the fit of one client."""
        return []

    @abstractmethod
    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        """Return the next global state.

        Args:
            global_state: The shared entries that the clients started from. They must not be
                changed.
            updates: Updates in a fixed order, each already checked. The iterator can be consumed
                once.
        """

    def too_few(self, updates: int) -> str | None:
        """Return why this number of updates is too small for an aggregation, or ``None``.

        The federation asks before the first round, with the updates that the schedule waits for.
        The text names the algorithm and says what to change.
        """
        return None

    def without_updates(self, global_state: State) -> State:
        """Return the next global state of a round whose cohort is empty by chance.

        Poisson sampling has such rounds. By default the model stays as it is.
        """
        return clone(global_state)

    @property
    def works_from_mean(self) -> bool:
        """Return whether the mean of the clients' models is all that the server half needs.

        It has :meth:`weight` and :meth:`from_mean`, and no other rule of its own in between.
        """
        mean, weight = self._owner("from_mean"), self._owner("weight")
        # A weight that a subclass has changed may be one that only the server knows.
        return mean <= min(self._owner("aggregate"), self._base - 1) and mean <= weight

    def weight(self, update: ClientUpdate) -> float:
        """Return the weight of an update in the mean.

        It is part of the client half. It may read what the client sends, and not what the server
        adds to an update: ``number``, ``staleness``, ``base``.
        """
        raise NotImplementedError

    def from_mean(self, global_state: State, mean: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the next global state from the mean of the clients' models.

        An aggregator that has it works the faster, the more clients there are: workers add up
        models where they are trained.

        Args:
            global_state: The shared entries that the clients started from.
            mean: The mean by :meth:`weight`. Integer entries have their maximum.
            updates: The clients' updates without their models.
        """
        raise NotImplementedError

    @property
    def works_from_sums(self) -> bool:
        """Return whether sums over clients are all that the server half needs of their updates.

        It has :meth:`summands` and :meth:`from_sums`, and no other rule of its own in between.
        """
        sums = max(self._owner("summands"), self._owner("from_sums"))
        # A subclass with another aggregate would silently be its base class.
        return sums <= min(self._owner("aggregate"), self._base - 1)

    def summands(self, update: ClientUpdate) -> State:
        """Return what the server adds up over clients, float tensors by name.

        It is part of the client half. An aggregator that has it, and :meth:`from_sums`, works with
        secure sums.
        """
        raise NotImplementedError

    def from_sums(self, global_state: State, sums: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the next global state from the sums of :meth:`summands`.

        Args:
            global_state: The shared entries that the clients started from.
            sums: The sum over clients of each summand, float64.
            updates: The clients' updates without their states, and with :attr:`clear_extras` alone.
        """
        raise NotImplementedError

    @property
    def _base(self) -> int:
        return type(self).__mro__.index(Aggregator)

    def _owner(self, method: str) -> int:
        """Return the place in the order of classes of the one that defines a method."""
        return next(n for n, cls in enumerate(type(self).__mro__) if method in vars(cls))

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""
        return self.memory

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the memory by that of a checkpoint."""
        self.memory = state
