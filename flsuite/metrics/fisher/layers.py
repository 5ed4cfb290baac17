"""Layers whose per-sample gradients are products of their inputs and output gradients.

The gradient of a Linear or Conv2d layer's weight for a sample is ``sum_t g_t a_t^T`` over its
positions t, with ``a_t`` its input there and ``g_t`` the gradient at its output. It is computed
from the layer's input and output gradient, without any parameter gradient: Dangel et al. 2020,
BackPACK: Packing more into Backprop, arXiv:1912.10985.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from flsuite.models.layers import uncovered


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        input: Its input, with its graph.
        version: The version of the input, which shows whether it has been changed since.
        before: The node that computed the input.
        edge: The edge at which the output's gradient arrives. ``None`` without a gradient.
        outputs: Number of elements of the output.
    """

    input: Tensor
    version: int
    before: Node | None
    edge: GradientEdge | None
    outputs: int


class LayerPass(NamedTuple):
    """A layer's inputs and output gradients for a batch.

    Attributes:
        name: The layer's name in the model.
        layer: The layer.
        input: Its input, with one row per sample.
        gradients: Gradients at its output, ``(n, columns, ...)``.
    """

    name: str
    layer: nn.Linear | nn.Conv2d
    input: Tensor
    gradients: Tensor


def unfolded(layer: nn.Linear | nn.Conv2d, input: Tensor) -> Tensor:
    """Return the inputs at the layer's positions, ``(n, in, positions)``.

    ``in`` counts the columns of the weight as a matrix ``(out, in)``.
    """
    if isinstance(layer, nn.Linear):
        return input.flatten(1, -2).mT if input.ndim > 2 else input[..., None]
    # uncovered() has already excluded padding given as text.
    vertical, horizontal = (int(side) for side in layer.padding)
    if vertical or horizontal:
        input = nn.functional.pad(input, (horizontal, horizontal, vertical, vertical))

    # Windows are a view of the image. Copying it is faster than nn.functional.unfold.
    windows = input
    for side, (size, step) in enumerate(zip(layer.kernel_size, layer.dilation, strict=True)):
        span = step * (size - 1) + 1
        windows = windows.unfold(2 + side, span, layer.stride[side])[..., ::step]
    # From (n, channels, height, width, kernel height, kernel width).
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)


