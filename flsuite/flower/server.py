"""Runs a federation of Flower nodes, with a Flower strategy for any flsuite aggregator."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.messages import OwnScores
from flsuite.common.state import mismatch
from flsuite.data.module import FederatedDataModule
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.flower.engine import NodeEngine, NodeEvaluator, NodeStore, by_node, messages
from flsuite.flower.nodes import Nodes
from flsuite.flower.records import ARRAYS, numbers_in, pack, to_arrays, to_state
from flsuite.models.base import ClientModel
from flsuite.runs.run import Run
from flsuite.runs.session import opened
from flsuite.trainer import FederatedTrainer


def serve(
    grid: Grid,
    trainer: FederatedTrainer,
    model: ClientModel,
    datamodule: FederatedDataModule,
    timeout: float = 3600,
) -> Result:
    """Run all rounds of ``trainer`` on the nodes of ``grid`` instead of its engine.

    The run folder is the same as after a fit, without the checkpoints for a resume: client memories
    stay on their nodes, and Flower does not pass them to other runs. ``checkpoints/model.ckpt`` is
    the global model.

    Args:
        grid: One node per client.
        trainer: The settings of the run.
        model: Its untrained weights are the first global model.
        datamodule: The server scores on its test split, and plans with the clients' numbers of
            batches.
        timeout: Seconds that a round waits for the nodes' answers.

    Raises:
        FlsuiteError: If the request cannot be fulfilled.
        FederationError: If a round fails.
    """
    run = trainer.prepare(model, datamodule)
    if run.options.budget.rounds is None:
        raise FlsuiteError("under Flower the number of rounds must be given: set trainer.rounds")
    with opened(run):
        strategy = FlowerStrategy(run)

        def close_round(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            """Score and record a round. Flower's extra call before the first round is ignored."""
            if round == 0 or strategy.idle:
                return None
            run.evaluate()
            run.record()
            run.folder.table.append()
            run.store.settle()
            last = run.summary.last
            is_scored = last.get("round") == run.round
            return MetricRecord({k: float(v) for k, v in last.items()}) if is_scored else None

        return strategy.start(
            grid,
            strategy.initial_arrays(),
            num_rounds=run.options.budget.rounds,
            timeout=timeout,
            evaluate_fn=close_round,
        )


log = logging.getLogger("flsuite")


