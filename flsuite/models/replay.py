"""The replay of :class:`~flsuite.models.NFClassifier`, and the state of earlier tasks."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.common.state import load_


class Previous(nn.Module):
    """The state that a client keeps from one task to the next.

    All of it is stored as untrained parameters, not as buffers, because a buffer policy must not
    reset it.

    Attributes:
        task: int64 ``()``, the number of the client's task.
        met: uint8 ``(classes,)``, 1 for classes that the client has met.
        past: uint8 ``(classes,)``, 1 for classes met before the task began: the client's own, and
            those passed to :meth:`take`.
        tasks: Whether the client has completed a task.
        classes: Whether any class is marked in ``past``.
    """

    def __init__(self, classes: int, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.task = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.met = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        self.past = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        # Plain flags, because reading tensors in a training step would synchronize.
        self.tasks = self.classes = False
        # In training mode, as a fit expects. :class:`NFClassifier` sets the mode of a fit.
        for name, module in modules.items():
            self.add_module(name, frozen_copy(module).train())

    def meet(self, y: Tensor) -> None:
        """Mark the classes of a batch as met."""
        self.met[y] = 1

    def take(self, task: int, classes: Sequence[int], model: nn.Module) -> None:
        """Begin a task: keep the model's modules, and mark the classes that any client has met."""
        self.past.copy_(self.met)
        self.past[list(classes)] = 1
        self.task.fill_(task)
        # Copy into the existing tensors, because the client's state refers to them.
        for name, copy in self.named_children():
            load_(copy.state_dict(), model.get_submodule(name).state_dict())
        self.look()

    def look(self) -> None:
        """Update the flags.

        Called once per fit, after the client's state has been loaded, and after :meth:`take`.
        """
        self.tasks, self.classes = bool(self.task > 0), bool(self.past.any())


def draw_classes(among: Tensor, n: int) -> Tensor:
    """Draw n classes, int64 ``(n,)``, uniformly among the marked classes ``(classes,)``."""
    return torch.multinomial(among.float(), n, replacement=True)


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose parameters and buffers are frozen parameters."""
    copy = deepcopy(module).requires_grad_(False).eval()
    for part in list(copy.modules()):
        # Buffers follow the run's policy, which may reset them, but parameters stay.
        for name, buffer in list(part.named_buffers(recurse=False)):
            delattr(part, name)
            part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return copy


# Minimum variance of a Gaussian fitted to few codes. Without it, one dimension in which the codes
# happen to agree would outweigh all others.
_LEAST_VARIANCE = 1e-4
_TEMPERATURE = 2.0


def credibility(
    codes: Tensor, y: Tensor, drawn: Tensor, classes: Tensor, otherwise: Tensor
) -> Tensor:
    """Return how much each generated sample resembles the batch's samples of its class, ``(m,)``.

    It is the density of the sample's code under the diagonal Gaussian of that class's codes,
    averaged over the dimensions. It is computed in float32 at any precision, because bfloat16
    rounds away small differences in density.

    Args:
        codes: Codes of the batch, ``(n, features)``.
        y: Classes of the batch, int64 ``(n,)``.
        drawn: Codes of the generated samples, ``(m, features)``.
        classes: Classes of the generated samples, int64 ``(m,)``.
        otherwise: Value ``()`` for a class with fewer than two samples in the batch, which do not
            determine a Gaussian.
    """
    with torch.autocast(codes.device.type, enabled=False):
        codes, drawn = codes.float(), drawn.float()
        same = (classes[:, None] == y).to(codes.dtype)
        # Statistics per generated sample as products with a mask, without a loop over classes.
        count = same.sum(1, keepdim=True)
        share = same / count.clamp(min=1)
        mean = share @ codes
        # Centered on class means, because mean squares minus squared means would cancel.
        variance = (share @ (codes - _class_means(codes, y)).square()).clamp(min=_LEAST_VARIANCE)

        exponent = -0.5 * (drawn - mean).square() / variance
        density = exponent.exp() / (2 * torch.pi * variance).sqrt()
        return torch.where(count.squeeze(1) >= 2, density.mean(1), otherwise)


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cross-entropy of softened logits to a teacher's, ``(n, classes)`` each.

    Hinton et al. 2015, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """
    # Softening shows how the teacher ranks the wrong classes.
    targets = (teacher.float() / _TEMPERATURE).softmax(1)
    return F.cross_entropy(logits.float() / _TEMPERATURE, targets)


def _class_means(codes: Tensor, y: Tensor) -> Tensor:
    """Return for each sample the mean over the samples of its class, ``(n, features)``."""
    same = (y[:, None] == y).to(codes.dtype)
    return same @ codes / same.sum(1, keepdim=True)