@contextmanager
def recorded(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Record every call of the layers."""
    calls: dict[str, list[Call]] = {name: [] for name in layers}

    def record(name: str, layer: nn.Module, args: Sequence[Tensor], output: Tensor) -> None:
        # A call by keyword has no positional input. The output takes its place, with a version that
        # never matches, so that the layer does not qualify.
        given = args[0] if args else output
        version = given._version if args else -1
        # The edge and not the output: an activation may overwrite the output later.
        edge = get_gradient_edge(output) if output.requires_grad else None
        calls[name].append(Call(given, version, given.grad_fn, edge, output.numel()))

    handles = [layer.register_forward_hook(partial(record, name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class ProductLayers:
    """The layers of a model whose per-sample gradients are products.

    A layer qualifies in a batch if the layer is called once, on one row per sample, and if nothing
    else uses its parameters. Every batch is checked by the autograd graph, not by values, because
    zero gradients prove nothing. A layer that fails once is excluded for good, and :attr:`failed`
    has the reason.

    Args:
        model: Module that computes the outputs.
        parameters: Requested parameters, by name. They include all parameters of a layer or none.
        positions: Whether a layer may have several positions per sample: a Conv2d, or a Linear on
            more than a vector.

    Attributes:
        layers: The layers that still qualify.
        failed: The reasons for the other layers.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Tensor], positions: bool = False
    ) -> None:
        kinds = (nn.Linear, nn.Conv2d) if positions else (nn.Linear,)
        self.positions = positions
        self.failed: dict[str, str] = {}
        self.layers: dict[str, nn.Linear | nn.Conv2d] = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, kinds)
            and uncovered(layer) is None
            and all(f"{name}.{own}" in parameters for own, _ in layer.named_parameters())
        }

        # Graph leaves identify a parameter, whatever module uses it.
        leaves = {name: get_gradient_edge(p).node for name, p in parameters.items()}
        self._leaves = frozenset(leaves.values())
        self._leaves_of = {
            name: [leaves[f"{name}.{own}"] for own, _ in layer.named_parameters()]
            for name, layer in self.layers.items()
        }
        self._proven: set[tuple[str, int]] = set()

    def passes(
        self, forward: Callable[[], Tensor], columns: Callable[[Tensor], Tensor]
    ) -> list[LayerPass] | None:
        """Return the inputs and output gradients of a batch at the layers that qualify.

        Args:
            forward: Computes the outputs of the batch, ``(n, ...)``.
            columns: Computes the gradients at the outputs for the backward passes,
                ``(columns, n, ...)``.

        Returns:
            One entry per layer, or ``None`` if the outputs depend on none of the parameters.
        """
        with recorded(self.layers) as calls:
            outputs = forward()
        if outputs.grad_fn is None:
            return None
        # One edge per use of a parameter, in a module or elsewhere.
        uses, reached = _uses(outputs.grad_fn, self._leaves)
        if not any(uses.values()):
            return None

        for name in list(self.layers):
            if why := self._fault(name, calls[name], len(outputs), uses, reached):
                self._drop(name, why)
        edges = {n: edge for n in self.layers if (edge := calls[n][0].edge) is not None}
        gradients = self._gradients(outputs, columns(outputs), edges)
        return [
            LayerPass(name, layer, calls[name][0].input.detach(), gradients[name])
            for name, layer in self.layers.items()
        ]

    def _fault(
        self,
        name: str,
        calls: Sequence[Call],
        rows: int,
        uses: Mapping[Node, int],
        reached: Collection[Node],
    ) -> str | None:
        """Return why a layer is not one product on one row per sample, or ``None``."""
        if len(calls) != 1:
            return f"it is called {len(calls)} times in a forward pass"
        call = calls[0]
        # A tensor changed in place after the call is no longer the layer's input.
        if call.input._version != call.version:
            return "its input is overwritten, or passed by keyword"
        if call.edge is None or call.edge.node not in reached:
            return "its output is not used"
        samples = call.input.shape[0] if self.positions else call.input.shape[:-1]
        if samples != (rows if self.positions else (rows,)) or call.input.ndim < 2:
            return f"its input {tuple(call.input.shape)} does not have one row per sample"
        inside, _ = _uses(call.edge.node, self._leaves_of[name], stop=call.before)
        if any(uses[leaf] != 1 or inside[leaf] != 1 for leaf in inside):
            return "its weight is also used elsewhere"
        return None

    def _gradients(
        self, outputs: Tensor, columns: Tensor, edges: Mapping[str, GradientEdge]
    ) -> dict[str, Tensor]:
        """Return the gradients at the outputs of the layers, for every column.

        Row i of a layer's output must depend only on sample i. The graph does not show this,
        because a table with as many rows as the batch has the right shape. If sample i is weighted
        by w_i, the gradient of row i scales by w_i exactly when the row depends on no other sample.
        Whether it does depends only on the number of rows, so one further backward pass per layer
        and batch size is enough. All-zero gradients prove nothing, and a later batch is used
        instead.
        """
        rows = len(outputs)
        unproven = [name for name in edges if rows > 1 and (name, rows) not in self._proven]
        if not edges:
            return {}
        last = len(columns) - 1
        by_column = [
            torch.autograd.grad(
                outputs, list(edges.values()), column, retain_graph=bool(unproven) or at < last
            )
            for at, column in enumerate(columns)
        ]
        gradients = {
            name: torch.stack(g, 1)
            for name, g in zip(edges, zip(*by_column, strict=True), strict=True)
        }
        if not unproven:
            return gradients

        # Distinct weights per sample, so an exchange of rows is detected. Distinct weights per
        # column, because the columns of a prediction may cancel.
        weights, mixture = (
            torch.linspace(1, 2, size, dtype=outputs.dtype, device=outputs.device)
            for size in (rows, len(columns))
        )
        scaled = _rows(weights, outputs) * torch.tensordot(mixture, columns, 1)
        weighted = torch.autograd.grad(outputs, [edges[name] for name in unproven], scaled)
        for name, g in zip(unproven, weighted, strict=True):
            expected = _rows(weights, g) * torch.tensordot(gradients[name], mixture, ([1], [0]))
            error, scale = (g - expected).abs().max(), gradients[name].abs().max()
            # A tolerance for float32: two backward passes sum in different orders.
            if error > 1e-4 * scale:
                self._drop(name, "its rows depend on several samples")
                del gradients[name]
            elif expected.any():
                self._proven.add((name, rows))
        return gradients

    def _drop(self, name: str, why: str) -> None:
        # A layer that fails once is not tried again, because it would probably fail.
        del self.layers[name]
        self.failed[name] = why


def _rows(weights: Tensor, like: Tensor) -> Tensor:
    """Return one weight per row, with as many dimensions as ``like``."""
    return weights.reshape(-1, *(1 for _ in like.shape[1:]))


def _uses(
    root: Node, leaves: Iterable[Node], stop: Node | None = None
) -> tuple[dict[Node, int], set[Node]]:
    """Return the number of edges to each leaf, and the nodes that the root reaches.

    Nodes at and below ``stop`` are excluded.
    """
    uses = dict.fromkeys(leaves, 0)
    reached, waiting = {root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node in uses:
                uses[node] += 1
            elif node is not None and node is not stop and node not in reached:
                reached.add(node)
                waiting.append(node)
    return uses, reached
