"""Runs a federation of Flower nodes, equivalent to :meth:`FederatedTrainer.fit`."""

from flwr.serverapp import Grid

from flsuite.common.errors import FlsuiteError
from flsuite.data.module import FederatedDataModule
from flsuite.flower.engine import NodeEngine, NodeEvaluator, NodeStore
from flsuite.flower.nodes import Nodes
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
) -> None:
    """Run all rounds of ``trainer`` on the nodes of ``grid`` instead of its engine.

    A round has the same steps as in a fit, so the same seed gives the same weights as on any engine
    of flsuite. A node that is not connected, fails, or sends a faulty update is lost for the round.

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
    _refuse_unsupported(run)
    federation = run.federation
    nodes = Nodes(grid, federation.data.clients, timeout)
    engine = run.engine = NodeEngine(nodes, run.settings["client"].get("precision"))

    with opened(run):
        # From here on, private parts are on the nodes.
        federation.clients = NodeStore(bool(federation.entries.personal))
        if federation.entries.personal:
            run.evaluator = NodeEvaluator(run.evaluator)
        while not run.finished:
            engine.submit(run.requests(run.begin_round()))
            for outcome in federation.schedule.arrivals(engine, federation.clock, run.requests):
                run.accept(outcome)
            run.advance()
            run.evaluate()
            run.record()
            run.folder.table.append()
            run.store.settle()


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
