"""Records the step of a stack as a graph of torch's operations, and replays it.

A step of a small model takes most of its time in Python: in the model, in ``vmap`` and in autograd.
A graph has only the operations. They are the same ones in the same order, so the results are equal.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from flsuite.aggregators.losses import drawing_from, random_state
from flsuite.common.errors import log, one_line
from flsuite.models.modes import PlainAttributes

_AFTER = 20  # steps of one kind before it is recorded, because recording takes as long as dozens
_MOST = 32  # graphs, so clients of many different sizes do not record without end
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)
_EVERY = 10  # rounds between two comparisons of a graph with the step


@dataclass(frozen=True)
class _Graph:
    """The operations of a step, and how their results are nested."""

    operations: Callable[..., list[Tensor]]
    ends: TreeSpec

    def __call__(self, leaves: list[Any]) -> Any:
        with torch.no_grad():
            return tree_unflatten(self.operations(*leaves), self.ends)


class Recorder:
    """Replays steps that have occurred often, and computes the others.

    A graph serves steps whose tensors have the same names, shapes and layouts, as long as the plain
    attributes of the model stay the same. A step is not recorded if it reads a tensor that it is
    not given, such as one that the model keeps without registering it, or the number of its batch.
    Every tenth round, a replay is compared with the step. If they differ, steps are no longer
    replayed.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: it cannot be recorded
        self._seen = Counter[Hashable]()
        self._attributes: PlainAttributes | None = None
        self._compares, self._is_over = False, False

    def begin(self, model: LightningModule, round: int) -> None:
        """Begin a stack, whose model may have other attributes than the one of the last stack."""
        attributes = PlainAttributes(model)
        if self._attributes is None or attributes.differ(self._attributes):
            self._graphs.clear()
            self._seen.clear()
        self._attributes, self._compares = attributes, round % _EVERY == 0

    def step(
        self,
        step: Callable[..., Any],
        index: int | Tensor,
        given: tuple[Any, ...],
        kind: Hashable,
    ) -> Any:
        """Return nested tensors that a step computes from nested tensors.

        Args:
            step: The step. It receives ``index`` and what is given.
            index: The number of the batch in its epoch, or one per client. A graph has none.
            given: Nested tensors, each with the clients along the first axis.
            kind: What else decides which operations the step has.
        """
        if self._is_over:
            return step(index, *given)
        leaves, structure = tree_flatten(given)
        kind = kind, repr(structure), tuple(map(_laid_out, leaves))
        self._seen[kind] += 1
        is_new = kind not in self._graphs
        if is_new and (self._seen[kind] <= _AFTER or len(self._graphs) >= _MOST):
            return step(index, *given)

        if is_new:
            with drawing_from(leaves[0].device, None):
                self._graphs[kind] = _recorded(step, leaves, structure)
        if (graph := self._graphs[kind]) is None:
            return step(index, *given)
        if is_new or self._compares:
            self._compares = False
            return self._compared(graph, leaves, partial(step, index, *given))
        return graph(leaves)

    def _compared(self, graph: "_Graph", leaves: list[Any], step: Callable[[], Any]) -> Any:
        """Return what a step gives, and stop replaying if its graph gives something else."""
        draws = random_state(leaves[0].device)
        ends = step()
        with drawing_from(leaves[0].device, draws):
            replayed = tree_leaves(graph(leaves))
        if not all(map(_is_close, tree_leaves(ends), replayed)):
            self._is_over = True
            log.warning("steps of a stack are no longer replayed: a step gave other numbers")
        return ends


def _recorded(step: Callable[..., Any], leaves: list[Any], structure: TreeSpec) -> _Graph | None:
    """Return the graph of a step, or ``None`` if a graph would not serve other steps."""
    found: list[TreeSpec] = []
    number = torch.zeros(len(leaves[0]), dtype=torch.int64, device=leaves[0].device)

    def flat(*tensors: Any) -> list[Any]:
        ends, own = tree_flatten(step(number, *tree_unflatten(list(tensors), structure)))
        found.append(own)
        return ends

    try:
        graph = make_fx(flat)(*leaves)
    except Exception as error:  # whatever it is, the step itself says more
        log.info("a step of a stack cannot be recorded: %s", one_line(error, 160))
        return None
    for node in reversed(graph.graph.nodes):  # a model's own tensors, copied for nobody
        if not node.users and (node.op == "get_attr" or node.target in _COPIES):
            graph.graph.erase_node(node)
    if any(node.op == "get_attr" for node in graph.graph.nodes):
        log.info(
            "a step of a stack cannot be recorded: it reads the number of the batch, or a tensor "
            "that is neither given nor registered"
        )
        return None
    graph.recompile()
    return _Graph(graph, found[0])


def _laid_out(leaf: Any) -> Hashable:
    """Return what must be equal for tensors to go through the same operations."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two results differ at most in their last digits."""
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), 1e-4, 1e-7, equal_nan=True
    )
