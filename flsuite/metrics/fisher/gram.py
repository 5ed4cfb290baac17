"""Gram matrices of the inputs of layers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from flsuite.metrics.fisher.columns import Logits
from flsuite.metrics.fisher.layers import recorded, uncovered
from flsuite.metrics.fisher.products import input_factor
from flsuite.metrics.fisher.totals import Total
from flsuite.state import Layer

__all__ = ["gram_matrices"]

Batch = tuple[Tensor, ...]


def gram_matrices(
    module: nn.Module, layers: Sequence[Layer], batches: Iterable[Batch], bias: bool = False
) -> dict[str, Tensor]:
    """Return ``X^T X / rows`` by layer, in float32, X the layer's inputs ``(rows, in)``.

    A row is a position of a sample: one per sample for a linear layer on vectors, one per output
    pixel for a convolution, whose inputs are unfolded. There are no gradients.

    A layer without exactly one call in every forward pass is left out, and so are convolutions with
    groups or with other paddings than zeros.

    Args:
        module: Gives logits ``(n, outputs)``, by its method ``logits`` or its forward pass.
        layers: Layers of the module.
        batches: Tuples of tensors with one row per sample. The first has the inputs.
        bias: Whether the inputs of a layer with a bias have a last column of ones.
    """
    logits = Logits(module)
    found = {layer.name: module.get_submodule(layer.name) for layer in layers}
    known = {name: layer for name, layer in found.items() if uncovered(layer) is None}
    totals: dict[str, Total] = {}
    rows = dict.fromkeys(known, 0)

    for batch in batches:
        with torch.no_grad(), recorded(known) as calls:
            logits(batch)
        known = {name: layer for name, layer in known.items() if len(calls[name]) == 1}
        for name, layer in known.items():
            call = calls[name][0]
            assert isinstance(layer, (nn.Linear, nn.Conv2d))
            product = input_factor(layer, call.input, bias and layer.bias is not None)
            totals.setdefault(name, Total(product)).add(product)
            rows[name] += call.outputs // layer.weight.shape[0]

    return {name: (totals[name].value() / rows[name]).float() for name in known if name in totals}
