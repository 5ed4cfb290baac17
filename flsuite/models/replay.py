"""The state of earlier tasks that a client keeps for :class:`~flsuite.models.NFClassifier`."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from flsuite.state import load_

__all__ = ["Previous", "draw_classes", "frozen_copy"]


class Previous(nn.Module):
    """The state that a client keeps from one task to the next.

    All of it is parameters that are never trained. None of it is a buffer, because a policy on
    buffers must not reset it.

    Attributes:
        task: int64 ``()``, the number of the client's task.
        met: uint8 ``(classes,)``, 1 for classes that the client has met.
        past: uint8 ``(classes,)``, 1 for classes met before the task began: the client's own, and
            those given to :meth:`take`.
        tasks: Whether the client has completed a task.
        classes: Whether any class is marked in ``past``.
    """

    def __init__(
        self, classes: int, flow: dict[str, nn.Module], classifier: dict[str, nn.Module]
    ) -> None:
        super().__init__()
        self.task = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.met = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        self.past = nn.Parameter(torch.zeros(classes, dtype=torch.uint8), requires_grad=False)
        # Plain flags: a training step that read the tensors would wait for the device.
        self.tasks = self.classes = False
        # In training mode, as a fit expects modules; :class:`NFClassifier` sets the mode of a fit.
        for name, module in (flow | classifier).items():
            self.add_module(name, frozen_copy(module).train())

    def meet(self, y: Tensor) -> None:
        """Mark the classes of a batch as met."""
        self.met[y] = 1

    def take(self, task: int, classes: Sequence[int], modules: dict[str, nn.Module]) -> None:
        """Begin a task, by keeping the modules and marking the classes that any client has met."""
        self.past.copy_(self.met)
        self.past[list(classes)] = 1
        self.task.fill_(task)
        # Into the tensors that exist: the state of the client refers to them.
        for name, copy in self.named_children():
            load_(copy.state_dict(), modules[name].state_dict())
        self.look()

    def look(self) -> None:
        """Update the flags.

        It is called once per fit, when the client's state has been loaded, and after :meth:`take`.
        """
        self.tasks, self.classes = bool(self.task > 0), bool(self.past.any())


def draw_classes(among: Tensor, n: int) -> Tensor:
    """Draw n classes, int64 ``(n,)``, uniformly among those that are marked in ``(classes,)``."""
    return torch.multinomial(among.float(), n, replacement=True)


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose parameters and buffers are frozen parameters."""
    copy = deepcopy(module).requires_grad_(False).eval()
    for part in list(copy.modules()):
        # Buffers follow the run's policy, which may reset them; parameters stay.
        for name, buffer in list(part.named_buffers(recurse=False)):
            delattr(part, name)
            part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return copy
