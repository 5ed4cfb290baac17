"""The federation's metrics in Lightning's loggers, with the round as their axis."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import WandbLogger

from flsuite.callbacks.base import FederationCallback

if TYPE_CHECKING:
    from flsuite.trainer import FederatedTrainer

__all__ = ["RoundLogger"]


class RoundLogger(FederationCallback):
    """Sends every round's metrics to all loggers of the trainer, as ``<split>/<metric>``.

    Weights & Biases gets one run per experiment with the config and the partition's picture; a resumed federation goes on in
    the same W&B run. A round that was logged but not yet saved when the run was killed is logged again.

    Args:
        log_model: Upload the final model as an artifact.
        per_client: Log clients one by one up to this many clients; mean, worst and spread are always there.
    """

    def __init__(self, log_model: bool = False, per_client: int = 20) -> None:
        self.log_model = log_model
        self.per_client = per_client
        self._wandb_id: str | None = None

    def on_federation_start(self, trainer: "FederatedTrainer") -> None:
        if trainer.round == 0:
            self._wandb_id = None
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                self._start_wandb(logger, trainer)
            logger.log_hyperparams(trainer.describe())

    def on_round_recorded(
        self, trainer: "FederatedTrainer", round: int, metrics: Mapping[str, float]
    ) -> None:
        few = trainer.clients <= self.per_client
        kept = {
            name: value for name, value in metrics.items() if few or not name.startswith("client/")
        }
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_metrics(
                    {**kept, "round": round}
                )  # never with step=: it would bind rows to W&B's own counter
            else:
                logger.log_metrics(kept, step=round)

    def on_federation_end(self, trainer: "FederatedTrainer") -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                self._finish_wandb(logger, trainer)
            logger.finalize("success")

    def state_dict(self) -> dict[str, Any]:
        return {"wandb_id": self._wandb_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._wandb_id = state_dict["wandb_id"]

    def _start_wandb(self, logger: WandbLogger, trainer: "FederatedTrainer") -> None:
        if self._wandb_id is not None and logger._experiment is None:
            logger._wandb_init["id"] = logger._id = self._wandb_id
        run = logger.experiment
        self._wandb_id = run.id
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        if trainer.round == 0:
            self._log_partition(logger, trainer)

    @staticmethod
    def _log_partition(logger: WandbLogger, trainer: "FederatedTrainer") -> None:
        import wandb
        from matplotlib import pyplot

        from flsuite.analysis import partition_figure, partition_table

        assert trainer.federation is not None
        figure = partition_figure(partition_table(trainer.federation.data))
        logger.experiment.log({"partition": wandb.Image(figure), "round": 0})
        pyplot.close(figure)

    def _finish_wandb(self, logger: WandbLogger, trainer: "FederatedTrainer") -> None:
        import wandb

        model = (
            trainer.run_folder.checkpoints / "model.ckpt"
            if trainer.run_folder.checkpoints
            else None
        )
        if self.log_model and isinstance(model, Path) and model.exists():
            artifact = wandb.Artifact(f"model-{logger.experiment.id}", type="model")
            artifact.add_file(str(model))
            logger.experiment.log_artifact(artifact)
        logger.experiment.finish()  # the next run of this process must not continue this one
        logger._experiment = None
