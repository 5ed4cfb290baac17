"""The client halves of an algorithm's parts, as one chain of functions."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from inspect import isroutine
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map, tree_structure

from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.objectives.checks import (
    no_change_in_place,
    no_other_draws,
    require_entries,
    require_tensors,
    storages,
    wrong,
)
from flsuite.aggregators.objectives.feature_term import FeatureTerm
from flsuite.aggregators.part import ClientHalf
from flsuite.common.arguments import PositiveInt, require
from flsuite.common.client import BatchHandle, ClientContext, Evaluation, Oracle
from flsuite.common.errors import FlsuiteError, likeliest
from flsuite.common.state import State
from flsuite.data.loader import TrainLoader

_ACTS = ("start", "gradient", "trains", "end")
_OTHERS = ("measure", "compared", "term", "logits", "statistics", "conclude", "own_entries")
_OF_0_2 = {
    "callbacks": "state what a client does in its steps as start, gradient and end, and what it "
    "measures as measure",
    "read": "return what the term reads from start, as the second value",
    "direction": "state the steps of the second model in gradient",
}


class Halves:
    """What the parts of an algorithm do in a client's fit, in their order.

    The gradient of one part is what the oracle of the next one returns at the present weights.

    Args:
        parts: The parts: the objective, and then the rule.
    """

    def __init__(self, parts: Sequence[ClientHalf]) -> None:
        for part in parts:
            _require_todays_functions(part)
            require(type(part).__name__, PositiveInt, batches_per_step=part.batches_per_step)
        self.parts = parts
        terms = [part for part in parts if isinstance(part, FeatureTerm)]
        self.term = terms[0] if terms else None
        self.batches_per_step = max((part.batches_per_step for part in parts), default=1)
        handles = tuple(map(BatchHandle, range(self.batches_per_step)))
        self.batch: Any = handles if self.batches_per_step > 1 else handles[0]
        self.measures = any(_has(part, "measure") for part in parts)
        self.with_gradients = [part for part in parts if _has(part, "gradient")]
        self.changes_gradients = bool(self.with_gradients)
        self.has_phases = any(_has(part, "trains") for part in parts)
        self.trains_plainly = self.term is None and not any(
            _has(part, name) for part in parts for name in _ACTS
        )

    def check(self, model: LightningModule) -> None:
        """Refuse a model that a part cannot work with, before round 1."""
        for part in self.parts:
            _refuse_misspelt(part)
            part.check(model)

    def start(self, client: ClientContext, w: State) -> tuple[State, list[Any]]:
        """Return the weights that a fit starts from, and what each part holds."""
        helds: list[Any] = []
        for part in self.parts:
            if not _has(part, "start"):
                helds.append({})
                continue
            with _guarded(part, client, w):
                started: Any = part.start(client, w)
            if not isinstance(started, tuple) or len(started) != 2:
                raise wrong(part, "start", started, "the weights, and what the steps hold")
            new, held = started
            require_entries(part, "start", new, w)
            if missing := [name for name in w if name not in new]:
                raise wrong(part, "start", new, f"all entries of w, {missing[0]} too")
            require_tensors(part, "start", held)
            w = dict(new)
            helds.append(held)
        return w, helds

    def gradient(
        self, oracle: Oracle, w: State, helds: Sequence[Any], is_first: bool
    ) -> tuple[State, list[Any]]:
        """Return the gradient of a step, and what each part holds from then on.

        Args:
            oracle: Returns gradients of the model's own loss.
            w: The model's trainable parameters.
            helds: What each part holds.
            is_first: Whether to check what the parts return, in the first step of a fit.
        """
        afters = []
        for part, held in zip(self.parts, helds, strict=True):
            if not _has(part, "gradient"):
                afters.append(held)
                continue
            gradient, after = (
                _checked(part, oracle, w, held, self.batch)
                if is_first
                else part.gradient(oracle, w, held, self.batch)
            )
            afters.append(after)
            oracle = _Changed(oracle, w, dict(gradient))
        return oracle(w, self.batch), afters

    def trains(self, epoch: int, names: Collection[str]) -> frozenset[str]:
        """Return the parameters that train in an epoch."""
        for part in self.parts:
            some: Any = part.trains(epoch, names)
            if not isinstance(some, Collection) or not {*some} <= {*names}:
                raise wrong(part, "trains", some, "some of the given names")
            if not some:
                raise wrong(part, "trains", f"no name in epoch {epoch}", "one that trains in it")
            names = some
        return frozenset(names)

    def end(self, client: ClientContext, w: State, helds: Sequence[Any]) -> None:
        """End a fit."""
        for part, held in zip(self.parts, helds, strict=True):
            if _has(part, "end"):
                with _guarded(part, client, w):
                    part.end(client, w, held)

    def measure(self, client: ClientContext, module: LightningModule, loader: TrainLoader) -> None:
        """Measure a trained model."""
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for part in self.parts:
            if _has(part, "measure"):
                with _guarded(part, client, own):
                    part.measure(client, module, loader)


@contextmanager
def _guarded(part: ClientHalf, client: ClientContext, w: State) -> Iterator[None]:
    """Refuse changes of what a part is given, and copy what the client keeps or sends of ``w``."""
    with no_change_in_place(part, [client.global_state, client.received, w]):
        yield
    kept = client.memory, client.extras
    own = storages(kept)
    if places := own and own & storages(w):

        def copied(leaf: Any) -> Any:  # the model trains on with w, or takes the next client's
            is_of_w = isinstance(leaf, Tensor) and places & storages(leaf)
            return leaf.detach().clone() if is_of_w else leaf

        client.memory, client.extras = tree_map(copied, kept)


def _require_todays_functions(part: ClientHalf) -> None:
    """Refuse functions of 0.2, which nobody calls, and an objective that would do nothing."""
    for name, instead in _OF_0_2.items():
        if hasattr(part, name):
            raise FlsuiteError(f"{type(part).__name__}.{name} is not called: {instead}")
    kind, base = type(part), FeatureTerm if isinstance(part, FeatureTerm) else Objective
    names = _ACTS + _OTHERS
    is_same = (getattr(kind, name, None) is getattr(base, name, None) for name in names)
    if isinstance(part, Objective) and kind is not Objective and all(is_same):
        raise FlsuiteError(
            f"{kind.__name__} has none of the functions {', '.join(names)}; write one of them, or "
            "correct its name"
        )


class _Changed:
    """An oracle whose gradient at the present weights is the one of an earlier part."""

    def __init__(self, oracle: Oracle, w: State, gradient: State) -> None:
        self._oracle, self._w, self.known = oracle, w, [gradient]

    @property
    def rate(self) -> float:
        return self._oracle.rate

    def __call__(self, at: State, batch: Any, in_full: bool = False) -> State:
        if is_at(at, self._w) and not in_full:
            return dict(self.known[0])
        return self._oracle(at, batch, in_full)

    def evaluate(self, at: State, batch: Any, in_full: bool = False) -> Evaluation:
        return self._oracle.evaluate(at, batch, in_full)

    def step(self, name: str, v: State, gradient: State) -> State:
        return self._oracle.step(f"next/{name}", v, gradient)  # not those of the earlier part


def _checked(part: ClientHalf, oracle: Any, w: State, held: Any, batch: Any) -> tuple[State, Any]:
    """Return the gradient of a part, and what it holds from then on.

    Raises:
        FlsuiteError: If the part returns something else, or changes what it reads.
    """
    given = [w, held, oracle.known]
    with no_change_in_place(part, given), no_other_draws(f"{type(part).__name__}.gradient"):
        stepped: Any = part.gradient(oracle, w, held, batch)
    if not isinstance(stepped, tuple) or len(stepped) != 2:
        raise wrong(part, "gradient", stepped, "a gradient, and what the steps hold")
    gradient, after = stepped
    require_entries(part, "gradient", gradient, w)
    require_tensors(part, "gradient", after)
    if tree_structure(after) != tree_structure(held):
        raise wrong(part, "gradient", "other entries of held", "those of start, with new tensors")
    if storages(after) & storages(w):
        raise wrong(
            part, "gradient", "w to hold it", "a clone, because the step changes w in place"
        )
    return gradient, after


def _refuse_misspelt(part: ClientHalf) -> None:
    """Refuse a user's function whose name is nearly that of a function that clients call."""
    kinds = [k for k in type(part).__mro__ if not k.__module__.startswith(("flsuite.", "builtins"))]
    own = {name: kind for kind in kinds for name, value in vars(kind).items() if isroutine(value)}
    base = next(kind for kind in type(part).__mro__ if kind not in kinds)
    called = {*_ACTS, *_OTHERS}
    for name in own.keys() - called - {*dir(base)}:
        near = likeliest(name, called - own.keys(), cutoff=0.8)
        if near and not name.startswith("_"):
            raise FlsuiteError(
                f"{own[name].__name__}.{name} is never called; did you mean {near[0]}? If it is a "
                f"function of your own, name it _{name}"
            )


def is_at(at: State, w: State) -> bool:
    """Return whether weights are the present ones: the same tensors."""
    return at is w or (at.keys() == w.keys() and all(at[name] is w[name] for name in w))


def _has(part: ClientHalf, name: str) -> bool:
    """Return whether a part has its own version of a function."""
    return getattr(type(part), name) is not getattr(ClientHalf, name)
