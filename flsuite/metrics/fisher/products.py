"""Sums over a batch, from what it leaves at a layer: squared gradients, and K-FAC's factors.

With ``a_t (in,)`` the input and ``g_ct (out,)`` the gradient of column c at position t, where a
bias is a last column of the weight with input 1:

- the gradient of a sample and column is ``sum_t g_ct a_t^T``;
- ``A = mean_n sum_t a_t a_t^T`` and ``G = mean_n sum_c (1/T) sum_t g_ct g_ct^T`` over T positions:
  Martens and Grosse 2015, Optimizing Neural Networks with Kronecker-factored Approximate Curvature,
  arXiv:1503.05671, and Grosse and Martens 2016, A Kronecker-factored Approximate Fisher Matrix for
  Convolution Layers, arXiv:1602.01407.
"""

import torch
from torch import Tensor, nn

from flsuite.metrics.fisher.layers import LayerPass, unfolded
from flsuite.state import State

__all__ = ["gradient_factor", "input_factor", "layer_squares"]


def layer_squares(part: LayerPass) -> State:
    """Return the sums over samples and columns of squared gradients, by parameter."""
    layer, g = part.layer, part.gradients
    if part.input.ndim == 2:
        # sum_i (g_i a_i^T)^2 = (g^2)^T (a^2): one product, and no gradient of a sample.
        squared = g.square().sum(1)
        found = {f"{part.name}.weight": squared.T @ part.input.square()}
        bias = squared
    else:
        at = _at_positions(layer, g)
        products = torch.bmm(at.flatten(1, 2), unfolded(layer, part.input).mT)
        weight = products.square_().sum(0).unflatten(0, (g.shape[1], -1)).sum(0)
        found = {f"{part.name}.weight": weight.view_as(layer.weight)}
        bias = at.sum(-1).square().sum(1) if layer.bias is not None else at

    if layer.bias is not None:
        found[f"{part.name}.bias"] = bias.sum(0)
    return found


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
    at = _at_positions(part.layer, part.gradients)
    return _product(at.flatten(0, 1)) / at.shape[-1]


def _at_positions(layer: nn.Linear | nn.Conv2d, gradients: Tensor) -> Tensor:
    """Return the gradients ``(n, columns, ...)`` as ``(n, columns, out, positions)``."""
    return gradients.flatten(2, -2).mT if isinstance(layer, nn.Linear) else gradients.flatten(3)


def _product(rows: Tensor) -> Tensor:
    """Return the sum over the batch and its positions of ``row row^T``.

    Args:
        rows: ``(batch, size, positions)``.
    """
    if rows.shape[1] <= rows.shape[2]:
        # The products are smaller than the rows, which are not copied.
        return torch.bmm(rows, rows.mT).sum(0)
    joined = rows.transpose(0, 1).flatten(1)
    return joined @ joined.T
