"""Objectives that add a term of the features to the model's loss, or change its logits.

A model's features are the input of its head in a training step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from flsuite.aggregators.losses import loss_at
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.objectives.checks import no_change_in_place, wrong
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State
from flsuite.models.abilities import head_of


def classes_of(batch: Any, method: str) -> Tensor:
    """Return the classes of a batch, ``(n,)``.

    Raises:
        FlsuiteError: If it does not hold inputs and one class per sample.
    """
    y = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        return y
    raise FlsuiteError(
        f"{method} needs batches of inputs and classes, one class per sample; choose other data or "
        "another aggregator"
    )


def shape_of(model: LightningModule, head: str) -> tuple[int, int]:
    """Return a head's numbers of outputs and of inputs.

    Raises:
        FlsuiteError: If its first layer is not linear.
    """
    parts = list(model.get_submodule(head.rstrip(".")).modules())
    layers = [layer for layer in parts if any(True for _ in layer.parameters(recurse=False))]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if linear and linear[0] is layers[0]:
        return linear[-1].out_features, linear[0].in_features
    raise FlsuiteError(
        f"this aggregator reads the inputs of {head}, whose first layer must be linear; set head"
    )


@contextmanager
def inputs_of(model: nn.Module, head: str) -> Iterator[list[Tensor]]:
    """Collect what a part of a model reads in each forward pass.

    Args:
        model: The model.
        head: Prefix of the part's entries in the state dict.
    """
    seen: list[Tensor] = []
    part = model.get_submodule(head.rstrip("."))
    # A copy, because the part may change its input in place.
    with part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone())):
        yield seen


@contextmanager
def outputs_of(model: nn.Module, head: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change what a part of a model returns in each forward pass.

    Args:
        model: The model.
        head: Prefix of the part's entries in the state dict.
        change: Returns other outputs.
    """
    part = model.get_submodule(head.rstrip("."))
    with part.register_forward_hook(lambda _, inputs, outputs: change(outputs)):
        yield


def features_at(
    trainer: Trainer,
    module: LightningModule,
    head: str,
    weights: Mapping[str, Tensor],
    batch: Any,
    index: int | Tensor,
) -> Tensor:
    """Return what a head reads at other weights, ``(n, features)``, without gradients.

    The weights do not change. For the other arguments, see :func:`~losses.loss_at`.

    Args:
        head: Prefix of the head's entries in the state dict.

    Raises:
        FlsuiteError: If a training step does not call the head.
    """
    buffers = {name for name, _ in module.named_buffers()}
    at = {name: value.clone() if name in buffers else value for name, value in weights.items()}
    # The step at the model's own weights reads the batch, too.
    with torch.no_grad(), inputs_of(module, head) as seen, no_change_in_place(module, batch):
        loss_at(trainer, module, at, batch, index)
    if not seen:
        raise FlsuiteError(
            f"this aggregator reads the input of {head}, which a training step of "
            f"{type(module).__name__} does not call; choose another aggregator, or head"
        )
    return as_rows(seen[-1])


def as_rows(features: Tensor) -> Tensor:
    """Return features as ``(n, features)``, in float32 or more."""
    return features.flatten(1).to(torch.promote_types(features.dtype, torch.float32))


@dataclass(frozen=True)
class FeatureTerm(Objective):
    """A term of the features in the loss of every training step, or a change of its logits.

    Subclasses state both in functions of one client's tensors, which must not look at numbers or
    change tensors in place. The term and the logits belong to the loss at the present weights, and
    not to the loss of an oracle at other weights. Dataclasses among them are frozen.

    Args:
        head: Prefix of the head's entries in the state dict. The features are its input. Default:
            as named by the model.
    """

    head: str = "head."

    def compared(self, features_of: Callable[[State], Tensor], held: Any) -> list[Tensor]:
        """Return features of the batch at other weights, which the term reads. Default: none.

        Like the term, it must not mix samples if DPSGD trains the clients.

        Args:
            features_of: Returns the features of the batch, ``(n, features)``, at given weights.
            held: What the steps hold.
        """
        return []

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor | None:
        """Return the term, a mean over the samples of the batch. Default: none.

        Args:
            features: ``(n, features)``, with gradients.
            others: What :meth:`compared` has returned.
            batch: The batch.
            held: What the steps hold.
        """
        return None

    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Tensor:
        """Return what the model's loss reads as the head's outputs. Default: the outputs.

        Args:
            outputs: ``(n, classes)``, with gradients.
            batch: The batch.
            held: What the steps hold.
        """
        return outputs

    def check(self, model: LightningModule) -> None:
        super().check(model)
        self.head_in(model)

    def head_in(self, model: LightningModule) -> str:
        """Return the prefix of the head's entries in a model.

        Raises:
            FlsuiteError: If it has no such head.
        """
        return head_of(model, self.head, "trainer.aggregator.objective.head")


