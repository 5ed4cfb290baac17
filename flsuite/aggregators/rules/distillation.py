"""A teacher of several models, and the losses between its logits and a student's."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Ensemble", "adversarial_loss", "distillation_loss"]


class Ensemble(nn.Module):
    """The weighted mean of the logits of several models, which stay as they are.

    Args:
        members: The models, in evaluation mode.
        weights: Weight of each model, of any sum.
    """

    weights: Tensor

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members).requires_grad_(False).eval()
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        device = next(self.members.parameters()).device
        self.register_buffer("weights", shares.float().to(device))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.stack([member(x) for member in self.members])
        return torch.einsum("m,mno->no", self.weights, logits)


def adversarial_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """Return minus the divergence of the student where it predicts another class than the teacher.

    It is ``- mean of 1[argmax S != argmax T] KL(softmax T || softmax S)``, over logits
    ``(n, classes)``.
    """
    differ = teacher.argmax(1) != student.argmax(1)
    return -(differ * _divergence(teacher, student)).mean()


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return ``T^2 KL(softmax(teacher / T) || softmax(student / T))``, the mean over samples."""
    divergence = _divergence(teacher / temperature, student / temperature)
    return temperature**2 * divergence.mean()


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each sample, ``(n,)``."""
    log_teacher, log_student = teacher.log_softmax(1), student.log_softmax(1)
    return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(1)
