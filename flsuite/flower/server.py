"""A federation of Flower nodes, run as :meth:`FederatedTrainer.fit` runs one."""

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flsuite.data.module import FederatedDataModule
from flsuite.flower.strategy import FlowerStrategy
from flsuite.models.base import ClientModel
from flsuite.server.evaluation import Scores, Split
from flsuite.trainer import FederatedTrainer

__all__ = ["serve"]


def serve(
    grid: Grid,
    trainer: FederatedTrainer,
    model: ClientModel,
    datamodule: FederatedDataModule,
    timeout: float = 3600,
) -> Result:
    """All rounds of ``trainer``, with the nodes of ``grid`` in the place of its engine.

    The run's folder is as after a fit, without the checkpoints to go on from: what clients keep stays on their nodes, and
    Flower gives it to no other run. ``checkpoints/model.ckpt`` is the global model.

    Args:
        grid: Has one node for each client.
        trainer: With the settings of the run.
        model: The global model; its untrained weights are the first round's.
        datamodule: The data: the server scores on its test split, and plans with the clients' numbers of batches.
        timeout: Seconds that a round waits for the nodes' answers.

    Raises:
        FlsuiteError: If the request cannot be met.
        FederationError: If a round fails altogether.
    """
    with trainer.running(model, datamodule) as run:
        strategy = FlowerStrategy(
            run.federation,
            trainer.notify,
            lambda: bool(trainer.should_stop),
            trainer.evaluate_every,
            trainer.score_clients,
        )

        def scored(part: Split, clients: int, details: bool = False) -> Scores:
            return strategy.scores.get(part, {})

        def record(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if round == 0 or strategy.idle:
                return None
            trainer.record_round(run, scored if run.federation.personal else None)
            run.folder.table.flush()
            last = run.summary.last
            return (
                MetricRecord({k: float(v) for k, v in last.items()})
                if last.get("round") == trainer.round
                else None
            )

        return strategy.start(
            grid,
            strategy.initial_arrays(),
            num_rounds=trainer.rounds,
            timeout=timeout,
            evaluate_fn=record,
        )