def compared_of(
    objective: FeatureTerm, features_of: Callable[[State], Tensor], held: Any
) -> list[Tensor]:
    """Return features at other weights, see :meth:`FeatureTerm.compared`.

    Raises:
        FlsuiteError: If the objective returns something else.
    """
    others: Any = objective.compared(features_of, held)
    if not isinstance(others, Sequence) or not all(isinstance(one, Tensor) for one in others):
        raise wrong(objective, "compared", others, "a list of tensors")
    return list(others)


def term_of(
    objective: FeatureTerm, features: Tensor, others: list[Tensor], batch: Any, held: Any
) -> Tensor | None:
    """Return the term as a scalar, see :meth:`FeatureTerm.term`.

    Raises:
        FlsuiteError: If the objective returns something else.
    """
    if type(objective).term is FeatureTerm.term:
        return None
    term: Any = objective.term(as_rows(features), others, batch, held)
    if not isinstance(term, Tensor) or term.numel() != 1:
        raise wrong(objective, "term", term, "the mean over the samples, a tensor of one number")
    return term.reshape(())


def term_gradient(
    objective: FeatureTerm, features: Tensor, others: list[Tensor], batch: Any, held: Any
) -> Tensor:
    """Return the gradient of the term with respect to the features."""
    with torch.enable_grad():
        z = features.detach().requires_grad_()
        term = term_of(objective, z, others, batch, held)
        if term is None or not term.requires_grad:
            return torch.zeros_like(features)
        (gradient,) = torch.autograd.grad(term, z)
    return gradient


def logits_of(objective: FeatureTerm, outputs: Any, batch: Any, held: Any) -> Any:
    """Return the logits that the loss reads, see :meth:`FeatureTerm.logits`.

    Raises:
        FlsuiteError: If the objective returns something else.
    """
    if type(objective).logits is FeatureTerm.logits:
        return outputs  # a head may return something else than a tensor
    logits: Any = objective.logits(outputs, batch, held)
    if not isinstance(logits, Tensor) or logits.shape != outputs.shape:
        raise wrong(objective, "logits", logits, "logits of the outputs' shape")
    return logits


def refuse_mixed_samples(
    objective: FeatureTerm,
    features_of: Callable[[State, Any], Tensor],
    batch: Any,
    held: Any,
) -> None:
    """Refuse a term that is not a mean over samples. Its gradients cannot be clipped by sample.

    Args:
        objective: States the term.
        features_of: Returns the features of a batch at given weights.
        batch: A batch. One of a single sample shows nothing.
        held: What the term reads of the client.

    Raises:
        FlsuiteError: If the gradients of the batch differ from the gradients of its two halves.
    """
    samples = extract_batch_size(batch)

    def gradient(rows: slice) -> Tensor:
        def own(part: Tensor) -> Tensor:
            return part[rows] if part.ndim and len(part) == samples else part

        part = apply_to_collection(batch, Tensor, own)
        others = compared_of(objective, lambda weights: features_of(weights, part), held)
        # A term is a mean, and these are gradients of the sums.
        return len(z[rows]) * term_gradient(objective, z[rows], others, part, held)

    if samples < 2:
        return
    with torch.random.fork_rng():
        # A little away from these features, where the term may be zero.
        z = features_of({}, batch)
        z = z + (0.1 * z.abs() + 0.01) * torch.randn_like(z)
        whole, half = gradient(slice(None)), samples // 2
        parts = torch.cat([gradient(slice(0, half)), gradient(slice(half, None))])
    if float((whole - parts).norm()) > 1e-3 * float(parts.norm()) + 1e-8:
        raise FlsuiteError(
            f"DPSGD: {type(objective).__name__} has a term that is no mean over the samples of a "
            "batch, or draws random numbers, so that a sample's gradient depends on the others; "
            "change it, or leave out DPSGD"
        )
