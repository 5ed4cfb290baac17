"""The diagonal of the empirical Fisher information of chosen parameters, from a model's log-likelihood.

``F_j = mean_i (d log p(x_i) / d theta_j)^2`` over samples i: Amari 1998, Natural Gradient Works Efficiently in Learning, with
the samples of the data in place of the model's own.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flsuite.errors import FlsuiteError
from flsuite.state import State

__all__ = ["Estimator", "fisher_diagonal"]

Estimator = Literal["exact", "batch"]
Batch = tuple[Tensor, ...]

_AT_ONCE = 8  # float32 sums of so few numbers are good to seven digits
_NUMBERS_AT_ONCE = (
    2**24
)  # of per-sample gradients, 64 MiB: far beyond a cache, more at once is slower


def fisher_diagonal(
    model: nn.Module, names: Collection[str], batches: Iterable[Batch], estimator: Estimator
) -> State:
    """The Fisher diagonal of the parameters ``names``: float32, in their shapes; zero where one is frozen.

    ``exact`` is the mean over samples of the squared gradient of each. ``batch`` is the mean over batches of the squared
    gradient of each batch's mean log-likelihood; with batches of one size it is never more than ``exact``. Where the
    gradients of samples are independent with mean zero, as at an optimum, it comes to ``exact`` divided by the batch size;
    far from one it is more than that. It is returned as it is, without the factor.

    The model runs as it is: its modes, autocast and the generators are the caller's affair.

    Args:
        model: Has ``log_likelihood(batch)``, see :class:`~flsuite.models.base.LikelihoodModel`.
        batches: Tuples of tensors with one row a sample.

    Raises:
        FlsuiteError: If the log-likelihood is not one number a sample, does not depend on the parameters, or, in ``exact``,
            cannot be vectorised.
    """
    likelihood = _LogLikelihood(model)
    own = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in names}
    trained = {name: p for name, p in own.items() if p.requires_grad}
    totals = {name: _Total(p) for name, p in own.items()}
    weight = 0
    layers: dict[str, nn.Linear] | None = None
    for batch in batches:
        if estimator == "batch":
            found: Iterable[tuple[str, Tensor]] = _squared_mean(likelihood, trained, batch).items()
        else:
            layers = _one_row_a_sample(likelihood, trained, batch) if layers is None else layers
            found = _squares(likelihood, trained, layers, batch)
        for name, squares in found:
            totals[name].add(squares)
        weight += 1 if estimator == "batch" else len(batch[0])
    return {name: (total.value() / max(weight, 1)).float() for name, total in totals.items()}


class _Total:
    """A sum of float32 tensors: a few of them in float32, which is fast, and their sums in float64, which is exact enough."""

    def __init__(self, like: Tensor) -> None:
        self._sum = torch.zeros_like(like, dtype=torch.float64)
        self._few = torch.zeros_like(like, dtype=torch.float32)
        self._added = 0

    def add(self, squares: Tensor) -> None:
        self._few += squares
        self._added += 1
        if self._added % _AT_ONCE == 0:
            self._flush()

    def value(self) -> Tensor:
        self._flush()
        return self._sum

    def _flush(self) -> None:
        self._sum += self._few
        self._few.zero_()


def _squared_mean(
    likelihood: "_LogLikelihood", parameters: Mapping[str, Tensor], batch: Batch
) -> State:
    """The squared gradient of a batch's mean."""
    gradients = _gradients(likelihood, likelihood(batch).mean(), parameters)
    return {name: g.square() for name, g in gradients.items()}


def _squares(
    likelihood: "_LogLikelihood",
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, nn.Linear],
    batch: Batch,
) -> Iterator[tuple[str, Tensor]]:
    """The sum over a batch of the squared gradients of its samples: of linear layers, and of the rest."""
    found = _squares_of_layers(likelihood, layers, batch) if layers else {}
    yield from found.items()
    rest = {name: p.detach() for name, p in parameters.items() if name not in found}
    if rest:
        yield from _squares_by_vmap(likelihood, rest, batch)


