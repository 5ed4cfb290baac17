"""Checks that the loss of a batch is the mean over its samples, in a stack of clients."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flsuite.aggregators.objectives import feature_term
from flsuite.aggregators.objectives.feature_term import features_at
from flsuite.common.state import State
from flsuite.federation.client.stack_steps import StackSteps
from flsuite.federation.client.stacked_loss import StackedStep
from flsuite.models import abilities


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
    pairs = (
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
