"""Runs a federation of Flower nodes, equivalent to :meth:`FederatedTrainer.fit`."""

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flsuite.common.errors import FlsuiteError
from flsuite.data.module import FederatedDataModule
from flsuite.flower.strategy import FlowerStrategy
from flsuite.models.base import ClientModel
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