def _squares_of_layers(
    likelihood: "_LogLikelihood", layers: Mapping[str, nn.Linear], batch: Batch
) -> State:
    """A sample's gradient of a weight is the outer product of the gradient at the layer's output and the layer's input, so
    that the sum of their squares is one matrix product of squares: no gradient of a single sample is ever written down
    (Dangel et al. 2020, BackPACK: Packing more into Backprop, arXiv:1912.10985).
    """
    with _tapped(layers) as calls:
        total = likelihood(batch).sum()
    at_output = torch.autograd.grad(total, [calls[name][0][1] for name in layers])
    found: State = {}
    for (name, layer), g in zip(layers.items(), at_output, strict=True):
        found[f"{name}.weight"] = g.square().T @ calls[name][0][0].square()
        if layer.bias is not None:
            found[f"{name}.bias"] = g.square().sum(0)
    return found


def _squares_by_vmap(
    likelihood: "_LogLikelihood", parameters: State, batch: Batch
) -> Iterator[tuple[str, Tensor]]:
    """Any parameters: the gradients of as many samples at a time as there is room for."""

    def of_one(parameters: State, *sample: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in parameters.items()}
        return functional_call(likelihood, named, (tuple(part[None] for part in sample),))[0]

    per_sample = vmap(grad(of_one), in_dims=(None, *(0 for _ in batch)), randomness="different")
    at_once = max(1, _NUMBERS_AT_ONCE // sum(p.numel() for p in parameters.values()))
    for chunk in zip(*(part.split(at_once) for part in batch), strict=True):
        try:
            gradients: State = per_sample(parameters, *chunk)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the same samples went through as a batch before
            raise FlsuiteError(
                f"{likelihood.owner}.log_likelihood cannot be vectorised over samples ({str(error).splitlines()[0]}); write it "
                "without operations in place and .item(), or set the Fisher's estimator to batch"
            ) from error
        yield from ((name, g.square().sum(0)) for name, g in gradients.items())


def _one_row_a_sample(
    likelihood: "_LogLikelihood", parameters: Mapping[str, Tensor], batch: Batch
) -> dict[str, nn.Linear]:
    """The linear layers whose gradient is made of one outer product a sample: called once, on one row a sample, with
    parameters that nothing else uses. The proof is that the outer products add up to autograd's gradient.
    """
    linear = {
        name: layer
        for name, layer in likelihood.model.named_modules()
        if type(layer) is nn.Linear
        and all(f"{name}.{p}" in parameters for p, _ in layer.named_parameters())
    }
    with _tapped(linear) as calls:
        total = likelihood(batch).sum()
    whole = _gradients(likelihood, total, parameters, keep=True)
    once = [
        k for k in calls if len(calls[k]) == 1 and calls[k][0][0].shape[:-1] == (len(batch[0]),)
    ]
    once = [k for k in once if calls[k][0][1].requires_grad]
    outputs = [calls[k][0][1] for k in once]
    at_output = torch.autograd.grad(total, outputs, materialize_grads=True) if once else ()
    return {
        name: linear[name]
        for name, g in zip(once, at_output, strict=True)
        if _alike(g.T @ calls[name][0][0], whole[f"{name}.weight"])
        and (linear[name].bias is None or _alike(g.sum(0), whole[f"{name}.bias"]))
    }


def _gradients(
    likelihood: "_LogLikelihood",
    value: Tensor,
    parameters: Mapping[str, Tensor],
    keep: bool = False,
) -> State:
    """Autograd's; zero for parameters that the value does not depend on, unless these are all."""
    found: Sequence[Tensor | None] = ()
    if value.requires_grad and parameters:
        found = torch.autograd.grad(
            value, list(parameters.values()), retain_graph=keep, allow_unused=True
        )
    if all(g is None for g in found):
        raise FlsuiteError(
            f"{likelihood.owner}.log_likelihood depends on none of the parameters whose Fisher is asked for; compute it from "
            "them, with gradients"
        )
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def _alike(a: Tensor, b: Tensor) -> bool:
    """Up to the rounding of another order of summation."""
    return bool(((a - b).abs().max() <= 1e-4 * b.abs().max()).item())


@contextmanager
def _tapped(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Collects input and output of every call of the layers."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def tap(name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.setdefault(name, []).append((args[0].detach(), output))

    handles = [layer.register_forward_hook(partial(tap, name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class _LogLikelihood(nn.Module):
    """The log-likelihood as a forward pass, which torch.func can call with other parameters: a batch to ``(n,)``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.owner = type(model).__name__

    def forward(self, batch: Batch) -> Tensor:
        values: Tensor = self.model.log_likelihood(batch)
        if values.shape != (len(batch[0]),):
            raise FlsuiteError(
                f"{self.owner}.log_likelihood must return one number a sample, ({len(batch[0])},), not {tuple(values.shape)}"
            )
        return values
