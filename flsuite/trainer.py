"""The federated trainer: a Lightning Trainer whose fit is rounds of per-client fits."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.attacks.updates import with_attack
from flsuite.aggregators.exchange.secure import SecureAggregation
from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.rules.base import Rule
from flsuite.aggregators.transforms.base import Transform
from flsuite.callbacks.defaults import moved_into, with_defaults
from flsuite.common.arguments import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_init,
    require,
    require_known,
)
from flsuite.common.errors import refused_as
from flsuite.federation.client.callbacks import LRDecay
from flsuite.federation.client.devices import on_one_gpu, require_one_device, resolve_precision
from flsuite.federation.client.entries import BatchNorm, entries_of
from flsuite.federation.client.setup import client_arguments, fit_samples
from flsuite.federation.client.trainer import quiet_lightning
from flsuite.federation.engines.base import EngineChoice, InProcess
from flsuite.federation.schedules.base import Schedule
from flsuite.federation.schedules.synchronous import Synchronous
from flsuite.federation.server.federation import Federation
from flsuite.federation.server.stores import ClientStore, VersionStore
from flsuite.federation.server.tools import ServerFit, make_tools
from flsuite.runs.folder import RunFolder, new_run_dir
from flsuite.runs.fork import Fork, Reuse
from flsuite.runs.hooks import Hooks
from flsuite.runs.preparation import (
    compressed,
    make_evaluator,
    make_ready,
    monitor_of,
    use_precision,
    worker_setup,
)
from flsuite.runs.run import Run
from flsuite.runs.scoring import ScoringTrainer
from flsuite.runs.session import choose_engine, left_on_cpu, opened, started
from flsuite.runs.settings import Budget, OnClientError, RunOptions, run_settings

_PARTS = ("aggregator", "schedule", "engine", "compression", "secure_sum", "attack")


class FederatedTrainer(ScoringTrainer):
    """Runs a federation.

    All other arguments are passed to each client's :class:`lightning.pytorch.Trainer` with their
    usual meaning. ``max_epochs`` counts local epochs. Loggers belong to the federation. A callback
    may have the federation's hooks (:class:`~flsuite.callbacks.FederationCallback`), Lightning's
    own, or both.

    A ``round`` corresponds to an epoch of Lightning's Trainer, whose ``current_epoch`` and
    ``checkpoint_callback`` are not used. ``run_dir`` has ``checkpoints/model.ckpt``, the global
    model for ``load_from_checkpoint``. Scores are in :attr:`callback_metrics` and :attr:`results`.

    Args:
        rounds: Rounds of the federation. Default: 10, or no limit if another limit is given.
        aggregator: The algorithm, or only a rule for FedAvg with that rule. Default: FedAvg
            weighted by samples.
        schedule: Who trains when. Default: all clients in every round.
        engine: Where clients train. Default: in this process.
        compression: The last transform of updates, such as ``Quantize``. Default: none.
        secure_sum: How updates are masked, so that the server learns only their sum.
        attack: What malicious clients do. Default: all clients are honest.
        max_epochs: Local epochs per fit.
        evaluate_every: Rounds between two evaluations. The last round is always evaluated.
        monitor: The validation score that picks a round. Default: an accuracy, AUC or F1 score,
            else the loss. Where clients have models of their own, its mean over clients. A resumed
            run keeps it.
        max_virtual_seconds: Limit on virtual time. The run ends with the round that reaches it.
        max_client_updates: Limit on aggregated client updates, for comparisons at equal work.
        score_clients: Number of clients that are scored one by one, always the first ones, so that
            rounds can be compared. The last round scores up to 10,000, as ``all_clients/...``.
        adapt_epochs: Epochs in which each client adapts its model after the last round. The adapted
            models are scored as ``adapted/...``, and those of clients outside the federation
            (``data.unseen_clients``) as ``unseen_adapted/...``. They are not kept.
        batchnorm: What happens to BatchNorm statistics: ``average``, ``local`` or ``reset``.
        keep_optimizers: Whether a client keeps the state of its optimizers between its rounds.
        lr_decay: How the clients' learning rates decay over rounds. Default: not at all.
        channels_last: Whether images and convolutions use this memory format, which is faster.
        run_dir: The run's folder. Default: ``runs/<data>-<aggregator>/<time>-<seed>``.
        seed: The run's seed. Default: the seed of the last ``seed_everything``, else 0.
        keep_updates: Whether to keep the clients' trained models, in the folder ``updates``.
        from_updates: The folder of a run with ``keep_updates``. Its client models replace training
            in the first round, so that aggregators are compared on the same models.
        without: Clients that never train. They keep their samples and their places in the draws, so
            that all others train as they would with them.
        max_share: Largest share of all training samples that a client may claim. An update that
            claims more is refused. Default: the share of the largest client in the server's data.
        on_client_error: ``continue`` leaves out a client that fails. ``raise`` ends the run, which
            can be resumed.
        fork: The moment of another run that this one begins at, see ``flsuite fork``.
        keep_rounds: Rounds between two checkpoints that stay, for forks and proofs. Default: only
            the last round and the picked one.
        logger: Lightning loggers, which receive the scores of the rounds. ``True`` is Lightning's
            default one, in the run's folder.
        callbacks: Callbacks with the federation's hooks, Lightning's own, or both.
        enable_checkpointing: Whether to write the run's folder. ``False`` leaves nothing on disk.
        enable_progress_bar: Whether to show the federation's progress and the final table.
        precision: As in Lightning, or ``auto``: ``bf16-mixed`` if the device has instructions for
            it, else ``32-true``. A resumed run keeps its original precision.
    """

    def __init__(
        self,
        rounds: PositiveInt | None = None,
        aggregator: Aggregator | Rule | None = None,
        schedule: Schedule | None = None,
        engine: EngineChoice | None = None,
        compression: Transform | None = None,
        secure_sum: SecureAggregation | None = None,
        attack: Attack | None = None,
        max_epochs: PositiveInt = 1,
        evaluate_every: PositiveInt = 1,
        monitor: str | None = None,
        max_virtual_seconds: PositiveFloat | None = None,
        max_client_updates: PositiveInt | None = None,
        score_clients: PositiveInt = 100,
        adapt_epochs: NonNegativeInt = 0,
        batchnorm: BatchNorm = "average",
        keep_optimizers: bool = False,
        lr_decay: LRDecay | None = None,
        channels_last: bool = True,
        run_dir: str | None = None,
        seed: Seed | None = None,
        keep_updates: bool = False,
        from_updates: str | None = None,
        without: list[int] | None = None,
        max_share: Fraction | None = None,
        on_client_error: OnClientError = "continue",
        fork: Fork | None = None,
        keep_rounds: PositiveInt | None = None,
        logger: Logger | Iterable[Logger] | bool = False,
        callbacks: list[Callback] | Callback | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        precision: Literal[16, 32] | str | None = None,
        **kwargs: Any,
    ) -> None:
        require_known(FederatedTrainer, kwargs, Trainer)
        budget = Budget.of(rounds, max_virtual_seconds, max_client_updates)
        self.precision_request = precision
        kwargs["precision"], _ = resolve_precision(precision, kwargs)
        self.client_kwargs = client_arguments({**kwargs, "max_epochs": max_epochs})
        kwargs["default_root_dir"] = kwargs.get("default_root_dir") or run_dir
        self._logs_into_run = logger is True and kwargs["default_root_dir"] is None
        # In place, because the command finds Lightning's arguments by following kwargs to super().
        kwargs.update(on_one_gpu(kwargs))
        quiet_lightning()
        device, remedy = kwargs.get("accelerator"), "see flsuite fit --help=trainer"
        if device not in (None, "auto", "cpu"):
            remedy = f"leave out trainer.accelerator {device}, or set it to cpu"
        with refused_as("trainer: Lightning refuses it", remedy):
            super().__init__(
                max_epochs=max_epochs,
                logger=logger,
                callbacks=with_defaults(callbacks, enable_progress_bar),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **kwargs,
            )
        require_one_device(self)

        self.aggregator, self.schedule = aggregator or FedAvg(), schedule or Synchronous()
        self.engine = engine or InProcess()
        self.compression, self.secure_sum, self.attack = compression, secure_sum, attack
        check_init(self, FederatedTrainer, _PARTS)
        self._run_dir, self.writes = Path(run_dir) if run_dir else None, enable_checkpointing
        self.keep_updates, self.from_updates = keep_updates, from_updates
        self.without, self.fork, self.keep_rounds = frozenset(without or ()), fork, keep_rounds
        require("trainer", PositiveInt | None, keep_rounds=keep_rounds)
        seed = int(os.environ.get("PL_GLOBAL_SEED") or 0) if seed is None else seed
        self.options = RunOptions(
            budget=budget,
            seed=seed,
            evaluate_every=evaluate_every,
            monitor=monitor,
            score_clients=score_clients,
            adapt_epochs=adapt_epochs,
            batchnorm=batchnorm,
            keep_optimizers=keep_optimizers,
            channels_last=channels_last,
            lr_decay=lr_decay,
            max_share=max_share,
            on_client_error=on_client_error,
            show=bool(enable_progress_bar),
        )
        self.config: str | None = None

    def fit(  # type: ignore[override]
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
    ) -> None:
        """Train a federation, and load the global weights into the model.

        Args:
            model: The model that every client trains. Its weights are the first global model.
            datamodule: The data of all clients.
            ckpt_path: A checkpoint to resume. ``last`` is the latest in the run's folder, if any.

        Raises:
            FlsuiteError: If the request cannot be met. If no round was done, no files are left.
            FederationError: If a round fails. The run's folder keeps the state before it.
        """
        run = self.prepare(model, datamodule, ckpt_path)
        setup = worker_setup(self, run)
        engine = run.engine = choose_engine(run, self.engine, setup, ckpt_path)
        with left_on_cpu(model), opened(run, ckpt_path), started(engine, setup):
            schedule, clock = self.schedule, run.federation.clock
            while not run.finished:
                # 1. A round begins: who starts training now, from the current global model.
                starting = run.begin_round()
                # 2. They train, wherever the engine runs, at the latest when step 3 waits for them.
                engine.submit(run.requests(starting))
                # 3. In the order of the virtual clock, each update is checked and added to the
                #    round. A faulty one is named and left out.
                for outcome in schedule.arrivals(engine, clock, run.requests):
                    run.accept(outcome)
                # 4. What was added becomes the next version of the global model.
                run.advance()
                # 5. The new version is scored if that is due, logged, and written to disk.
                run.evaluate()
                run.record()
                run.save()

    @property
    def federation(self) -> Federation | None:
        """Return the federation as it is now, or ``None`` before the first fit."""
        return self.run.federation if self.run else None

    @property
    def round(self) -> int:
        """Return the number of rounds done."""
        return self.run.round if self.run else 0

    def prepare(
        self, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
    ) -> Run:
        """Build everything that a round needs, without writing to disk.

        If a checkpoint will be restored, files with initial weights are not read.

        Raises:
            FlsuiteError: If the request cannot be met.
        """
        options, seed, attack = self.options, self.options.seed, self.attack
        aggregator = compressed(self.aggregator, self.compression)
        name = f"{type(datamodule).__name__}-{aggregator.name}".lower()
        folder = RunFolder((self._run_dir or new_run_dir(name, seed)) if self.writes else None)
        checkpoint = folder.find_checkpoint(ckpt_path)
        self.loggers = moved_into(folder.path if self._logs_into_run else None, self.loggers)

        # What clients train, on which samples, and how models are scored.
        use_precision(self, checkpoint)
        data, weights = make_ready(model, datamodule, self, options, checkpoint is not None, attack)
        evaluator = make_evaluator(model, data, self, self.client_kwargs, seed, attack)

        # The algorithm for this model: which entries are shared, and what becomes of updates.
        bound = aggregator.bound(model)
        bound.halves.check(model)
        algorithm = with_attack(bound, attack)
        entries = entries_of(model, algorithm, options.batchnorm)
        before = monitor_of(checkpoint)
        monitor = evaluator.monitored(options.monitor, bool(entries.personal), before)
        options = replace(options, monitor=monitor)

        # The federation before its first round.
        federation = Federation(
            model,
            data.federated,
            algorithm,
            self.schedule,
            entries,
            clients=ClientStore(folder.inside("clients")),
            versions=VersionStore(folder.inside("in_flight")),
            seed=seed,
            fit_samples=fit_samples(self.client_kwargs, data.federated.batch_size, model),
            tools=make_tools(evaluator, entries.private, options.budget.rounds),
            train=ServerFit(evaluator, options.batchnorm, options.lr_decay).train,
            secure_sum=self.secure_sum,
            max_share=options.max_share,
            absent=self.without,
            engine=self.engine,
        )

        # The run: what it records, and what it takes from other runs.
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        settings = run_settings(self, options, model, data, callbacks, weights, checkpoint)
        reuse = None
        if self.keep_updates or self.from_updates:
            reuse = Reuse(federation, folder, self.keep_updates, self.from_updates, attack)
        self.run = Run(
            federation,
            evaluator,
            folder,
            options,
            settings,
            config=self.config or settings,
            callbacks=Hooks(callbacks),
            loggers=self.loggers,
            reuse=reuse,
            keep_rounds=self.keep_rounds,
            parent=self.fork,
        )
        self.strategy.connect(model)
        self.datamodule, self._scores = datamodule, {}
        return self.run
