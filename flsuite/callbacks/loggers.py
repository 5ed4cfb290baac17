"""The federation's metrics in Lightning's loggers, with the round as their axis."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.loggers import WandbLogger

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.runs.run import Run

__all__ = ["RoundLogger"]


class RoundLogger(FederationCallback):
    """Sends every round's metrics to all loggers, as ``<split>/<metric>``.

    Virtual seconds, client updates and bytes so far go with them, so that a chart can have any of
    these as its horizontal axis.

    Weights & Biases gets one run per experiment, with the settings, a picture of the partition and,
    where times are virtual, a picture of who trained when.
    A resumed federation goes on in the same W&B run. A round that was logged but not saved when the
    run was killed is logged again.

    Args:
        log_model: Whether to upload the final model as an artifact.
        per_client: Largest number of clients that are logged one by one. Mean, worst and spread are
            always logged.
    """

    affects: ClassVar[Affects] = "nothing"

    def __init__(self, log_model: bool = False, per_client: int = 20) -> None:
        self.log_model = log_model
        self.per_client = per_client
        self._wandb_id: str | None = None

    def on_federation_start(self, run: Run) -> None:
        if run.round == 0:
            self._wandb_id = None
        for logger in run.loggers:
            if isinstance(logger, WandbLogger):
                self._start_wandb(logger, run)
            logger.log_hyperparams(run.settings)

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        is_few = run.clients <= self.per_client
        sent = {k: v for k, v in metrics.items() if is_few or not k.startswith("client/")}
        sent |= {
            "virtual_s": run.clock.seconds,
            "client_updates": run.clock.client_updates,
            "bytes": run.clock.bytes,
        }
        for logger in run.loggers:
            if isinstance(logger, WandbLogger):
                # Never with step=, which would bind rows to W&B's own counter.
                logger.log_metrics({**sent, "round": round})
            else:
                logger.log_metrics(sent, step=round)

    def on_federation_end(self, run: Run) -> None:
        for logger in run.loggers:
            if isinstance(logger, WandbLogger):
                self._finish_wandb(logger, run)
            logger.finalize(run.status)

    def state_dict(self) -> dict[str, Any]:
        return {"wandb_id": self._wandb_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._wandb_id = state_dict["wandb_id"]

    def _start_wandb(self, logger: WandbLogger, run: Run) -> None:
        # A resumed federation goes on in its W&B run, unless the logger has opened one already.
        if self._wandb_id is not None and logger._experiment is None:
            logger._wandb_init["id"] = logger._id = self._wandb_id
        experiment = logger.experiment
        self._wandb_id = experiment.id
        experiment.define_metric("round")
        experiment.define_metric("*", step_metric="round")
        if run.round == 0:
            self._log_partition(logger, run)

    @staticmethod
    def _log_partition(logger: WandbLogger, run: Run) -> None:
        import wandb
        from matplotlib import pyplot

        from flsuite.analysis import partition_figure
        from flsuite.runs.partition import partition_table

        figure = partition_figure(partition_table(run.federation.data))
        logger.experiment.log({"partition": wandb.Image(figure), "round": 0})
        pyplot.close(figure)

    @staticmethod
    def _log_timeline(logger: WandbLogger, run: Run) -> None:
        import wandb
        from matplotlib import pyplot

        from flsuite.analysis import read_timeline, timeline_figure

        if run.folder.path is None or not run.round or not run.federation.schedule.is_virtual:
            return
        timeline = read_timeline(run.folder.path)
        if timeline.empty:
            return
        figure = timeline_figure(timeline)
        logger.experiment.log({"timeline": wandb.Image(figure), "round": run.round})
        pyplot.close(figure)

    def _finish_wandb(self, logger: WandbLogger, run: Run) -> None:
        import wandb

        self._log_timeline(logger, run)
        model = run.folder.checkpoints / "model.ckpt" if run.folder.checkpoints else None
        if self.log_model and isinstance(model, Path) and model.exists():
            artifact = wandb.Artifact(f"model-{logger.experiment.id}", type="model")
            artifact.add_file(str(model))
            logger.experiment.log_artifact(artifact)
        # The next run of this process must not continue this one.
        logger.experiment.finish(exit_code=0 if run.status == "success" else 1)
        logger._experiment = None
