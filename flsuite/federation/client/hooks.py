"""Which hooks models and callbacks have."""

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from flsuite.common.lightning_internals import HOOKS


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
