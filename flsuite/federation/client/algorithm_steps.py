"""What an algorithm does in the steps of a fit: of one client, or of a stack of clients."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flsuite.aggregators.halves import Halves, is_at
from flsuite.common.client import Evaluation
from flsuite.common.state import State


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
        self._is_first = True

    @property
    def held(self) -> Any:
        """Return what the term of the features reads."""
        term = self.halves.term
        return self.helds[self.halves.parts.index(term)] if term else {}

    def gradient(self, own: State, batch: Any, is_last: bool) -> State | None:
        """Return the gradient of a step, or ``None`` if a later batch completes the step.

        Args:
            own: The gradient of the model's own loss.
            batch: The batch, as :meth:`Fits.evaluate` reads it.
            is_last: Whether it is the last batch of the fit.
        """
        self._waiting.append((own, batch))
        size = self.halves.batches_per_step
        if len(self._waiting) < size and not is_last:
            return None
        # The last batch of an odd number of them serves as both.
        gradients, batches = zip(*(self._waiting * size)[:size], strict=True)
        self._waiting = []
        if not self.halves.changes_gradients:
            return own

        def of_one(w: State, helds: list[Any], gradients: Sequence[State]) -> Any:
            oracle = _StepOracle(self._fits, w, gradients, batches)
            return self.halves.gradient(oracle, w, helds, self._is_first)

        of_all = self._fits.each(of_one)
        changed, self.helds = of_all(self._fits.weights, self.helds, list(gradients))
        self._is_first = False
        return changed


class _StepOracle:
    """The gradients of one client in one step, see :class:`~flsuite.common.client.Oracle`."""

    def __init__(
        self, fits: Fits, w: State, gradients: Sequence[State], batches: Sequence[Any]
    ) -> None:
        self._fits, self._w = fits, w
        self._gradients, self._batches = gradients, batches

    @property
    def rate(self) -> float:
        return self._fits.rate

    def __call__(self, at: State, batch: int, in_full: bool = False) -> State:
        if not in_full and is_at(at, self._w):
            return dict(self._gradients[batch])
        return self.evaluate(at, batch, in_full).gradient

    def evaluate(self, at: State, batch: int, in_full: bool = False) -> Evaluation:
        return self._fits.evaluate(at, self._batches[batch], in_full)

    def step(self, name: str, v: State, gradient: State) -> State:
        return self._fits.step_other(name, v, gradient)
