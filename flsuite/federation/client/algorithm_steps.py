"""What an algorithm does in the steps of a fit: of one client, or of a stack of clients."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from flsuite.aggregators.halves import Halves, is_at
from flsuite.aggregators.losses import Draws, drawing_from, random_state
from flsuite.aggregators.objectives.checks import storages
from flsuite.common.client import Evaluation
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, clone


class Fits(Protocol):
    """One client's fit, or the fits of a stack, with the clients along a first axis.

    Attributes:
        weights: The present trainable parameters.
    """

    @property
    def weights(self) -> State: ...

    @property
    def rate(self) -> float:
        """Return the learning rate of the model's first optimizer."""

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one client's tensors as a function of the tensors of all clients."""

    def of_all(self, at: State) -> State:
        """Return the tensors of all clients, within a function of :meth:`each`."""

    def evaluate(self, at: State, batch: Any, in_full: bool) -> Evaluation:
        """Return one client's loss at other weights, within a function of :meth:`each`."""

    def step_other(self, name: str, v: State, gradient: State) -> State:
        """Return one client's other weights after a step, within a function of :meth:`each`."""


class AlgorithmSteps:
    """Computes the gradients of the steps as the parts of an algorithm state them.

    Args:
        halves: The parts of the algorithm.
        fits: The fits.
        helds: What each part holds at the start.
    """

    def __init__(self, halves: Halves, fits: Fits, helds: list[Any]) -> None:
        self.halves, self.helds = halves, helds
        self._fits = fits
        self._waiting: list[tuple[State, Any]] = []
        self._is_first, self._is_held = True, False
        self._draws: Draws | None = None  # the random state of ahead, if it has found weights

    @property
    def held(self) -> Any:
        """Return what the term of the features reads."""
        term = self.halves.term
        return self.helds[self.halves.parts.index(term)] if term else {}

    def ahead(self) -> State | None:
        """Return the other weights at which the next batch is needed first, if there are any.

        A step on two batches may need the gradient of the second one at other weights alone, as in
        Per-FedAvg. The model's own step is then taken there, because a gradient at the present
        weights would be computed for nothing. A call of the algorithm's functions shows the
        weights: they are pure, and the call ends where they ask for that gradient. Functions that
        step a second model before are not, so that its step is taken once.
        """
        self._draws = None
        size, halves = self.halves.batches_per_step, self.halves
        if len(self._waiting) + 1 != size or size == 1:
            return None
        if halves.term or not halves.changes_gradients:  # a term belongs to the present weights
            return None
        w, at = self._fits.weights, State()
        draws = random_state(_device_of(w))
        with drawing_from(_device_of(w), draws), suppress(Exception):  # shows in the step
            try:
                self._changed(w, [*self._waiting, ({}, None)], _AheadOracle)
            except _AskedError as asked:
                at = asked.at
        if _kinds_of(at) != _kinds_of(w):
            return None
        self._draws = draws
        return at

    def gradient(self, own: State, batch: Any, is_last: bool) -> State | None:
        """Return the gradient of a step, or ``None`` if a later batch completes the step.

        Args:
            own: The gradient of the model's own loss, at the weights that :meth:`ahead` has
                returned, if any.
            batch: The batch, as :meth:`Fits.evaluate` reads it.
            is_last: Whether it is the last batch of the fit.
        """
        self._waiting.append((own, batch))
        size = self.halves.batches_per_step
        if len(self._waiting) < size and not is_last:
            return None
        # The last batch of an odd number of them serves as both.
        known, self._waiting = (self._waiting * size)[:size], []
        if not self.halves.changes_gradients:
            return own
        w = self._fits.weights
        if self._draws is None or not own:
            changed, self.helds = self._changed(w, known, _StepOracle)
        else:
            with drawing_from(_device_of(w), self._draws):
                changed, self.helds = self._changed(w, known, _AheadOracle)
        if self._is_first:
            self._is_held = bool(storages(changed) & storages([w, self.helds]))
        self._is_first = False
        # A hook of the model, clipping and some optimizers change gradients in place.
        return clone(changed, device=None) if self._is_held else changed

    def _changed(
        self, w: State, known: Sequence[tuple[State, Any]], kind: type["_StepOracle"]
    ) -> tuple[State, list[Any]]:
        """Return the gradient of the algorithm, and what its parts hold from then on."""
        gradients, batches = zip(*known, strict=True)

        def of_one(w: State, helds: list[Any], gradients: Sequence[State]) -> Any:
            oracle = kind(self._fits, w, gradients, batches)
            return self.halves.gradient(oracle, w, helds, self._is_first)

        return self._fits.each(of_one)(w, self.helds, list(gradients))


class _StepOracle:
    """The gradients of one client in one step, see :class:`~flsuite.common.client.Oracle`."""

    def __init__(
        self, fits: Fits, w: State, gradients: Sequence[State], batches: Sequence[Any]
    ) -> None:
        self._fits, self._w = fits, w
        self.known, self._batches = gradients, batches

    @property
    def rate(self) -> float:
        return self._fits.rate

    def __call__(self, at: State, batch: int, in_full: bool = False) -> State:
        if not in_full and is_at(at, self._w):
            return dict(self.known[_number(batch)])
        return self.evaluate(at, batch, in_full).gradient

    def evaluate(self, at: State, batch: int, in_full: bool = False) -> Evaluation:
        return self._fits.evaluate(at, self._batches[_number(batch)], in_full)

    def step(self, name: str, v: State, gradient: State) -> State:
        return self._fits.step_other(name, v, gradient)


class _AskedError(Exception):
    """Ends a call that asks for a gradient of the last batch."""

    def __init__(self, at: State) -> None:
        super().__init__()
        self.at = at


class _AheadOracle(_StepOracle):
    """An oracle whose first gradient of the last batch is known, wherever it is asked for.

    Raises:
        _AskedError: If that gradient is asked for, and is not yet known (empty).
    """

    _is_first = True

    def __call__(self, at: State, batch: int, in_full: bool = False) -> State:
        if _number(batch) + 1 < len(self._batches):
            return super().__call__(at, batch, in_full)
        if not self._is_first:
            return self.evaluate(at, batch, in_full).gradient
        self._is_first = False
        if known := self.known[batch]:
            return dict(known)
        raise _AskedError({} if in_full or is_at(at, self._w) else self._fits.of_all(at))

    def step(self, name: str, v: State, gradient: State) -> State:
        if not self.known[-1]:
            raise _AskedError({})  # the optimizer of the other weights would step twice
        return super().step(name, v, gradient)


def _number(batch: Any) -> int:
    if isinstance(batch, int):
        return batch
    raise FlsuiteError(
        f"gradient hands a {type(batch).__name__} to the oracle as a batch; with batches_per_step "
        "above 1, batch is a tuple of batches: hand over one of them, such as batch[0]"
    )


def _kinds_of(w: State) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in w.items()}


def _device_of(w: State) -> torch.device:
    return next(iter(w.values())).device
