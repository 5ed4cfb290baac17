"""Preparation of the model, the data and the federation for a run."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.part import named
from flsuite.aggregators.rules.base import Rule
from flsuite.aggregators.transforms.base import Transform
from flsuite.common.errors import FlsuiteError, log, require_instance
from flsuite.common.random import seed_process
from flsuite.data.datasets.from_dataset import as_federated
from flsuite.data.module import FederatedDataModule
from flsuite.federation.client.devices import AUTO, on_one_gpu, resolve_precision
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.federation.server.evaluation import Evaluator
from flsuite.models.abilities import has_step, require_trainable
from flsuite.models.autoencoders import slice_strides
from flsuite.models.base import ClientModel
from flsuite.models.layers import to_channels_last
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.run import Run
from flsuite.runs.settings import RunOptions

_USED: "weakref.WeakSet[LightningModule]" = weakref.WeakSet()
"""Models that were prepared for a run before, so a fit may have changed their weights."""


def make_ready(
    model: LightningModule,
    datamodule: LightningDataModule,
    trainer: Trainer,
    options: RunOptions,
    is_restored: bool,
    attack: Attack | None,
) -> tuple[FederatedDataModule, str | None]:
    """Split the data and build the model, both determined by the run's seed.

    Args:
        model: The model that clients train.
        datamodule: The data of all clients.
        trainer: The federated trainer. ``configure_model`` may use its data module.
        options: The options of the run.
        is_restored: Whether a checkpoint's weights are loaded later, so that the model reads none.
        attack: The attack, if any. Its attackers are drawn from the clients.

    Returns:
        The data module, and the name in :data:`~flsuite.runs.settings.WEIGHTS` under which the
        model's weights are a setting.

    Raises:
        FlsuiteError: If model or data have the wrong type, or do not fit each other.
    """
    require_instance("fit", LightningModule, model=model)
    if "_parameters" not in vars(model):
        kind = type(model).__name__
        raise FlsuiteError(f"model: {kind}.__init__ must call super().__init__() first")
    data = as_federated(datamodule)
    data.use_seed(options.seed)
    data.setup("fit")

    weights = None
    seed_process(options.seed, "model")
    if isinstance(model, ClientModel):
        # Before the model is built: a model without a spec has no weights yet.
        weights = "initial_weights" if model.spec is not None else None
        model.weights_follow = is_restored
        model.ensure_built(data.federated.spec)
    else:
        weights = "given_weights" if any(True for _ in model.parameters()) else None
        weights = "initial_weights" if weights and model in _USED else weights
        _configure(model, trainer, datamodule)
        slice_strides(model)
    _USED.add(model)

    if attack is not None:
        attack.configure(data.federated, options.seed)
    require_trainable(model)
    if options.channels_last:
        to_channels_last(model)
    return data, weights


def _configure(model: LightningModule, trainer: Trainer, datamodule: LightningDataModule) -> None:
    """Call ``configure_model`` as Lightning would before a fit."""
    if not has_step(model, "configure_model"):
        return
    before = trainer.datamodule  # type: ignore[attr-defined]
    model.trainer, trainer.datamodule = trainer, datamodule  # type: ignore[attr-defined]
    try:
        model.configure_model()
    finally:
        model.trainer, trainer.datamodule = None, before  # type: ignore[attr-defined]


def make_evaluator(
    model: LightningModule,
    datamodule: FederatedDataModule,
    trainer: Trainer,
    trainer_kwargs: Mapping[str, Any],
    seed: int,
    attack: Attack | None,
) -> Evaluator:
    """Return the evaluator of the model, with the trainer's device and precision.

    Raises:
        FlsuiteError: If the success of the attack cannot be scored on this model.
    """
    data = datamodule.federated
    evaluator = Evaluator(
        model,
        data,
        trainer.strategy.root_device,
        trainer.precision_plugin.forward_context,
        seed=seed,
        trainer_kwargs=trainer_kwargs,
        attack=attack,
    )
    trial = None if attack is None else attack.trial(data.test)
    if trial is not None and not evaluator.has_classes:
        raise FlsuiteError(
            f"{type(attack).__name__}: {type(model).__name__} has no class scores to measure "
            f"{trial.metric} by; give it a method logits(x) -> (n, classes)"
        )
    return evaluator


def compressed(chosen: Aggregator | Rule, compression: Transform | None) -> Aggregator:
    """Return the algorithm with its compression as its last transform."""
    aggregator = Aggregator.of(chosen)
    if compression is None:
        return aggregator
    given = named("trainer.compression", compression)
    return aggregator.with_parts(given, transforms=[*aggregator.transforms, compression])


def use_precision(trainer: Any, checkpoint: Path | None) -> None:
    """Set the requested precision on a federated trainer.

    Args:
        trainer: The federated trainer. ``auto`` is resolved here once, for all workers.
        checkpoint: The checkpoint to resume, if any. With ``auto``, its precision is kept.

    Raises:
        FlsuiteError: If the checkpoint cannot be read.
    """
    request = trainer.precision_request
    precision, reason = resolve_precision(request, trainer.client_kwargs)
    if request == AUTO:
        if checkpoint is not None:
            settings = load_checkpoint(checkpoint)["settings"]
            precision, reason = settings["client"].get("precision"), "the run began with it"
        log.info("precision: %s (auto: %s)", precision or "32-true", reason)
    elif reason:
        log.warning(reason)
    if precision != trainer.client_kwargs.get("precision"):
        set_precision(trainer, precision)


def monitor_of(checkpoint: Path | None) -> str | None:
    """Return the score that picks the rounds of a run that is resumed, if any."""
    return None if checkpoint is None else load_checkpoint(checkpoint)["settings"].get("monitor")


def set_precision(trainer: Any, precision: str | int | None) -> None:
    """Set the precision of a federated trainer and its clients."""
    trainer.client_kwargs["precision"] = precision
    arguments = on_one_gpu(trainer.client_kwargs)
    chosen: dict[str, Any] = {n: arguments.get(n) or "auto" for n in ("accelerator", "devices")}
    # Only a new Trainer can choose the precision plugin for a device.
    other = ClientTrainer(**chosen, precision=precision)
    trainer.strategy.precision_plugin = other.precision_plugin


def worker_setup(trainer: Any, run: Run) -> WorkerSetup:
    """Return everything that a worker needs to train any client of a run."""
    federation, options = run.federation, run.options
    reads_updates = run.callbacks.read_updates or trainer.keep_updates
    if profiler := trainer.client_kwargs.get("profiler"):
        profiler.require_client(federation.data.clients)
    may_sum = federation.uplink.sums_parts and not trainer.schedule.is_asynchronous
    return WorkerSetup(
        model=run.evaluator.model,
        data=federation.data,
        uplink=federation.uplink,
        seed=options.seed,
        initial=federation.initial,
        trainer_kwargs=trainer.client_kwargs,
        batchnorm=options.batchnorm,
        keep_optimizers=options.keep_optimizers,
        channels_last=options.channels_last,
        lr_decay=options.lr_decay,
        sums_parts=may_sum and not reads_updates,
        attack=trainer.attack,
    )
