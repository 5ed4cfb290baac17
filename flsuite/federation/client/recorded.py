"""Records the step of a stack as a graph of torch's operations, and replays it.

A step of a small model takes most of its time in Python: in the model, in ``vmap`` and in autograd.
A graph has only the operations. They are the same ones in the same order, so the results are equal.
A GPU replays all of them as one CUDA graph.
"""

import io
import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from flsuite.aggregators.losses import drawing_from, random_state
from flsuite.common.errors import log, one_line

_AFTER = 20  # steps of one kind before it is recorded, because recording takes as long as dozens
_MOST = 32  # graphs, so clients of many different sizes do not record without end
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default)
_EVERY = 10  # rounds between two comparisons of a graph with the step


Operations = Callable[..., list[Any]]


@dataclass(frozen=True)
class _Graph:
    """The operations of a step, and how their results are nested."""

    operations: Operations
    ends: TreeSpec

    def __call__(self, leaves: list[Any]) -> Any:
        with torch.no_grad():
            return tree_unflatten(self.operations(*leaves), self.ends)


class _OneLaunch:
    """Operations that a GPU does in one launch, on tensors in the same places each time.

    Args:
        operations: The operations.
        leaves: What they are given, as an example.
        pool: The memory for what they compute. Graphs share it, because their results are copied.

    Raises:
        RuntimeError: If an operation reads a number of the GPU, or needs the CPU.
    """

    def __init__(self, operations: Operations, leaves: Sequence[Any], pool: Any) -> None:
        self._given = [one.clone() if isinstance(one, Tensor) else one for one in leaves]
        with torch.no_grad():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries choose their kernels before
                operations(*self._given)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._ends = operations(*self._given)

    def __call__(self, *leaves: Any) -> list[Any]:
        torch._foreach_copy_(_tensors(self._given), _tensors(leaves))
        self._graph.replay()
        return [one.clone() if isinstance(one, Tensor) else one for one in self._ends]


class _Unread:
    """Stands for the number of a batch in a recording. The recording ends if the step reads it."""

    is_read = False

    def _refuse(self, *args: Any) -> Any:
        self.is_read = True  # the step may catch the error
        raise RuntimeError("it reads the number of the batch")

    __eq__ = __hash__ = __bool__ = __str__ = __repr__ = __format__ = _refuse
    __int__ = __float__ = __index__ = _refuse


class Recorder:
    """Replays steps that have occurred often, and computes the others.

    A graph serves steps whose tensors have the same names, shapes and layouts, as long as the model
    is the same but for its tensors. A step is not recorded if it reads a tensor that it is not
    given, such as one that the model keeps without registering it, or the number of its batch, or
    if it changes the model, or what it is given, or sets the state of a random generator. Every
    tenth round, the first replay of each graph is compared with the step. If they differ, steps are
    no longer replayed.

    Attributes:
        used: The parameters that the steps of this model use, by whether gradients are by sample.
            They are found anew every tenth round, and while no step is replayed.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: it cannot be recorded
        self._seen = Counter[Hashable]()
        self._due = set[Hashable]()  # graphs to compare in this stack
        self._pool: Any = None  # memory of a GPU
        self.used: dict[bool, list[str]] = {}
        self._model: LightningModule | None = None
        self._content: object = None
        self._is_over = False

    def begin(self, model: LightningModule, round: int) -> None:
        """Begin a stack, whose model may differ from the one of the last stack."""
        before, self._content, self._model = self._content, _without_tensors(model), model
        if self._content != before:
            self._graphs.clear()
            self._seen.clear()
        is_due = round % _EVERY == 0
        self._due = {*self._graphs} if is_due else set()
        if is_due or not any(self._graphs.values()):
            self.used = {}

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
        if kind not in self._graphs:
            if self._seen[kind] <= _AFTER or len(self._graphs) >= _MOST:
                return step(index, *given)
            with drawing_from(leaves[0].device, None):
                graph = _recorded(step, leaves, structure)
                if graph and leaves[0].device.type == "cuda":
                    graph = self._in_one_launch(graph, leaves)
            if self._model is not None and _without_tensors(self._model) != self._content:
                graph = None  # the step changes the model
            self._graphs[kind] = graph
            ends, is_same = _compared(graph, leaves, partial(step, index, *given))
            if not is_same:  # such as with a generator that the step sets
                self._graphs[kind] = None
            return ends
        if (graph := self._graphs[kind]) is None:
            return step(index, *given)
        if kind not in self._due:
            return graph(leaves)
        self._due.remove(kind)
        ends, is_same = _compared(graph, leaves, partial(step, index, *given))
        if not is_same:
            self._is_over = True
            log.warning("steps of a stack are no longer replayed: a step gave other numbers")
        return ends

    def _in_one_launch(self, graph: _Graph, leaves: list[Any]) -> _Graph:
        """Return a graph that a GPU replays in one launch, or the graph itself."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            return replace(graph, operations=_OneLaunch(graph.operations, leaves, self._pool))
        except Exception as error:
            log.info("a step of a stack takes many launches: %s", one_line(error, 160))
            return graph