class FlowerStrategy(Strategy):
    """A federation whose clients are the nodes of a Flower grid.

    A round has the same steps as :meth:`FederatedTrainer.fit`, so the same seed gives the same
    weights as any engine of flsuite. A node that is not connected, fails, or sends a faulty update
    is lost for the round.

    Args:
        run: The run, before its first round. Its private parts then stay on the nodes.

    Raises:
        FlsuiteError: If the algorithm pools the clients' data, which no node has, or the schedule
            is not one of plain rounds.
    """

    def __init__(self, run: Run) -> None:
        _refuse_unsupported(run)
        federation = run.federation
        federation.clients = NodeStore(bool(federation.entries.personal))
        self._node_evaluator = NodeEvaluator(run.evaluator)
        if federation.entries.personal:
            run.evaluator = self._node_evaluator
        self._run = run
        self._federation = federation
        self._nodes = Nodes(federation.data.clients)
        self._engine = NodeEngine()
        self.idle = False
        self._asked: dict[int, int] = {}

    def initial_arrays(self) -> ArrayRecord:
        """Return the current global model, to be passed to :meth:`start`."""
        return to_arrays(self._federation.state)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        """Run Flower's own loop of rounds, continuing after an earlier start."""
        options = self._run.options
        budget = replace(options.budget, rounds=self._run.round + num_rounds)
        self._run.options = replace(options, budget=budget)
        return super().start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def summary(self) -> None:
        """Log what is about to run."""
        log.info(
            "%s of %d clients", self._federation.aggregator.name, self._federation.data.clients
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Start a round: draw the clients, and return the messages with training requests."""
        self.idle = self._run.finished
        if self.idle:
            return []
        self._take(arrays)
        nodes = self._nodes.online(grid) if self._run.round else self._nodes.all(grid)

        self._engine.submit(self._run.requests(self._run.begin_round()))

        contents = {}
        for request in self._engine.requests(nodes):
            order = {
                "client": request.client,
                "batches": request.batches,
                "round": request.broadcast.round,
                "number": request.number,
                "precision": self._run.settings["client"].get("precision"),
            }
            extras = pack("received", request.broadcast.extras)
            contents[request.client] = {ARRAYS: arrays, **extras, **pack("fit", order)}
        return messages(MessageType.TRAIN, nodes, server_round, config, contents)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next global model, and the metrics of the round.

        Raises:
            FederationError: If no usable update came back, or the next model is faulty.
            FlsuiteError: If a node reports in the first round that the request cannot be fulfilled.
        """
        if self.idle:
            return None, None
        run = self._run
        self._engine.deliver(replies)
        schedule = self._federation.schedule
        for outcome in schedule.arrivals(self._engine, run.federation.clock, run.requests):
            run.accept(outcome)
        run.advance()

        totals = dict(self._federation.log.metrics())[GLOBAL]
        metrics = MetricRecord({name: float(value) for name, value in totals.items()})
        return to_arrays(run.federation.state), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages with requests to score the clients' own models.

        Private parts never leave their node, so such models are scored there. Other models are
        scored on the server.
        """
        self._asked, self._node_evaluator.rows = {}, {}
        self._node_evaluator.asked = set()
        run, options = self._run, self._run.options
        is_due = run.finished or run.round % options.evaluate_every == 0
        if self.idle or not self._federation.entries.personal or not is_due:
            return []
        nodes = self._nodes.online(grid)
        clients = self._federation.data.clients
        asked = range(clients if run.finished else min(options.score_clients, clients))
        self._asked = {client: nodes[client] for client in asked if client in nodes}
        self._node_evaluator.asked = set(asked)
        precision = run.settings["client"].get("precision")
        request = pack("evaluation", {"round": run.round, "precision": precision})
        received = pack("received", self._federation.aggregator.broadcast(self._federation.server))
        content = {ARRAYS: arrays, **received, **request}
        contents = dict.fromkeys(asked, content)
        return messages(MessageType.EVALUATE, nodes, server_round, config, contents)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean over clients of their own models' scores on test data."""
        if not self._asked:
            return None
        answers = by_node(replies)
        rows: dict[str, dict[int, OwnScores]] = {}
        for client, node in self._asked.items():
            try:
                for split, scores in _read_scores(answers.get(node)).items():
                    rows.setdefault(split, {})[client] = scores
            except Exception as error:
                what = self._run.round, client, one_line(error, 500)
                log.warning("round %d: client %d was not scored: %s", *what)
        self._node_evaluator.rows = rows
        scored = self._node_evaluator.scores(self._federation, "test", sorted(self._asked))
        return MetricRecord(dict(scored[GLOBAL])) if scored else None

    def _take(self, arrays: ArrayRecord) -> None:
        """Take the global model from Flower: the initial one, or the last one passed to it."""
        state = to_state(arrays)
        if fault := mismatch(state, self._federation.state):
            raise FlsuiteError(
                f"initial_arrays are not this model's: {fault}; take strategy.initial_arrays()"
            )
        self._federation.state = state


def _read_scores(answer: Message | None) -> dict[str, OwnScores]:
    """Return the scores of a node's own model, by split."""
    if answer is None or answer.has_error():
        raise ValueError("no answer" if answer is None else answer.error.reason)
    fields: dict[str, dict[str, dict[str, float]]] = {}
    for name, numbers in answer.content.metric_records.items():
        split, field = name.split(".")
        fields.setdefault(split, {})[field] = numbers_in(numbers)
    return {split: OwnScores(**own) for split, own in fields.items()}


def _refuse_unsupported(run: Run) -> None:
    """Refuse settings that a round of Flower cannot carry out."""
    federation, declarations = run.federation, run.federation.schedule.declarations
    name = federation.aggregator.name
    faults = {
        f"{name} trains on all clients' data, which no node of Flower holds": (
            federation.aggregator.pools
        ),
        "under Flower rounds are synchronous, and nodes come and go by themselves: set "
        "trainer.schedule to Synchronous without availability, over_selection and deadline": (
            declarations.is_asynchronous or declarations.may_lose
        ),
        "under Flower a round without a client would end the run; set trainer.schedule.sampling to "
        "uniform": declarations.may_be_empty,
        "secure aggregation exchanges keys and shares before and after training, but a round of "
        "Flower has one message to a node and one answer; leave out trainer.secure_sum, or run it "
        "with flsuite fit": federation.uplink.masks,
        "under Flower the clients' models are on their nodes; leave out keep_updates and "
        "from_updates": run.reuse,
        "under Flower clients do not adapt after the last round, and all of them take part; leave "
        "out trainer.adapt_epochs and data.unseen_clients": (
            run.options.adapt_epochs or federation.data.unseen
        ),
    }
    for fault, is_so in faults.items():
        if is_so:
            raise FlsuiteError(fault)
