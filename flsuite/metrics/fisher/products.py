"""Sums over batches of a layer's passes: squared gradients, K-FAC factors and Gram matrices.

With ``a_t (in,)`` the input and ``g_ct (out,)`` the gradient of column c at position t, where a
bias is a last column of the weight with input 1:

- the gradient of a sample and column is ``sum_t g_ct a_t^T``;
- ``A = mean_n sum_t a_t a_t^T`` and ``G = mean_n sum_c (1/T) sum_t g_ct g_ct^T`` over T positions:
  Martens and Grosse 2015, Optimizing Neural Networks with Kronecker-factored Approximate Curvature,
  arXiv:1503.05671, and Grosse and Martens 2016, A Kronecker-factored Approximate Fisher Matrix for
  Convolution Layers, arXiv:1602.01407.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flsuite.common.state import Layer, State
from flsuite.metrics.fisher.estimates import Batch, Outputs, sample_squares
from flsuite.metrics.fisher.layers import LayerPass, recorded, unfolded
from flsuite.models.layers import uncovered


def _layer_squares(part: LayerPass) -> State:
    """Return the sums over samples and columns of squared gradients, by parameter."""
    layer, g = part.layer, part.gradients
    if part.input.ndim == 2:
        # sum_i (g_i a_i^T)^2 = (g^2)^T (a^2): one product, without per-sample gradients.
        squared = g.square().sum(1)
        squares = {f"{part.name}.weight": squared.T @ part.input.square()}
        bias = squared
    else:
        at = at_positions(layer, g)
        products = torch.bmm(at.flatten(1, 2), unfolded(layer, part.input).mT)
        weight = products.square_().sum(0).unflatten(0, (g.shape[1], -1)).sum(0)
        squares = {f"{part.name}.weight": weight.view_as(layer.weight)}
        bias = at.sum(-1).square().sum(1) if layer.bias is not None else at

    if layer.bias is not None:
        squares[f"{part.name}.bias"] = bias.sum(0)
    return squares


def summed_squares(
    passes: Iterable[LayerPass], parameters: State, outputs: Outputs, batch: Batch, columns: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the sums over samples and columns of squared gradients, by parameter.

    Args:
        passes: The batch's passes through the layers that qualify. They come first.
        parameters: The parameters to compute sums for.
        outputs: See :func:`~flsuite.metrics.fisher.estimates.sample_squares`.
        batch: Tensors with one row per sample.
        columns: Gradients at the outputs, ``(columns, n, ...)``.
    """
    done: set[str] = set()
    for part in passes:
        if f"{part.name}.weight" in parameters:
            squares = _layer_squares(part)
            done |= squares.keys()
            yield from squares.items()

    rest = {name: p.detach() for name, p in parameters.items() if name not in done}
    if rest:
        for squares in sample_squares(outputs, rest, batch, columns):
            yield from squares.items()


def input_factor(layer: nn.Linear | nn.Conv2d, input: Tensor, bias: bool) -> Tensor:
    """Return ``sum_n sum_t a_t a_t^T``, ``(in, in)``, with a column of ones for a bias."""
    if input.ndim == 2:
        rows, product = input, input.T @ input
        total = rows.sum(0)
        count = len(rows)
    else:
        columns = unfolded(layer, input)
        product = _product(columns)
        total = columns.sum((0, 2))
        count = columns.shape[0] * columns.shape[2]
    if not bias:
        return product

    corner = product.new_full((1, 1), count)
    return torch.cat([torch.cat([product, total[:, None]], 1), torch.cat([total[None], corner], 1)])


def gradient_factor(part: LayerPass) -> Tensor:
    """Return ``sum_n sum_c (1/T) sum_t g_ct g_ct^T``, ``(out, out)``."""
    if part.input.ndim == 2:
        rows = part.gradients.flatten(0, 1)
        return rows.T @ rows
    at = at_positions(part.layer, part.gradients)
    return _product(at.flatten(0, 1)) / at.shape[-1]


def at_positions(layer: nn.Linear | nn.Conv2d, gradients: Tensor) -> Tensor:
    """Return the gradients ``(n, columns, ...)`` as ``(n, columns, out, positions)``."""
    if isinstance(layer, nn.Conv2d):
        return gradients.flatten(3)
    return gradients.unsqueeze(2).flatten(2, -2).mT  # a vector has one position