def _compared(graph: _Graph | None, leaves: list[Any], step: Callable[[], Any]) -> tuple[Any, bool]:
    """Return what a step gives, and whether its graph gives that and draws as many numbers."""
    device = leaves[0].device
    draws = random_state(device)
    ends = step()
    if graph is None:
        return ends, False
    after = random_state(device)
    with drawing_from(device, draws):
        replayed, after_replay = graph(leaves), random_state(device)
    numbers = _tensors((ends, after)), _tensors((replayed, after_replay))
    is_same = len(numbers[0]) == len(numbers[1]) and all(map(_is_close, *numbers))
    return ends, is_same


def _recorded(step: Callable[..., Any], leaves: list[Any], structure: TreeSpec) -> _Graph | None:
    """Return the graph of a step, or ``None`` if a graph would not serve other steps."""
    found, number = list[TreeSpec](), _Unread()

    def flat(*tensors: Any) -> list[Any]:
        ends, own = tree_flatten(step(number, *tree_unflatten(list(tensors), structure)))
        found.append(own)
        return ends

    before = [(tensor, tensor._version, tensor.clone()) for tensor in _tensors(leaves)]
    try:
        graph = make_fx(flat)(*leaves)
    except Exception as error:  # whatever it is, the step itself says more
        log.info("a step of a stack cannot be recorded: %s", one_line(error, 160))
        return None
    finally:
        changed = [(tensor, copy) for tensor, version, copy in before if tensor._version != version]
        for tensor, copy in changed:
            tensor.copy_(copy)
    if changed or number.is_read:
        what = "changes a tensor that it is given" if changed else "reads the number of the batch"
        log.info("a step of a stack cannot be recorded: it %s", what)
        return None
    for node in reversed(graph.graph.nodes):  # a model's own tensors, copied for nobody
        if not node.users and (node.op == "get_attr" or node.target in _COPIES):
            graph.graph.erase_node(node)
    if any(node.op == "get_attr" for node in graph.graph.nodes):
        log.info("a step of a stack cannot be recorded: it reads a tensor that it is not given")
        return None
    graph.recompile()
    return _Graph(graph, found[0])


def _without_tensors(model: LightningModule) -> object:
    """Return all of a model but the values of its parameters and buffers, to compare models."""
    own = chain(model.named_parameters(), model.named_buffers())
    names = {id(tensor): name for name, tensor in own}
    kept: list[object] = []  # so that no other object has its number later

    class Names(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if id(obj) in names:  # other tensors are pickled, because a step may read their values
                return names[id(obj)], obj.requires_grad
            if isinstance(obj, (type, FunctionType)):  # perhaps a local one
                kept.append(obj)
                return id(obj)
            return None

    content = io.BytesIO()
    try:
        Names(content).dump(model)
    except Exception as error:
        log.info("steps of a stack are not recorded: the model %s", one_line(error, 160))
        return object()
    return content.getvalue(), kept


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of nested data."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _laid_out(leaf: Any) -> Hashable:
    """Return what must be equal for tensors to go through the same operations."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two results differ at most in their last digits."""
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), 1e-4, 1e-7, equal_nan=True
    )
