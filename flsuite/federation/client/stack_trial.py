"""One step of one client, which shows whether a stack can train a model."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flsuite.aggregators.losses import step_loss
from flsuite.aggregators.objectives.checks import no_other_draws
from flsuite.common.state import State
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models.modes import PlainAttributes


def used_parameters(
    model: LightningModule, trainer: ClientTrainer, start: State, batch: Any, by_sample: bool
) -> list[str]:
    """Return the trainable parameters that the loss of a step depends on.

    The others take no step. The step leaves the model and the tensors as they are.

    Args:
        model: The structure. Its weights are not used.
        trainer: Gives the precision.
        start: All tensors of one client's model.
        batch: A batch of this client.
        by_sample: Whether a callback reads the gradient of each sample.

    Raises:
        RuntimeError: If the step changes or draws what all clients of a stack would share, or
            what a stack does not hand back to them.
    """
    kind, buffers = type(model).__name__, {name for name, _ in model.named_buffers()}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    leaves = {name: value.detach().clone() for name, value in start.items()}
    wanted = [leaves[name].requires_grad_() for name in names]
    versions, ends = {k: v._version for k, v in leaves.items()}, dict[str, Tensor]()
    attributes = PlainAttributes(model)

    def refuse_changes(loss: Tensor) -> None:
        if names := attributes.changed():
            raise RuntimeError(f"a step changes {names[0]} of {kind}, which clients would share")

    precision = trainer.precision_plugin.train_step_context()
    with (
        torch.random.fork_rng(),
        precision,
        no_other_draws(f"a step of {kind}"),
        _EmbeddingOptionsRefused(),
    ):
        loss = step_loss(model, leaves, batch, 0, ends=ends, then=refuse_changes)
    changed = {name for name, value in leaves.items() if value._version != versions[name]}
    changed |= {name for name in buffers if ends[name] is not leaves[name]}
    # A stack hands buffers back, but not those of gradients by sample.
    if lost := sorted(changed if by_sample else changed - buffers):
        raise RuntimeError(f"a step of {kind} changes {lost[0]}, which would be lost")
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [name for name, g in zip(names, gradients, strict=True) if g is not None]


class _EmbeddingOptionsRefused(TorchFunctionMode):
    """Refuses the options of ``F.embedding`` that a batched program ignores."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is F.embedding and (
            options["padding_idx"] is not None
            or options["max_norm"]
            or options["scale_grad_by_freq"]
        ):
            raise RuntimeError("F.embedding has padding_idx, max_norm or scale_grad_by_freq")
        return func(*args, **options)
