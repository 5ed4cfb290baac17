"""The part of the trainer that scores and predicts, and gives access to its run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Split
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.predictions import predict
from flsuite.runs.run import Run
from flsuite.runs.session import left_on_cpu
from flsuite.runs.summary import print_scores

if TYPE_CHECKING:
    import pandas as pd


class ScoringTrainer(Trainer):
    """A Trainer that scores the federation of a run.

    Attributes:
        run: The run of the last fit, or of the last request for scores.
    """

    run: Run | None = None
    datamodule: LightningDataModule | None
    _run_dir: Path | None = None  # as requested
    _scores: dict[str, float]  # of validate and test

    def prepare(
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
    ) -> Run:
        """Build everything that a round needs, without writing anything."""
        raise NotImplementedError

    def validate(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Score on validation data. The arguments are the same as for :meth:`test`."""
        return self._score("val", model, datamodule, ckpt_path, verbose)

    def test(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Score on test data.

        Args:
            model: Not needed after a fit.
            datamodule: Not needed after a fit.
            ckpt_path: ``last``, ``best`` (the round picked on validation data) or a path. Default:
                the state after a fit, else ``last`` in ``run_dir``, else the unchanged model.
            verbose: Whether to print the global scores.

        Returns:
            The global scores, then one dict per client.
        """
        return self._score("test", model, datamodule, ckpt_path, verbose)

    def predict(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
    ) -> Any:
        """Return predictions on the test split. The arguments are the same as for :meth:`test`.

        For a model with its own ``predict_step`` the result is Lightning's: a list with one
        prediction per batch, or one such list per client if each has its own model. Otherwise the
        result is class probabilities ``(n, classes)``, averaged over the clients' models if there
        are several.

        Class probabilities are written to ``predictions.csv`` in the run's folder, with the model's
        pictures. Other predictions are written to ``predictions.pt``.
        """
        run = self._restored(model, datamodule, ckpt_path)
        with left_on_cpu(run.evaluator.model):
            predictions, paths = predict(run.federation, run.evaluator, run.folder.path)
        if run.options.show and paths:
            print(f"predictions of round {run.round}: {', '.join(map(str, paths))}")
        return predictions

    @property
    def run_dir(self) -> Path | None:
        """Return the run's folder, or the requested one before the first fit."""
        return self.run.folder.path if self.run else self._run_dir

    @property
    def results(self) -> "pd.DataFrame | None":
        """Return the global numbers of each scored round, or ``None`` before the first fit.

        Rows are rounds, and columns are named as in :attr:`callback_metrics`. To plot it:
        ``trainer.results.plot(y=["val/accuracy", "test/accuracy"])``.
        """
        if self.run is None:
            return None
        import pandas as pd  # not needed during a run

        rounds = self.run.folder.table.by_round()
        return pd.DataFrame.from_dict(rounds, orient="index").rename_axis("round")

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Return the latest global numbers as ``<split>/<metric>``, such as ``val/accuracy``.

        Scores from :meth:`validate` and :meth:`test` replace scores from the fit.
        """
        numbers = {**self.run.folder.table.latest, **self._scores} if self.run else {}
        return {name: torch.tensor(value) for name, value in numbers.items()}

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Return :attr:`callback_metrics`, all of which go to the loggers."""
        return self.callback_metrics

    def _restored(
        self,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        ckpt_path: str | None,
    ) -> Run:
        """Return the run in the requested state."""
        run = self.run
        ours = {"model": self.lightning_module, "data": self.datamodule}
        if run is None:
            if model is None or datamodule is None:
                raise FlsuiteError("nothing has been fitted yet: pass model, datamodule, ckpt_path")
            if self._run_dir is None and ckpt_path not in (None, "last", "best"):
                self._run_dir = Path(str(ckpt_path)).parent.parent
            ckpt_path = ckpt_path or ("last" if self._run_dir else None)
            run = self.prepare(model, datamodule, ckpt_path)
            if ckpt_path is None:
                return run
        elif model not in (None, ours["model"]) or datamodule not in (None, ours["data"]):
            raise FlsuiteError("this trainer holds another federation: make a new FederatedTrainer")
        elif ckpt_path is None and (run.round or not self._run_dir):
            return run
        checkpoint = run.folder.find_checkpoint(ckpt_path or "last")
        if checkpoint is None:
            raise FlsuiteError(
                f"there is no last.ckpt in {run.folder.checkpoints}: fit first, or name another "
                "checkpoint with ckpt_path, such as best"
            )
        run.store.restore(checkpoint, to_train=False)
        return run

    def _score(
        self,
        split: Split,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        ckpt_path: str | None,
        verbose: bool,
    ) -> list[dict[str, float]]:
        run = self._restored(model, datamodule, ckpt_path)
        federation = run.federation
        with left_on_cpu(run.evaluator.model):
            scores = run.evaluator.scores(federation, split, federation.present(), details=True)
        if not scores:
            raise FlsuiteError("there is no validation data: set data.val_fraction above 0")
        whole = scores.pop(GLOBAL)
        self._scores |= {f"{split}/{name}": value for name, value in whole.items()}
        if run.options.show and verbose:
            print_scores(whole, split, run.round, run.summary.monitor)
        return [whole, *scores.values()]
