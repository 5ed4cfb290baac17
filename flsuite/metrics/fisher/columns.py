"""The scalars per sample whose squared gradients sum to the Fisher of a prediction.

With z the logits and p the predicted probabilities, held constant:

- classes: ``sqrt(p_c) log_softmax(z)_c``, whose gradient at z is ``sqrt(p_c) (e_c - p)``;
- labels: ``sqrt(p_c (1 - p_c)) z_c``;
- the squared loss ``sum_c (z_c - y_c)^2 / 2``, of the task ``other``: ``z_c``.

Only the gradients at z are computed. They are finite for any finite z.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from flsuite.common.errors import FlsuiteError, require_one_of
from flsuite.data.spec import Task
from flsuite.models.protocols import LogitModel

Expectation = Literal["exact", "sampled"]
"""``exact`` has one column per output. ``sampled`` has one column, for a target drawn from the
prediction. Its squares have the same expectation."""


class Logits(nn.Module):
    """The logits of a batch, as a forward pass for torch.func.

    Args:
        model: A :class:`~flsuite.models.protocols.LogitModel`, or a module whose forward pass
            returns logits.
    """

    needs = "logits"
    otherwise = ""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.owner = type(model).__name__

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the logits ``(n, outputs)``."""
        x = batch[0]
        logits: Tensor = (
            self.model.logits(x) if isinstance(self.model, LogitModel) else self.model(x)
        )
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if not isinstance(got, tuple) or len(got) != 2 or len(logits) != len(x):
            raise FlsuiteError(
                f"the logits of {self.owner} must have one row per sample, ({len(x)}, outputs), "
                f"got {got}"
            )
        return logits


def columns(
    logits: Tensor,
    task: Task,
    expectation: Expectation,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the gradients of the scalars at the logits, ``(columns, n, outputs)``.

    Args:
        logits: ``(n, outputs)``.
        task: The kind of prediction. ``other`` is taken as a regression with the squared loss.
        expectation: Over all outputs, or for one target per sample drawn from the prediction.
        generator: Random generator of the targets, on the CPU. Default: torch's own.
    """
    owner = "the Fisher of a prediction"
    require_one_of(owner, get_args(Task), task=task)
    require_one_of(owner, get_args(Expectation), expectation=expectation)
    z = logits.detach()
    if expectation == "sampled":
        return _sampled(z, task, generator)[None]

    identity = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)[:, None]
    if task == "other":
        return identity.expand(-1, len(z), -1)
    if task == "multilabel":
        return (z.sigmoid() * (-z).sigmoid()).sqrt() * identity
    p = z.softmax(1)
    return p.sqrt().T[..., None] * (identity - p)


def _sampled(z: Tensor, task: Task, generator: torch.Generator | None) -> Tensor:
    """Return the gradient at z of the log-likelihood of a target drawn from the prediction."""
    if task == "other":
        return torch.randn(z.shape, generator=generator).to(z)
    if task == "multilabel":
        p = z.sigmoid()
        return (torch.rand(z.shape, generator=generator).to(z) < p).to(z.dtype) - p

    p = z.softmax(1)
    # Invert the CDF, because torch.multinomial would raise on a diverged model. The server reports
    # its NaN with the client's number.
    uniform = torch.rand((len(z), 1), generator=generator).to(z)
    label = (p.cumsum(1) <= uniform).sum(1).clamp(max=z.shape[1] - 1)
    return nn.functional.one_hot(label, z.shape[1]).to(z.dtype) - p
