"""Sums of squared per-sample gradients for linear layers, without the gradient of any sample.

Where a layer maps one row per sample, the gradient of its weight for a sample is the outer product
of the gradient at the layer's output and the layer's input. The sum of their squares over a batch
is then one matrix product of squares: Dangel et al. 2020, BackPACK: Packing more into Backprop,
arXiv:1912.10985.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from flsuite.state import State

__all__ = ["LinearLayers"]


class _Call(NamedTuple):
    """One call of a layer: its tensors, and what identifies them as unchanged since."""

    input: Tensor
    output: Tensor
    version: int
    node: Node | None


class LinearLayers:
    """The linear layers of a model whose squared gradients come from one matrix product.

    A layer qualifies in a batch if the layer is called once, on one row per sample, and if nothing
    else uses its parameters. Every batch is checked, by the autograd graph and not by values:
    gradients that happen to be zero prove nothing. A layer that fails once is left to the caller
    from then on.

    Args:
        model: Module that the log-likelihood runs.
        parameters: Parameters whose squared gradients are wanted, by name.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if type(layer) is nn.Linear  # a subclass may compute something else
            and all(f"{name}.{own}" in parameters for own, _ in layer.named_parameters())
        }

        # The graph's end points, by which a parameter is recognised whatever module uses it.
        leaves = {name: get_gradient_edge(p).node for name, p in parameters.items()}
        self._leaves = frozenset(leaves.values())
        self._leaves_of = {
            name: [leaves[f"{name}.{own}"] for own, _ in layer.named_parameters()]
            for name, layer in self.layers.items()
        }
        self._proven: set[tuple[str, int]] = set()

    def squares(self, likelihood: Callable[[], Tensor]) -> State | None:
        """Return the sums over a batch of the squared gradients of its samples.

        Args:
            likelihood: Computes the log-likelihood of each sample of the batch, ``(n,)``.

        Returns:
            The sums by parameter, of the layers that qualify. It is ``None`` if the log-likelihood
            depends on none of the parameters.
        """
        with _recorded(self.layers) as calls:
            values = likelihood()
        total = values.sum()
        if total.grad_fn is None:
            return None
        # An edge per use of a parameter, in any module or outside of one.
        uses, reached = _uses(total.grad_fn, self._leaves)
        if not any(uses.values()):
            return None

        # A layer that fails once is not tried again: it would be likely to fail.
        rows = len(values)
        self.layers = {
            name: layer
            for name, layer in self.layers.items()
            if len(calls[name]) == 1
            and calls[name][0].node in reached
            and _is_one_product(calls[name][0], self._leaves_of[name], rows, uses)
        }

        at_output = self._gradients(values, total, {k: calls[k][0].output for k in self.layers})
        squares: State = {}
        for name, layer in self.layers.items():
            g = at_output[name]
            # sum_i (g_i x_i^T)^2 = (g^2)^T (x^2): one product, and no gradient of a sample.
            squares[f"{name}.weight"] = g.square().T @ calls[name][0].input.square()
            if layer.bias is not None:
                squares[f"{name}.bias"] = g.square().sum(0)
        return squares

    def _gradients(self, values: Tensor, total: Tensor, outputs: Mapping[str, Tensor]) -> State:
        """Return the gradients at the outputs of the layers that have one row per sample.

        Row i of the output must depend on sample i alone. The graph does not show this, because a
        table with as many rows as the batch has samples has the right shape. With sample i weighted
        by w_i, the gradient of row i is w_i times as large if the row depends on no other sample.
        Whether it does depends only on the number of rows, so that one further backward pass per
        layer and batch size is enough. Gradients that are all zero show nothing, and leave the
        proof to a later batch.
        """
        rows = len(values)
        unproven = [name for name in outputs if rows > 1 and (name, rows) not in self._proven]
        if not outputs:
            return {}
        at_outputs = torch.autograd.grad(total, list(outputs.values()), retain_graph=bool(unproven))
        gradients = dict(zip(outputs, at_outputs, strict=True))
        if not unproven:
            return gradients

        # No two samples have the same weight, so that no exchange of rows goes unnoticed.
        weights = torch.linspace(1, 2, rows, dtype=values.dtype, device=values.device)
        weighted = torch.autograd.grad((weights * values).sum(), [outputs[k] for k in unproven])
        for name, g in zip(unproven, weighted, strict=True):
            expected = weights[:, None] * gradients[name]
            error, scale = (g - expected).abs().max(), expected.abs().max()
            # A tolerance for float32: two backward passes sum in different orders.
            if error > 1e-4 * scale:
                del self.layers[name]
            elif scale > 0:
                self._proven.add((name, rows))
        return gradients


def _is_one_product(
    call: _Call, leaves: Sequence[Node], rows: int, uses: Mapping[Node, int]
) -> bool:
    """Return whether the call, on one row per sample, is the only use of the parameters.

    A tensor that was changed in place after the call is no longer the input or output of the layer.
    """
    return (
        call.input.shape[:-1] == (rows,)
        and call.input._version == call.version
        and call.output.grad_fn is call.node
        and all(uses[leaf] == 1 and _feeds(leaf, call.node) for leaf in leaves)
    )


def _uses(root: Node, leaves: Iterable[Node]) -> tuple[dict[Node, int], set[Node]]:
    """Return the number of edges to each leaf, and the nodes that the root reaches."""
    uses = dict.fromkeys(leaves, 0)
    reached, waiting = {root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node in uses:
                uses[node] += 1
            elif node is not None and node not in reached:
                reached.add(node)
                waiting.append(node)
    return uses, reached


def _feeds(leaf: Node, node: Node | None) -> bool:
    """Return whether a node takes a leaf as it is or transposed, as the product of a layer does."""
    for before, _ in node.next_functions if node is not None else ():
        if before is leaf:
            return True
        # Between the product and the weight there is its transposition, and nothing else.
        after = () if before is None else before.next_functions
        if len(after) == 1 and after[0][0] is leaf:
            return True
    return False


@contextmanager
def _recorded(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[_Call]]]:
    """Record every call of the layers."""
    calls: dict[str, list[_Call]] = {name: [] for name in layers}

    def record(name: str, layer: nn.Module, args: Sequence[Tensor], output: Tensor) -> None:
        # A call by keyword has no positional input. The output takes its place, with a version that
        # never matches, so that the layer does not qualify.
        given = args[0] if args else output
        version = given._version if args else -1
        calls[name].append(_Call(given.detach(), output, version, output.grad_fn))

    handles = [layer.register_forward_hook(partial(record, name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
