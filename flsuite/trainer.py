"""The federated trainer: a Lightning Trainer whose fit is rounds of per-client fits."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from flsuite.aggregators import Aggregator, FedAvg
from flsuite.callbacks import FederationCallback, RoundLogger, RoundProgress, TaskMatrix
from flsuite.client.lr_decay import LRDecay
from flsuite.client.runner import Buffers, WorkerSetup
from flsuite.client.trainer import quiet_lightning
from flsuite.data.module import FederatedDataModule
from flsuite.engines import Engine, InProcess
from flsuite.errors import FlsuiteError
from flsuite.metrics import HIGHER_IS_BETTER
from flsuite.models.base import ClientModel
from flsuite.random import seed_process
from flsuite.runs.folder import RunFolder, new_run_dir
from flsuite.runs.run import Run
from flsuite.runs.settings import defaults, describe
from flsuite.runs.summary import print_scores
from flsuite.schedules import Schedule, Synchronous
from flsuite.server.client_store import ClientStore
from flsuite.server.evaluation import GLOBAL, Evaluator, Scores, Split
from flsuite.server.federation import Federation

__all__ = ["FederatedTrainer"]

log = logging.getLogger("flsuite")

_DEFAULTS = defaults(Trainer)
_FEDERATIONS_OWN = {  # Trainer arguments about what a client's fit has none of: validation, summaries
    "check_val_every_n_epoch",
    "enable_model_summary",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_val_batches",
    "num_sanity_val_steps",
    "val_check_interval",
}


class FederatedTrainer(Trainer):
    """Runs a federation.

    Every further argument is one of :class:`lightning.pytorch.Trainer` and holds for each client's fit: ``max_epochs`` counts
    local epochs; ``precision``, ``gradient_clip_val``, ``accelerator`` mean what they always mean. Loggers belong to the
    federation. A callback may have the federation's hooks (:class:`~flsuite.callbacks.FederationCallback`), Lightning's own,
    or both.

    Args:
        rounds: Rounds of the federation.
        aggregator: The algorithm; default FedAvg weighted by samples.
        schedule: Who trains when; default everybody in every round.
        engine: Where clients train; default in this process.
        max_epochs: Local epochs of a client's fit.
        evaluate_every: Rounds between two evaluations; the last round is always evaluated.
        monitor: The score on validation data that picks the best round.
        score_clients: Clients scored one by one at each evaluation; at the last one, all of them.
        buffers: ``average``, ``local`` or ``reset``: what becomes of BatchNorm statistics and other buffers.
        keep_optimizers: Let each client's optimizer state live on from one of its rounds to the next.
        lr_decay: How the clients' learning rates fall from round to round; default not at all.
        channels_last: The memory format of images and convolutions.
        run_dir: The run's folder; default ``runs/<data>-<aggregator>/<time>-<seed>``.
        seed: Default: what ``seed_everything`` was last called with, else 0.
        enable_checkpointing: Write the run's folder; ``False`` leaves nothing on disk.
        enable_progress_bar: Show the federation's progress and the final table.
    """

    def __init__(
        self,
        rounds: int = 10,
        aggregator: Aggregator | None = None,
        schedule: Schedule | None = None,
        engine: Engine | None = None,
        max_epochs: int = 1,
        evaluate_every: int = 1,
        monitor: str = "accuracy",
        score_clients: int = 100,
        buffers: Buffers = "average",
        keep_optimizers: bool = False,
        lr_decay: LRDecay | None = None,
        channels_last: bool = True,
        run_dir: str | None = None,
        seed: int | None = None,
        logger: Logger | Iterable[Logger] | bool = False,
        callbacks: list[Callback] | Callback | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        **kwargs: Any,
    ) -> None:
        for name, value in {
            "rounds": rounds,
            "max_epochs": max_epochs,
            "evaluate_every": evaluate_every,
        }.items():
            if value < 1:
                raise FlsuiteError(f"trainer.{name} must be at least 1, got {value}")
        if monitor not in HIGHER_IS_BETTER:
            raise FlsuiteError(
                f"trainer.monitor must be one of {', '.join(HIGHER_IS_BETTER)}, got {monitor!r}"
            )
        _refuse_unfit(kwargs)
        quiet_lightning()
        super().__init__(
            max_epochs=max_epochs,
            logger=logger,
            callbacks=_with_defaults(callbacks, enable_progress_bar),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **kwargs,
        )
        if self.world_size > 1:
            raise FlsuiteError(
                "trainer.devices must be 1: clients are spread by the engine, e.g. Processes(workers=4)"
            )
        self.rounds = rounds
        self.aggregator = aggregator or FedAvg()
        self.schedule = schedule or Synchronous()
        self.engine = engine or InProcess()
        self.evaluate_every = evaluate_every
        self.monitor = monitor
        self.score_clients = score_clients
        self.buffers = buffers
        self.keep_optimizers = keep_optimizers
        self.lr_decay = lr_decay
        self.channels_last = channels_last
        self.run_dir = Path(run_dir) if run_dir else None
        self.seed = int(os.environ.get("PL_GLOBAL_SEED") or 0) if seed is None else seed
        self.show = enable_progress_bar
        self.writes = enable_checkpointing
        self.client_kwargs = {k: v for k, v in kwargs.items() if k not in _FEDERATIONS_OWN} | {
            "max_epochs": max_epochs
        }
        self.config: str | None = None
        self.run: Run | None = None

    def fit(  # type: ignore[override]
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
    ) -> None:
        """Train a federation.

        Args:
            model: What every client trains.
            datamodule: The dealt data.
            ckpt_path: A checkpoint to go on from; ``last`` is the one in the run's folder, if there is one yet.

        Raises:
            FlsuiteError: If the request cannot be met; nothing has been written then.
            FederationError: If a round fails altogether; the run's folder keeps the state before it.
        """
        with self.running(model, datamodule, ckpt_path) as run:
            self.engine.start(self.job(run))
            while not self.is_last():
                run.federation.advance(self.engine, self.notify)
                improved = self.record_round(run)
                run.save(improved, **self._beside())

    @contextmanager
    def running(
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
    ) -> Iterator[Run]:
        """A run, from its set-up to its last words; the rounds are the caller's. For arguments and errors see :meth:`fit`."""
        run = self.set_up(model, datamodule)
        self._begin(run, ckpt_path)
        self.notify("on_federation_start")
        try:
            yield run
        except (
            FlsuiteError
        ):  # a setting that shows only in training: nothing has been trained, nothing is left
            if not self.round:
                run.folder.discard()
            raise
        finally:
            self.engine.stop()
            if self.round and run.folder.checkpoints:
                run.export(run.folder.checkpoints / "model.ckpt")
            self.notify("on_federation_end")
        if self.show:
            run.summary.print(run.wall_seconds, run.folder.path)

    def record_round(self, run: Run, scores: Callable[..., Scores] | None = None) -> bool:
        """Score and record the round just done; whether it is the best so far on validation data.

        Args:
            run: What :meth:`running` gave.
            scores: Takes the place of :meth:`Run.scores` where models are scored elsewhere.
        """
        if self.lr_decay:
            self.log_metric("lr_factor", self.lr_decay.factor(self.round))
        self.notify("on_round_end", self.round)
        due = self.round % self.evaluate_every == 0 or self.is_last()
        improved = (
            run.evaluate(self.is_last, self.score_clients, self.notify, scores) if due else False
        )
        run.record(self.notify)
        return improved

    def is_last(self) -> bool:
        """Whether the run ends with the round just done."""
        return self.round >= self.rounds or bool(self.should_stop)

    def validate(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
    ) -> list[dict[str, float]]:
        """Score on validation data: the federation first, then each client; see :meth:`test`."""
        return self._scored("val", model, datamodule, ckpt_path)

    def test(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
    ) -> list[dict[str, float]]:
        """Score on test data: the federation first, then each client.

        Args:
            model: Not needed after a fit.
            datamodule: Not needed after a fit.
            ckpt_path: ``last``, ``best`` (the round picked on validation data) or a path, which becomes the state in memory;
                default that state, after a fit the last round's, else ``last``.

        Returns:
            The global scores, then one dict a client.
        """
        return self._scored("test", model, datamodule, ckpt_path)

    def predict(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
    ) -> torch.Tensor:
        """Class probabilities on the test split, ``(n, classes)``: the global model's; written to ``predictions.csv`` too.

        Where every client has a model of its own, the mean over their probabilities. A model with pictures (reconstructions,
        samples of a class) leaves them beside the table as PNG files.

        Args:
            model: Not needed after a fit.
            datamodule: Not needed after a fit.
            ckpt_path: As for :meth:`test`.
        """
        run = self._restored(model, datamodule, ckpt_path)
        probabilities, written = run.predict()
        if self.show and written:
            print(f"predictions of round {self.round}: {', '.join(map(str, written))}")
        return probabilities

    @property
    def federation(self) -> Federation | None:
        """The federation as it is now; ``None`` before the first fit."""
        return self.run.federation if self.run else None

    @property
    def round(self) -> int:
        """Rounds done."""
        return self.run.federation.round if self.run else 0

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return self.run.federation.data.clients if self.run else 0

    @property
    def run_folder(self) -> RunFolder:
        """Where the run is recorded."""
        return self._fitted().folder

    @property
    def evaluator(self) -> Evaluator:
        """Scores the federation's models; its resident model is free for use between rounds."""
        return self._fitted().evaluator

    def _fitted(self) -> Run:
        if self.run is None:
            raise FlsuiteError("nothing has been fitted yet: call fit(model, datamodule) first")
        return self.run

    def log_metric(
        self, metric: str, value: float, scope: str | int = GLOBAL, split: str = "train"
    ) -> None:
        """Add a number to the current round, for the table and the loggers: the way for callbacks to log."""
        self.run_folder.table.note(str(scope), split, {metric: value})

    def describe(self) -> dict[str, Any]:
        """Everything that decides the run's result, as plain data."""
        return {
            "seed": self.seed,
            "model": describe(self._model),
            "data": _without_place(describe(self._datamodule)),
            "aggregator": describe(self.aggregator),
            "schedule": describe(self.schedule),
            "buffers": self.buffers,
            "keep_optimizers": self.keep_optimizers,
            "lr_decay": describe(self.lr_decay),
            "channels_last": self.channels_last,
            "client": {k: describe(v) for k, v in self.client_kwargs.items() if _is_chosen(k, v)},
        }

    def export(self, path: str | Path) -> None:
        """Write the global model as an ordinary Lightning checkpoint, which ``load_from_checkpoint`` reads."""
        self._fitted().export(Path(path))

    def set_up(self, model: LightningModule, datamodule: LightningDataModule) -> Run:
        """Build all that a round needs; nothing is written yet."""
        if not isinstance(model, ClientModel):
            raise FlsuiteError(
                f"the model must be a flsuite.models.ClientModel, got {type(model).__name__}"
            )
        if not isinstance(datamodule, FederatedDataModule):
            raise FlsuiteError(
                f"the data must be a flsuite.data.FederatedDataModule, got {type(datamodule).__name__}"
            )
        self._model, self._datamodule = model, datamodule
        datamodule.use_seed(self.seed)
        datamodule.setup("fit")
        data = datamodule.federated
        if model.spec is None:
            seed_process(self.seed, "model")
        model.ensure_built(data.spec)
        if self.channels_last:
            model.to_channels_last()
        folder = RunFolder(self._folder() if self.writes else None)
        memories = ClientStore(folder.path / "clients" if folder.path else None)
        federation = Federation(
            model, data, self.aggregator, self.schedule, self.buffers, memories, self.seed
        )
        evaluator = Evaluator(
            model, data, self.strategy.root_device, self.precision_plugin.forward_context
        )
        self.should_stop = False
        self.run = Run(federation, evaluator, folder, self.monitor)
        return self.run

    def _folder(self) -> Path:
        name = f"{type(self._datamodule).__name__}-{type(self.aggregator).__name__}".lower()
        return self.run_dir or new_run_dir(name, self.seed)

    def job(self, run: Run) -> WorkerSetup:
        """What a worker needs to train any client of the run."""
        return WorkerSetup(
            model=self._model,
            data=run.federation.data,
            aggregator=self.aggregator,
            seed=self.seed,
            initial=run.federation.initial,
            trainer_kwargs=self.client_kwargs,
            callbacks=[c for c in self._callbacks if _has_lightning_hooks(c)],
            buffers=self.buffers,
            keep_optimizers=self.keep_optimizers,
            lr_decay=self.lr_decay,
            channels_last=self.channels_last,
        )

    def _begin(self, run: Run, ckpt_path: str | None) -> None:
        """Create the run's folder, or go on from a checkpoint in it."""
        checkpoint = run.find(ckpt_path)
        config = self.config or {**self.describe(), "rounds": self.rounds}
        if checkpoint is not None:
            self._take_back(run.resume(checkpoint, self.describe()))
            run.folder.write_config(config)  # it may have more rounds now
        else:
            run.folder.create(config, run.federation.data, again=ckpt_path is not None)

    def _restored(
        self,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        ckpt_path: str | None,
    ) -> Run:
        """The run in the state that a request for scores means."""
        run = self.run
        if run is not None and (
            model not in (None, self._model) or datamodule not in (None, self._datamodule)
        ):
            raise FlsuiteError(
                "this trainer holds another federation: make a new FederatedTrainer for this model and data"
            )
        if run is not None and ckpt_path is None:
            return run
        if run is None:
            if model is None or datamodule is None:
                raise FlsuiteError(
                    "nothing has been fitted yet: pass model, datamodule and ckpt_path"
                )
            if self.run_dir is None and ckpt_path is not None and ckpt_path not in ("last", "best"):
                self.run_dir = Path(ckpt_path).parent.parent
            run = self.set_up(model, datamodule)
        checkpoint = run.find(ckpt_path or "last")
        if checkpoint is None:
            raise FlsuiteError(
                f"there is no checkpoint in {run.folder.checkpoints}: fit first, or name one with ckpt_path"
            )
        self._take_back(run.restore(checkpoint, self.describe()))
        return run

    def _scored(self, part: Split, *request: Any) -> list[dict[str, float]]:
        found = self._restored(*request).scores(part, self.clients, details=True)
        if not found:
            raise FlsuiteError("there is no validation data: set data.val_fraction above 0")
        if self.show:
            print_scores(found, part, self.round)
        return [found[GLOBAL], *(row for scope, row in found.items() if scope != GLOBAL)]

    def _beside(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer itself."""
        callbacks = {
            callback.state_key: callback.state_dict() for callback in self._federation_callbacks()
        }
        return {
            "settings": self.describe(),
            "should_stop": bool(self.should_stop),
            "callbacks": callbacks,
        }

    def _take_back(self, content: dict[str, Any]) -> None:
        self.should_stop = content["should_stop"]
        for callback in self._federation_callbacks():
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])

    @property
    def _callbacks(self) -> list[Callback]:
        return self.callbacks  # type: ignore[attr-defined]

    def _federation_callbacks(self) -> list[FederationCallback]:
        return [
            callback for callback in self._callbacks if isinstance(callback, FederationCallback)
        ]

    def notify(self, hook: str, *args: Any) -> None:
        """Call a hook of the federation on every callback that has them."""
        for callback in self._federation_callbacks():
            getattr(callback, hook)(self, *args)


def _is_chosen(name: str, value: Any) -> bool:
    """Whether this argument of Lightning's Trainer decides anything."""
    return name != "default_root_dir" and value is not None and value != _DEFAULTS.get(name)


def _without_place(data: Any) -> Any:
    """Where the files lie does not decide the result, of a data module and of one that it wraps."""
    if not isinstance(data, dict):
        return data
    return {
        name: _without_place(value)
        for name, value in data.items()
        if name not in ("root", "download")
    }


def _refuse_unfit(kwargs: Mapping[str, Any]) -> None:
    """Arguments of Lightning's Trainer that a federation cannot honour."""
    precision = str(kwargs.get("precision") or "32-true")
    if precision not in ("32-true", "32", "bf16-mixed", "bf16", "transformer-engine"):
        raise FlsuiteError(
            f"trainer.precision {precision} is not supported: weights travel and are averaged in float32, and a gradient "
            "scaler would pass from client to client; use bf16-mixed or 32-true"
        )
    if kwargs.get("max_time") is not None:
        raise FlsuiteError(
            "trainer.max_time would make results depend on the machine; limit trainer.rounds or max_steps"
        )


def _with_defaults(callbacks: list[Callback] | Callback | None, progress: bool) -> list[Callback]:
    """The user's callbacks, and the federation's own where the user has not configured them."""
    given = (
        []
        if callbacks is None
        else list(callbacks)
        if isinstance(callbacks, (list, tuple))
        else [callbacks]
    )
    own: list[type[Callback]] = [TaskMatrix, RoundLogger, *([RoundProgress] if progress else [])]
    return [*given, *(kind() for kind in own if not any(isinstance(c, kind) for c in given))]


def _has_lightning_hooks(callback: Callback) -> bool:
    """Whether a client's Trainer has anything to call on this callback."""
    ours = set(vars(FederationCallback))
    hooks = [
        name
        for name in vars(Callback)
        if name.startswith(("on_", "setup", "teardown")) and name not in ours
    ]
    return any(getattr(type(callback), name) is not getattr(Callback, name) for name in hooks)
