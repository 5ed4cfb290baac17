"""The diagonal of a model's Fisher information, and its Kronecker factors.

The Fisher of a prediction needs no labels. The empirical Fisher has the data's samples instead of
the model's own: ``F_j = mean_i (d log p(x_i) / d theta_j)^2`` over samples i, Amari 1998, Natural
Gradient Works Efficiently in Learning.

The model runs in its current state: the caller sets its modes, autocast and the random generators,
see :func:`~flsuite.metrics.fisher.estimates.measuring`.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from flsuite.common.errors import FlsuiteError
from flsuite.common.state import Layer, State
from flsuite.data.federated import Task
from flsuite.metrics.fisher.estimates import Batch, Expectation, Outputs, columns, fast_formats
from flsuite.metrics.fisher.layers import LayerPass, ProductLayers, recorded
from flsuite.metrics.fisher.products import (
    Diagonal,
    Total,
    gradient_factor,
    input_factor,
    summed_squares,
)
from flsuite.models.layers import uncovered

Estimator = Literal["exact", "batch"]
Factors = dict[str, dict[str, Tensor]]

# Elements of a layer's gradients over all columns at a time, 16 MiB, to stay in the cache.
_NUMBERS_AT_ONCE = 2**22


def predictive_diagonal(
    module: nn.Module,
    names: Collection[str],
    batches: Iterable[Batch],
    task: Task,
    expectation: Expectation = "exact",
    generator: torch.Generator | None = None,
) -> State:
    """Return the diagonal of the Fisher for the parameters ``names``, in float32.

    It is zero for a frozen parameter. Linear and Conv2d layers use closed forms, any other
    parameter uses per-sample gradients.

    Args:
        module: A module that returns logits ``(n, outputs)``, by its method ``logits`` or its
            forward pass.
        names: Names of parameters of the module.
        batches: Tuples of tensors with one row per sample. The first one contains the inputs.
        task: The kind of prediction. ``other`` is taken as a regression with the squared loss.
        expectation: ``exact`` takes one backward pass per output. ``sampled`` takes one, for a
            target drawn from the prediction.
        generator: Random generator of these targets. Default: torch's own.

    Raises:
        FlsuiteError: If the outputs do not depend on any of the parameters, do not have one row per
            sample, or cannot be vectorized over samples.
    """
    logits = Outputs(module)
    diagonal = Diagonal(module, names)

    with fast_formats(module):
        for chunk in _chunks(logits, diagonal.trained, batches, task, expectation, generator):
            x, parameters = chunk.x, diagonal.trained
            squares = summed_squares(chunk.passes, parameters, logits, (x,), chunk.columns)
            diagonal.add(squares, len(x))
    return diagonal.mean()


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
    likelihood, diagonal = Outputs(model, "log_likelihood"), Diagonal(model, names)
    layers = ProductLayers(model, diagonal.trained)

    for batch in batches:
        if estimator == "batch":
            diagonal.add(_squared_mean(likelihood, diagonal.trained, batch), 1)
            continue
        # The only column is the log-likelihood itself.
        column = torch.ones(1, len(batch[0]), device=batch[0].device)
        passes: list[LayerPass] | None = []
        # Always compute the first batch as a whole, to detect a faulty log-likelihood.
        if layers.layers or not diagonal.count:
            passes = layers.passes(partial(likelihood, batch), column.to)
        if passes is None:
            raise likelihood.independent()
        squares = summed_squares(passes, diagonal.trained, likelihood, batch, column)
        diagonal.add(squares, len(batch[0]))

    return diagonal.mean()


def _squared_mean(
    likelihood: Outputs, parameters: Mapping[str, Tensor], batch: Batch
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


def kfac_factors(
    module: nn.Module,
    layers: Sequence[Layer],
    batches: Iterable[Batch],
    task: Task,
    expectation: Expectation = "exact",
    generator: torch.Generator | None = None,
) -> Factors:
    """Return the Kronecker factors of the Fisher by layer, in float32.

    ``{"a": A, "g": G}`` approximates the Fisher of a layer's weight W ``(out, in)`` by
    ``F vec(W) = G W A``. A convolution's inputs are unfolded, and a bias is the last column of W,
    with input 1. The factors of a frozen layer are zero.

    The other arguments are the same as in :func:`predictive_diagonal`.

    Args:
        layers: Layers of the module.

    Raises:
        FlsuiteError: If K-FAC does not cover a layer.
    """
    require_kfac(module, layers)
    logits = Outputs(module)
    trained, samples = _trained(module, layers), 0
    totals = {layer.name: _no_factors(module, layer) for layer in layers}

    with fast_formats(module):
        for chunk in _chunks(logits, trained, batches, task, expectation, generator):
            samples += len(chunk.x)
            passes = {part.name: part for part in chunk.passes}
            _require_passes(layers, trained, passes, chunk.failed)
            for name in totals.keys() & passes.keys():
                part = passes[name]
                has_bias = part.layer.bias is not None
                totals[name]["a"].add(input_factor(part.layer, part.input, has_bias))
                totals[name]["g"].add(gradient_factor(part))

    return {
        name: {kind: total.mean(samples) for kind, total in pair.items()}
        for name, pair in totals.items()
    }


def require_kfac(module: nn.Module, layers: Sequence[Layer], x: Tensor | None = None) -> None:
    """Refuse layers that K-FAC does not cover, before any samples are needed.

    Args:
        module: A module that returns logits ``(n, outputs)``, by its method ``logits`` or its
            forward pass.
        layers: Layers of the module.
        x: An input of one sample, such as zeros. The model's pass over it also reveals layers that
            are called twice, or whose weight is used elsewhere. Default: only properties of single
            layers are checked here, and :func:`kfac_factors` checks the rest.

    Raises:
        FlsuiteError: If a layer is not covered.
    """
    for layer in layers:
        if why := uncovered(module.get_submodule(layer.name)):
            raise _refusal(layer.name, why)
    if x is None:
        return

    trained = _trained(module, layers)
    if not trained:
        return
    products = ProductLayers(module, trained, positions=True)
    passes = products.passes(partial(Outputs(module), (x,)), lambda z: torch.ones_like(z)[None])
    # Without a pass, no layer has been used, which the Fisher itself reports.
    if passes is not None:
        _require_passes(layers, trained, products.layers, products.failed)


def _require_passes(
    layers: Iterable[Layer],
    trained: Collection[str],
    passes: Collection[str],
    failed: Mapping[str, str],
) -> None:
    """Refuse a trained layer without a pass."""
    for name in (layer.name for layer in layers if layer.weight_name in trained):
        if name not in passes:
            raise _refusal(name, failed.get(name, "it is not part of the model"))


class _Chunk(NamedTuple):
    """A few samples: their inputs, their columns, and their passes through the layers.

    Attributes:
        x: The inputs.
        columns: Gradients at the logits, ``(columns, n, outputs)``.
        passes: The samples' inputs and output gradients at the layers that qualify.
        failed: The reasons why other layers do not qualify.
    """

    x: Tensor
    columns: Tensor
    passes: list[LayerPass]
    failed: Mapping[str, str]


def _chunks(
    logits: Outputs,
    parameters: Mapping[str, Tensor],
    batches: Iterable[Batch],
    task: Task,
    expectation: Expectation,
    generator: torch.Generator | None,
) -> Iterator[_Chunk]:
    """Yield the samples a few at a time, to bound the memory of gradients over all columns."""
    if not parameters:
        return
    layers = ProductLayers(logits.model, parameters, positions=True)
    at_once = 0

    for batch in batches:
        inputs = batch[0].clone(memory_format=torch.contiguous_format)
        at_once = at_once or _samples_at_once(logits, layers, inputs, expectation)
        # Chunks of equal size, because each new size costs a backward pass.
        for x in inputs.chunk(math.ceil(len(inputs) / at_once)):
            made: list[Tensor] = []

            def gradients(outputs: Tensor, made: list[Tensor] = made) -> Tensor:
                made.append(columns(outputs, task, expectation, generator))
                return made[0]

            passes = layers.passes(partial(logits, (x,)), gradients)
            if passes is None:
                raise logits.independent()
            yield _Chunk(x, made[0], passes, layers.failed)


def _samples_at_once(
    logits: Outputs, layers: ProductLayers, inputs: Tensor, expectation: Expectation
) -> int:
    """Return the number of samples whose gradients over all columns fit the bound."""
    with torch.no_grad(), recorded(layers.layers) as calls:
        outputs = logits((inputs[:1],))
    sizes = [call.outputs for of_layer in calls.values() for call in of_layer]
    per_sample = max(sizes, default=1) * (outputs.shape[1] if expectation == "exact" else 1)
    return max(1, _NUMBERS_AT_ONCE // per_sample)


def _no_factors(module: nn.Module, layer: Layer) -> dict[str, Total]:
    """Return empty sums of a layer's factors."""
    weight = module.get_parameter(layer.weight_name)
    inputs, outputs = weight[0].numel() + int(layer.bias), len(weight)
    return {
        "a": Total(weight.new_empty(inputs, inputs)),
        "g": Total(weight.new_empty(outputs, outputs)),
    }


def _trained(module: nn.Module, layers: Iterable[Layer]) -> dict[str, Tensor]:
    """Return the parameters of the layers that are not frozen."""
    parameters: dict[str, Tensor] = {}
    for layer in layers:
        own = dict(module.get_submodule(layer.name).named_parameters(layer.name))
        trained = {name: p for name, p in own.items() if p.requires_grad}
        if trained and len(trained) < len(own):
            raise _refusal(layer.name, "only a part of it is trained")
        parameters |= trained
    return parameters


def _refusal(name: str, why: str) -> FlsuiteError:
    return FlsuiteError(
        f"K-FAC covers Linear and Conv2d layers that are called once, but layer {name!r} is not "
        f"covered: {why}; change the model, or use the diagonal Fisher"
    )
