"""The diagonal of the empirical Fisher information of chosen parameters.

``F_j = mean_i (d log p(x_i) / d theta_j)^2`` over samples i: Amari 1998, Natural Gradient Works
Efficiently in Learning, with the data's samples instead of the model's own.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State
from flsuite.metrics.fisher.estimates import Batch
from flsuite.metrics.fisher.layers import LayerPass, ProductLayers
from flsuite.metrics.fisher.products import Diagonal, summed_squares

Estimator = Literal["exact", "batch"]


def fisher_diagonal(
    model: nn.Module, names: Collection[str], batches: Iterable[Batch], estimator: Estimator
) -> State:
    """Return the Fisher diagonal of the parameters ``names``, in float32.

    It is zero for a frozen parameter.

    ``exact`` is the mean over samples of the squared gradient of each sample. ``batch`` is the mean
    over batches of the squared gradient of each batch's mean log-likelihood. With batches of one
    size, ``batch`` never exceeds ``exact``. It equals ``exact`` divided by the batch size if the
    gradients of samples are independent with mean zero, as at an optimum, and is larger far from an
    optimum. The result is not multiplied by the batch size.

    The model runs in its current state: the caller sets its modes, autocast and the random
    generators.

    Args:
        model: A model with ``log_likelihood(batch)``, see
            :class:`~flsuite.models.abilities.LikelihoodModel`.
        names: Names of parameters of the model.
        batches: Tuples of tensors with one row per sample.
        estimator: ``exact`` or ``batch``.

    Raises:
        FlsuiteError: If the log-likelihood is not one number per sample, does not depend on the
            parameters, or, with ``exact``, cannot be vectorized.
    """
    likelihood = _LogLikelihood(model)
    diagonal = Diagonal(model, names)
    trained = diagonal.trained
    layers = ProductLayers(model, trained)
    weight = 0

    for batch in batches:
        if estimator == "batch":
            squares = _squared_mean(likelihood, trained, batch)
        else:
            squares = _sum_of_squares(likelihood, trained, layers, batch, first=weight == 0)
        diagonal.add(squares)
        weight += 1 if estimator == "batch" else len(batch[0])

    return diagonal.mean(weight)


def _squared_mean(
    likelihood: "_LogLikelihood", parameters: Mapping[str, Tensor], batch: Batch
) -> Iterator[tuple[str, Tensor]]:
    """Yield the squared gradient of the batch mean, by parameter."""
    mean = likelihood(batch).mean()
    gradients: Sequence[Tensor | None] = ()
    if mean.requires_grad and parameters:
        gradients = torch.autograd.grad(mean, list(parameters.values()), allow_unused=True)

    if all(g is None for g in gradients):
        raise likelihood.independent()
    for (name, p), g in zip(parameters.items(), gradients, strict=True):
        yield name, torch.zeros_like(p) if g is None else g.square()


def _sum_of_squares(
    likelihood: "_LogLikelihood",
    parameters: State,
    layers: ProductLayers,
    batch: Batch,
    first: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Return the sums of the samples' squared gradients, by parameter."""
    # The only column is the log-likelihood itself.
    column = torch.ones(1, len(batch[0]), device=batch[0].device)
    passes: list[LayerPass] | None = []
    # Always compute the first batch as a whole, to detect a faulty log-likelihood.
    if layers.layers or first:
        passes = layers.passes(lambda: likelihood(batch), column.to)
    if passes is None:
        raise likelihood.independent()
    return summed_squares(passes, parameters, likelihood, batch, column)


class _LogLikelihood(nn.Module):
    """The log-likelihood as a forward pass for torch.func: n samples to ``(n,)``."""

    needs = "log_likelihood"
    otherwise = ", or set the Fisher's estimator to batch"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.owner = type(model).__name__

    def forward(self, batch: Batch) -> Tensor:
        """Return the log-likelihood of each sample."""
        values: Tensor = self.model.log_likelihood(batch)
        if values.shape != (len(batch[0]),):
            raise FlsuiteError(
                f"{self.owner}.log_likelihood must return one number per sample, "
                f"({len(batch[0])},), got {tuple(values.shape)}"
            )
        return values

    def independent(self) -> FlsuiteError:
        """Return the error of a log-likelihood that does not depend on the chosen parameters."""
        return FlsuiteError(
            f"{self.owner}.log_likelihood depends on none of the parameters whose Fisher is "
            "requested; compute it from them, with gradients"
        )