def _product(rows: Tensor) -> Tensor:
    """Return the sum over the batch and its positions of ``row row^T``.

    Args:
        rows: ``(batch, size, positions)``.
    """
    if rows.shape[1] <= rows.shape[2]:
        # The products are smaller than the rows. Rows are not copied.
        return torch.bmm(rows, rows.mT).sum(0)
    joined = rows.transpose(0, 1).flatten(1)
    return joined @ joined.T


# Number of terms added in float32 before their sum is added in float64. Few enough to keep seven
# digits.
_AT_ONCE = 8


class Total:
    """A sum of float32 tensors, added a few at a time in float32 and then in float64.

    Args:
        like: A tensor of the shape and device of the terms.
    """

    def __init__(self, like: Tensor) -> None:
        self._sum = torch.zeros_like(like, dtype=torch.float64)
        self._few = torch.zeros_like(like, dtype=torch.float32)
        self._added = 0

    def add(self, term: Tensor) -> None:
        """Add a term."""
        self._few += term
        self._added += 1
        if self._added % _AT_ONCE == 0:
            self._flush()

    def mean(self, count: int) -> Tensor:
        """Return the sum divided by a number of terms, in float32."""
        self._flush()
        return (self._sum / max(count, 1)).float()

    def _flush(self) -> None:
        self._sum += self._few
        self._few.zero_()


class Diagonal:
    """The sums of squared gradients of a module's named parameters, i.e. its Fisher diagonal.

    The Fisher of tied weights is computed under their first name.

    Attributes:
        trained: The parameters that are not frozen, each under one name.
        count: Number of terms so far.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        named = module.named_parameters(remove_duplicate=False)
        self._named = {name: p for name, p in named if name in names}
        self._first = {id(p): name for name, p in reversed(self._named.items())}
        own = {name: p for name, p in self._named.items() if self._first[id(p)] == name}
        self.trained: State = {name: p for name, p in own.items() if p.requires_grad}
        self._totals = {name: Total(p) for name, p in own.items()}
        self.count = 0

    def add(self, squares: Iterable[tuple[str, Tensor]], count: int) -> None:
        """Add squared gradients, by parameter, that are a sum of so many terms."""
        for name, square in squares:
            self._totals[name].add(square)
        self.count += count

    def mean(self) -> State:
        """Return the sums divided by the number of terms, in float32, by every name."""
        means = {name: total.mean(self.count) for name, total in self._totals.items()}
        return {name: means[self._first[id(p)]] for name, p in self._named.items()}


def gram_matrices(
    module: nn.Module, layers: Sequence[Layer], batches: Iterable[Batch], bias: bool = False
) -> dict[str, Tensor]:
    """Return ``X^T X / rows`` by layer, in float32, with X the layer's inputs ``(rows, in)``.

    A row is a position of a sample: one per sample for a linear layer on vectors, one per output
    pixel for a convolution, whose inputs are unfolded. No gradients are computed.

    A layer without exactly one call in every forward pass is excluded, and so are convolutions with
    groups or with non-zero padding modes.

    Args:
        module: A module that returns logits ``(n, outputs)``, by its method ``logits`` or its
            forward pass.
        layers: Layers of the module.
        batches: Tuples of tensors with one row per sample. The first one contains the inputs.
        bias: Whether the inputs of a layer with a bias have a last column of ones.
    """
    logits = Outputs(module)
    modules = {layer.name: module.get_submodule(layer.name) for layer in layers}
    covered: dict[str, Any] = {k: layer for k, layer in modules.items() if uncovered(layer) is None}
    totals: dict[str, Total] = {}
    rows = dict.fromkeys(covered, 0)

    for batch in batches:
        with torch.no_grad(), recorded(covered) as calls:
            logits(batch)
        covered = {name: layer for name, layer in covered.items() if len(calls[name]) == 1}
        for name, layer in covered.items():
            call = calls[name][0]
            product = input_factor(layer, call.input, bias and layer.bias is not None)
            totals.setdefault(name, Total(product)).add(product)
            rows[name] += call.outputs // layer.weight.shape[0]

    return {name: totals[name].mean(rows[name]) for name in covered if name in totals}
