"""What a classifier keeps of the tasks before, and how it learns from it: see :class:`~flsuite.models.NFClassifier`."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.state import load_

__all__ = ["Previous", "credibility", "draw_classes", "frozen_copy", "soft_cross_entropy"]

_LEAST_VARIANCE = 1e-4  # of a Gaussian fitted to few codes: one number that happens to agree would outweigh all the others
_TEMPERATURE = 2.0


def credibility(
    codes: Tensor, y: Tensor, drawn: Tensor, classes: Tensor, otherwise: Tensor
) -> Tensor:
    """How much a generated sample looks like the batch's own of its class: its weight ``(m,)``.

    That is the density of its code, a mean over its numbers, under the diagonal Gaussian of the codes of the batch's samples
    of the class; ``otherwise`` for a class with fewer than two of them, to which no Gaussian can be fitted.

    Args:
        codes: The batch's, ``(n, features)``.
        y: The batch's classes, int64 ``(n,)``.
        drawn: Codes of the generated samples, ``(m, features)``.
        classes: Theirs, int64 ``(m,)``.
        otherwise: ``()``.
    """
    same = (classes[:, None] == y).to(codes.dtype)
    count = same.sum(1, keepdim=True)
    share = same / count.clamp(min=1)
    mean = share @ codes
    own_mean = _class_means(codes, y)
    variance = (share @ (codes - own_mean).square()).clamp(min=_LEAST_VARIANCE)
    density = (-0.5 * (drawn - mean).square() / variance).exp() / (2 * torch.pi * variance).sqrt()
    return torch.where(count.squeeze(1) >= 2, density.mean(1), otherwise)


def soft_cross_entropy(
    logits: Tensor, teacher: Tensor, temperature: float = _TEMPERATURE
) -> Tensor:
    """Mean cross-entropy of ``logits`` to the ``teacher``'s, both ``(n, classes)`` and softened (Hinton et al. 2015)."""
    wanted = (teacher.float() / temperature).softmax(1)
    return F.cross_entropy(logits.float() / temperature, wanted)


class Previous(nn.Module):
    """What a client keeps from one task to the next. All of it is parameters that nobody trains, and none of it buffers, so
    that no policy on buffers resets it.

    Attributes:
        task: int64 ``()``, the number of the client's task.
        met: uint8 ``(classes,)``, 1 for classes that the client has met.
        past: uint8 ``(classes,)``, the same as it was when the task began, and what other clients had met by then.
        tasks, classes: Whether the client has left a task behind it, and whether it had met a class by then: plain numbers, so
            that a step asks no tensor on another device.
    """

    def __init__(
        self, classes: int, flow: dict[str, nn.Module], classifier: dict[str, nn.Module]
    ) -> None:
        super().__init__()
        self.task = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.met = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        self.past = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        self.tasks = self.classes = False
        for name, module in (flow | classifier).items():
            self.add_module(name, frozen_copy(module).train())

    def meet(self, y: Tensor) -> None:
        self.met[y] = 1

    def take(self, task: int, classes: Sequence[int], modules: dict[str, nn.Module]) -> None:
        self.past.copy_(self.met)
        self.past[list(classes)] = 1
        self.task.fill_(task)
        for name, copy in self.named_children():
            load_(copy.state_dict(), modules[name].state_dict())
        self.look()

    def look(self) -> None:
        """Once a fit, after the client's state has been swapped in."""
        self.tasks, self.classes = bool(self.task > 0), bool(self.past.any())


def draw_classes(among: Tensor, n: int) -> Tensor:
    """n classes, int64, uniformly among those that are marked."""
    return torch.multinomial(among.float(), n, replacement=True)


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode that nobody trains; its buffers are frozen parameters."""
    copy = deepcopy(module).requires_grad_(False).eval()
    for part in list(copy.modules()):
        for name, buffer in list(part.named_buffers(recurse=False)):
            delattr(part, name)
            part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return copy


def _class_means(codes: Tensor, y: Tensor) -> Tensor:
    """For each sample ``(n, features)`` the mean over the samples of its class."""
    same = (y[:, None] == y).to(codes.dtype)
    return same @ codes / same.sum(1, keepdim=True)
