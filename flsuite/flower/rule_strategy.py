"""A Flower strategy for Flower clients without flsuite."""

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.part import Server, ServerTools
from flsuite.aggregators.rules.base import Rule
from flsuite.common.arguments import PositiveFloat, require
from flsuite.common.errors import FlsuiteError, log, one_line, require_instance
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import StateLayout, mismatch
from flsuite.flower.records import to_arrays, to_state

CLASS_COUNTS = "class-counts"
"""The metric with a client's training samples of each class, a list of whole numbers."""


class RuleStrategy(FedAvg):
    """The server half of an aggregator, for Flower clients that send their arrays.

    Clients answer as for Flower's FedAvg: with the trained arrays, and with their number of samples
    in the metric ``weighted_by_key``, ``num-examples`` by default. They need neither flsuite nor
    Lightning. Entries that a client keeps, such as a private encoder, are in no message. A rule
    that reads class counts, such as CMGA, finds them in the metric ``class-counts``. An answer with
    other shapes, with numbers that are not finite, or with another number of class counts than most
    answers is left out, and the log says why.

    Args:
        aggregator: An aggregator or a rule that measures and changes nothing on the clients.
        groups: Names of arrays by parameter group, such as ``prior_mean`` for CMGA.
        buffers: Names of arrays that are not parameters, such as running statistics.
        seed: Seed of the rules that draw.
        max_share: Largest share of the samples of a round's answers that one client may have. An
            answer with a larger one is left out. Default: no limit, because clients may differ.
        kwargs: Arguments of :class:`flwr.serverapp.strategy.FedAvg`.

    Raises:
        FlsuiteError: If the aggregator has a client half.
    """

    def __init__(
        self,
        aggregator: Aggregator | Rule,
        groups: Mapping[str, Collection[str]] | None = None,
        buffers: Collection[str] = (),
        seed: int = 0,
        max_share: float = 1.0,
        **kwargs: Any,
    ) -> None:
        aggregator = Aggregator.of(aggregator)
        require_instance(type(self).__name__, Aggregator, aggregator=aggregator)
        require(type(self).__name__, PositiveFloat | None, max_share=max_share)
        _refuse_client_half(aggregator)
        super().__init__(**kwargs)
        self.aggregator = aggregator
        self._groups = {name: tuple(names) for name, names in (groups or {}).items()}
        self._buffers, self._tools = frozenset(buffers), ServerTools(seed=seed)
        self._server: Server | None = None
        self._max_share = max_share

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Start a round from these arrays.

        Raises:
            FlsuiteError: Before the first round, if the aggregator cannot work with them.
        """
        state = to_state(arrays)
        if self._server is None or server_round == 1:
            names = {name for group in self._groups.values() for name in group} | self._buffers
            if unknown := sorted(names - state.keys()):
                raise FlsuiteError(
                    f"RuleStrategy: groups or buffers name {unknown[0]}, and the arrays are "
                    f"{', '.join(sorted(state))}"
                )
            layout = StateLayout(
                parameters=tuple(name for name in state if name not in self._buffers),
                clients=max(1, len(list(grid.get_node_ids()))),
                groups=self._groups,
            )
            self._server = Server(state, layout, self._tools)
            _refuse_statistics(self.aggregator, self._server)
            self.aggregator.prepare(self._server)
        self._server = replace(self._server, state=state, round=server_round)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next arrays, and the metrics of the clients and the aggregator."""
        assert self._server is not None
        # In the order of the nodes, so sums do not depend on which answer comes first.
        ordered = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        # Without Flower's own check, which ends the run at the first reply that differs.
        valid, _ = self._check_and_log_replies(ordered, is_train=True, validate=False)
        updates = {node: read for node, read in enumerate(map(self._read, valid)) if read}
        updates = self._without_outliers(updates)
        if not updates:
            return None, None
        self._server.metrics.clear()
        state = self.aggregator.aggregate(self._server, iter(updates.values()))
        numbers = _common_numbers([valid[node].content for node in updates])
        metrics = self.train_metrics_aggr_fn(numbers, self.weighted_by_key)
        metrics.update(self._server.metrics)
        return to_arrays(state), metrics

    def _read(self, reply: Message) -> ClientUpdate | None:
        assert self._server is not None
        node = reply.metadata.src_node_id
        try:
            update = _update(reply.content, node, self._server.round, self.weighted_by_key)
        except Exception as error:  # an answer may be anything
            fault: str | None = f"cannot be read ({type(error).__name__}: {one_line(error, 200)})"
        else:
            # Flower's arrays have no order of their own.
            update.state = {k: update.state[k] for k in self._server.state if k in update.state}
            different = mismatch(update.state, self._server.state)
            fault = f"has other arrays: {different}" if different else update.fault()
        if fault is None:
            return update
        self._warn(node, fault)
        return None

    def _without_outliers(self, updates: dict[int, ClientUpdate]) -> dict[int, ClientUpdate]:
        """Return the updates that are no outliers in their class counts and samples."""
        if not updates:
            return {}
        lengths = Counter(len(update.class_counts) for update in updates.values())
        usual, most = lengths.most_common(1)[0][0], sum(u.samples for u in updates.values())
        kept = {}
        for place, update in updates.items():
            counts, share = len(update.class_counts), update.samples / most
            if counts != usual:
                self._warn(update.client, f"has {counts} class counts; {usual} are expected")
            elif share > self._max_share:
                fault = f"claims {share:.0%} of the round's samples; max_share is {self._max_share}"
                self._warn(update.client, fault)
            else:
                kept[place] = update
        return kept

    def _warn(self, node: int, fault: str) -> None:
        assert self._server is not None
        what = self._server.round, node, one_line(fault, 500)
        log.warning("round %s: the answer of node %s was refused: %s", *what)


def _update(content: RecordDict, node: int, round: int, samples: str) -> ClientUpdate:
    (arrays,) = content.array_records.values()
    (metrics,) = content.metric_records.values()
    counts = metrics.get(CLASS_COUNTS, [])
    return ClientUpdate(
        client=node,
        round=round,
        samples=operator.index(metrics[samples]),  # a TypeError for a float or a list
        steps=0,
        class_counts=torch.tensor(counts, dtype=torch.int64),
        state=to_state(arrays),
    )


def _common_numbers(contents: list[RecordDict]) -> list[RecordDict]:
    """Return the metrics that all clients have sent, each a single number."""
    records = [next(iter(content.metric_records.values())) for content in contents]
    names = [
        name
        for name in records[0]
        if all(isinstance(record.get(name), (int, float)) for record in records)
    ]
    return [
        RecordDict({"metrics": MetricRecord({name: record[name] for name in names})})
        for record in records
    ]


def _refuse_client_half(aggregator: Aggregator) -> None:
    # bound() may choose another objective, or entries that stay with the clients.
    is_plain = type(aggregator).bound is Aggregator.bound
    is_plain &= type(aggregator.objective) is Objective and not aggregator.transforms
    if aggregator.pools or aggregator.private or not is_plain:
        raise FlsuiteError(
            f"{aggregator.name} acts on the clients, too, and these run code of their own; use "
            "flsuite.flower.app, whose clients are flsuite's, or another aggregator"
        )


def _refuse_statistics(aggregator: Aggregator, server: Server) -> None:
    if names := sorted(aggregator.statistics(server.layout, server.state)):
        raise FlsuiteError(
            f"{aggregator.name} reads {', '.join(names)}, which clients of flsuite measure; use "
            "flsuite.flower.app, or another aggregator"
        )
