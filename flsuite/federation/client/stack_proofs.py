"""Proofs that a stack computes what each of its clients computes alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from flsuite.aggregators.losses import step_loss
from flsuite.aggregators.objectives import feature_term
from flsuite.aggregators.objectives.checks import no_other_draws
from flsuite.aggregators.objectives.feature_term import features_at
from flsuite.common.state import State
from flsuite.federation.client.stack_steps import StackSteps
from flsuite.federation.client.stacked_loss import StackedStep
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models import abilities
from flsuite.models.modes import PlainAttributes


def used_parameters(
    model: LightningModule, trainer: ClientTrainer, start: State, batch: Any, by_sample: bool
) -> list[str]:
    """Return the names of the trainable parameters that the loss of a step depends on.

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


def is_mean_over_samples(steps: StackSteps, batch: Any) -> bool:
    """Return whether the loss of a batch is the mean of the losses of its samples.

    The model declares this for its step. Two steps at the first client's weights, as a batch and by
    sample, show that its layers neither mix samples nor draw random numbers. With a term of the
    features, they are taken for all clients, because it reads something else of each.

    Args:
        steps: The steps of the stack.
        batch: A batch of all clients' samples.
    """
    if not abilities.is_mean_over_samples(steps.loss.model):
        return False
    clients = len(steps.members) if steps.loss.term else 1
    parameters, others, held = (
        tree_map(lambda part: part[:clients], tensors)
        for tensors in (steps.leaves, steps.others, steps.algorithm.held)
    )
    try:
        each = tree_map(lambda part: part.expand(clients, *part.shape), batch)
        samples = tree_leaves(batch)[0].shape[0]
        sizes = torch.full((clients,), samples, device=steps.losses.device)
        for start in (parameters, _moved(parameters)):
            with torch.random.fork_rng():
                step = partial(steps.loss.step, start, others, each, 0, held)
                if not _is_same(step(), step(sizes=sizes)):
                    return False
    except Exception:  # a step may fail on one sample, as with BatchNorm
        return False
    return True


def refuse_mixed_samples(steps: StackSteps, batch: Any) -> None:
    """Refuse a term of the features that is not a mean over the samples of a batch.

    The arguments are as in :func:`is_mean_over_samples`.

    Raises:
        FlsuiteError: If it is not such a mean for some client.
    """
    if (term := steps.loss.term) is None:
        return
    for place in range(len(steps.members)):
        features_of = partial(_features, steps, place)
        held = tree_map(lambda part, place=place: part[place], steps.algorithm.held)
        feature_term.refuse_mixed_samples(term, features_of, batch, held)


def _features(steps: StackSteps, place: int, weights: State, batch: Any) -> Tensor:
    """Return the features of a batch at one client's weights, or at others."""
    own = {name: value[place] for name, value in {**steps.leaves, **steps.others}.items()}
    loss = steps.loss
    return features_at(loss.trainer, loss.model, loss.head, {**own, **weights}, batch, 0)


def _moved(parameters: State) -> State:
    """Return weights a little away from the start, where some terms and gradients are zero."""
    with torch.random.fork_rng():
        return {
            name: value + (0.1 * value.abs() + 0.01) * torch.randn_like(value)
            for name, value in parameters.items()
        }


def _is_same(whole: StackedStep, by_sample: StackedStep) -> bool:
    """Return whether two steps differ by rounding alone."""
    pairs: Sequence[tuple[dict[Any, Tensor], dict[Any, Tensor]]] = (
        ({"loss": whole.losses}, {"loss": by_sample.losses}),
        (whole.gradients, by_sample.gradients),
        (whole.buffers, by_sample.buffers),
        (whole.logged, by_sample.logged),
    )
    return all(
        a.keys() == b.keys() and all(_is_close(a[name], b[name]) for name in a) for a, b in pairs
    )


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    distance = float((ours.double() - theirs.double()).norm())
    return distance <= 1e-5 * float(theirs.double().norm()) + 1e-8
