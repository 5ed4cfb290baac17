"""The hooks and the private attributes of Lightning that flsuite uses, in one place.

Lightning does not guarantee the attributes, so ``pyproject.toml`` pins its version. A test lists
them, with those that the classes of Lightning's CLI, Trainer and loggers are used with elsewhere,
and reports the ones that are missing.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer
from torchmetrics import Metric

HOOKS = {
    "on_federation_start": "run",
    "on_round_start": "run",
    "on_client_end": "run",
    "on_evaluation_end": "run",
    "on_round_end": "run",
    "on_round_recorded": "run",
    "on_federation_end": "run",
    "configure_callbacks": "fit",
    "setup": "fit",
    "on_fit_start": "fit stack",
    "on_fit_end": "fit",
    "teardown": "fit",
    "on_exception": "stack",
    "on_train_start": "steps stack",
    "on_train_epoch_start": "steps",
    "on_train_batch_start": "steps change",
    "on_before_zero_grad": "steps",
    "on_before_backward": "steps",
    "on_after_backward": "steps",
    "on_before_optimizer_step": "steps",
    "on_train_batch_end": "steps",
    "on_train_epoch_end": "steps",
    "on_train_end": "steps stack",
    "on_before_batch_transfer": "change batch",
    "transfer_batch_to_device": "change batch",
    "on_after_batch_transfer": "change batch",
    "backward": "change",
    "configure_gradient_clipping": "change",
    "optimizer_step": "change",
    "optimizer_zero_grad": "change",
}
"""The hooks that flsuite knows by name, and what each means.

``run``: the run calls it. ``fit``: a client's Trainer calls it before or after the steps.
``steps``: the short loop calls it. ``change``: a model that overrides it changes the steps, and
needs Lightning's loop. ``stack``: a stack of clients calls it on callbacks. ``batch``: it changes
batches.
"""


def hooks_with(meaning: str) -> tuple[str, ...]:
    """Return the names of :data:`HOOKS` with a meaning."""
    return tuple(name for name, meanings in HOOKS.items() if meaning in meanings.split())


_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
)


TrainerSettings = list[tuple[Any, str, Any]]
"""Owner, name and value of each setting."""


def make_slim(trainer: Trainer) -> None:
    """Remove work that Lightning does once per fit, which here means once per client.

    This covers moving the module back to the CPU, signal handlers, and the search for checkpoints.
    """
    trainer.strategy.teardown = _nothing  # type: ignore[method-assign]
    trainer.strategy.model_to_device = lambda: _move_to_device(trainer)  # type: ignore[method-assign]
    trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
    trainer._signal_connector.teardown = _nothing  # type: ignore[method-assign]

    connector = trainer._checkpoint_connector
    for name in (
        "_restore_modules_and_callbacks",
        "_select_ckpt_path",
        "restore_training_state",
        "resume_end",
    ):
        setattr(connector, name, _nothing)


def take_logged_means(trainer: Trainer) -> dict[str, tuple[float, int]] | None:
    """Return what the steps since the last call have logged, and begin anew.

    Returns:
        The mean over samples and the number of samples by name, or ``None`` if a value is not such
        a mean.
    """
    means = {}
    for metric in (trainer._results or {}).values():
        meta = metric.meta
        if not (metric.is_tensor and meta.is_mean_reduction and meta.on_epoch) or meta.on_step:
            return None
        size = metric.cumulated_batch_size
        means[meta.name] = float(metric.value / size), int(size)
        metric.value = torch.zeros_like(metric.value)
        metric.cumulated_batch_size = torch.zeros_like(size)
    return means


def clip_what_is_there(trainer: Trainer) -> None:
    """Let clipping by value leave a step without gradients, where torch raises an error."""
    plugin = trainer.precision_plugin
    clip = plugin.clip_grad_by_value

    def clip_by_value(optimizer: Optimizer, clip_val: float) -> None:
        if any(parameter.grad is not None for parameter in plugin.main_params(optimizer)):
            clip(optimizer, clip_val)

    plugin.clip_grad_by_value = clip_by_value  # type: ignore[method-assign]


def rewind(trainer: Trainer, max_epochs: int, settings: TrainerSettings) -> None:
    """Reset a Trainer to its state before any fit.

    Otherwise, a second ``fit`` would silently do nothing.
    """
    trainer.should_stop = False
    loop = trainer.fit_loop
    loop.max_epochs = max_epochs
    for owner, name, value in settings:
        setattr(owner, name, value)
    loop.epoch_progress.reset()
    loop.epoch_loop.batch_progress.reset()
    loop.epoch_loop.scheduler_progress.reset()
    loop.epoch_loop._batches_that_stepped = 0
    loop.epoch_loop.automatic_optimization.optim_progress.reset()
    loop.epoch_loop.manual_optimization.optim_step_progress.reset()


def trainer_settings(trainer: Trainer) -> TrainerSettings:
    """Return the Trainer settings that hooks may change during a fit, with their owners."""
    loop = trainer.fit_loop
    owned = ((trainer, _SETTINGS), (loop.epoch_loop, ("max_steps", "min_steps")))
    names = [(owner, name) for owner, names in owned for name in names] + [(loop, "min_epochs")]
    return [(owner, name, getattr(owner, name)) for owner, name in names]


def steps_taken(trainer: Trainer) -> int:
    """Return the number of optimizer steps of this fit.

    Under manual optimization, a batch counts as one step, however many optimizers it steps.
    """
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def scaler_of(trainer: Trainer) -> Any:
    """Return the gradient scaler of ``16-mixed``, or ``None`` for any other precision."""
    return getattr(trainer.precision_plugin, "scaler", None)


def skips_step(trainer: Trainer, optimizer: Optimizer) -> bool:
    """Return whether the gradient scaler is about to skip this step.

    It skips a step when a gradient overflows. This is known in ``on_before_optimizer_step``.
    """
    scaler = scaler_of(trainer)
    if scaler is None or not scaler.is_enabled():
        return False
    return any(bool(found) for found in scaler._found_inf_per_device(optimizer).values())


def configured(model: LightningModule) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers that a model configures, and its schedulers as Lightning runs them."""
    own: Any = model.configure_optimizers()
    if isinstance(own, Optimizer):
        return [own], []
    optimizers, schedulers, monitor = _configure_optimizers(own)
    return optimizers, _configure_schedulers_automatic_opt(schedulers, monitor)


def show_progress(trainer: Trainer, loader: Any, epoch_steps: int, step: int) -> None:
    """Set the counters and the loader of a Trainer as they are at the start or the end of a fit.

    Args:
        trainer: The Trainer.
        loader: The client's batches.
        epoch_steps: Steps per epoch.
        step: Steps taken.
    """
    set_train_loader(trainer, loader)
    trainer.fit_loop.max_batches = epoch_steps
    trainer.training, trainer.should_stop = True, False
    # The last epoch may be cut.
    trainer.fit_loop.epoch_progress.current.completed = -(-step // epoch_steps)
    batches = trainer.fit_loop.epoch_loop.batch_progress
    batches.is_last_batch = step > 0 and step % epoch_steps == 0
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    steps.total.completed = step


def attach_to_fit(trainer: Trainer, loader: Any) -> None:
    """Connect the loader and the callbacks to a fit, as ``Trainer.fit`` does."""
    module = trainer.lightning_module
    module.trainer = trainer
    trainer.fit_loop._data_source.instance = loader
    trainer.fit_loop._combined_loader = None  # it holds the previous fit's loader
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.log, callback.log_dict = module.log, module.log_dict


def set_train_loader(trainer: Trainer, loader: Any) -> None:
    """Set ``trainer.train_dataloader`` and ``trainer.num_training_batches``."""
    trainer.fit_loop._combined_loader = CombinedLoader(loader, "max_size_cycle")
    trainer.fit_loop.max_batches = len(loader)


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """Return ``optimizer.step``, without the entry in a profile if it does nothing else.

    Making the entry takes as long as a step of a small network.
    """
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    wrapped = getattr(type(optimizer).step, "__wrapped__", None)
    is_patched = "step" in vars(optimizer)
    for_all = sys.modules[Optimizer.__module__]
    has_global = for_all._global_optimizer_pre_hooks or for_all._global_optimizer_post_hooks
    if wrapped is None or has_hooks or is_patched or has_global:
        return optimizer.step
    return partial(wrapped, optimizer)


def refuse_output(output: Any) -> None:
    """Refuse what a training step must not return, in Lightning's words."""
    ClosureResult.from_training_step_output(output)


def detects_anomalies(trainer: Trainer) -> bool:
    """Return the Trainer's ``detect_anomaly`` argument."""
    return trainer._detect_anomaly


def leave_hooks(module: LightningModule) -> None:
    """Tell ``self.log`` that no hook is running."""
    # Without the metrics, those created by a hook would carry over from the previous fit.
    vars(module).update(_current_fx_name=None, _metric_attributes=None)


@contextmanager
def attached(module: LightningModule, trainer: Any) -> Iterator[None]:
    """Let the module have this object as its Trainer, and restore its own on exit.

    Without a Trainer (``None``), it cannot log.
    """
    before, module.trainer = module._trainer, trainer
    try:
        yield
    finally:
        module.trainer = before


def _move_to_device(trainer: Trainer) -> None:
    """Move the module to its device, unless it is already there.

    Checking every tensor takes longer than a small operation. On a CPU-only machine, the check is
    skipped.
    """
    if not _has_accelerator():
        return
    device, module = trainer.strategy.root_device, trainer.lightning_module
    # Lightning moves the metrics that a step has logged back to the CPU.
    metrics = (part for part in module.modules() if isinstance(part, Metric))
    tensors: Iterator[Any] = chain(module.parameters(), module.buffers(), metrics)
    if any(tensor.device != device for tensor in tensors):
        module.to(device)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def implements(obj: object, base: type, hook: str) -> bool:
    """Return whether an object has its own version of a hook, on its class or on the instance."""
    if not hasattr(base, hook):  # only models or only callbacks have it
        return False
    # A bound method has its function in __func__. A hook set on the instance does not.
    method = getattr(obj, hook)
    return getattr(method, "__func__", method) is not getattr(base, hook)


def hooks_of(module: LightningModule) -> list[str]:
    """Return the hooks and methods of a fit that a model has overridden."""
    return [name for name in HOOKS if implements(module, LightningModule, name)]


def hooks_of_callback(callback: Callback) -> list[str]:
    """Return the hooks that a callback implements."""
    names = [n for n in dir(Callback) if n.startswith("on_") or n in ("setup", "teardown")]
    return [name for name in names if implements(callback, Callback, name)]


def takes_a_batch(module: LightningModule) -> bool:
    """Return whether Lightning calls ``training_step`` with a batch and its index."""
    step = module.training_step
    return is_param_in_hook_signature(step, "batch_idx", min_args=2) and not (
        is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    )


def loss_of(outputs: Any) -> Any:
    """Return the loss in what a step returns: itself, or an entry. ``None`` if there is none."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
