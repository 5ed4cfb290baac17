"""The base class of the forms of a client's Fisher information.

A form says what a client measures and sends, what the server sums, and the blocks that it solves.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Generator, Tensor, nn

from flsuite.aggregators.rules.solvers.blocks import Block
from flsuite.data.loader import Batch
from flsuite.messages import ClientUpdate
from flsuite.metrics.fisher import Expectation
from flsuite.state import State, StateLayout, Tree

__all__ = ["FisherForm", "Sampled"]


class Sampled(NamedTuple):
    """What a client measures its Fisher on, and how.

    Attributes:
        batches: The client's samples.
        expectation: Whether the expectation over the prediction is exact, or a draw per sample.
        generator: Draws the labels.
    """

    batches: Iterable[Batch]
    expectation: Expectation
    generator: Generator


class FisherForm(ABC):
    """A form of the Fisher information.

    Args:
        layout: The entries that travel.
    """

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout

    def fault(self) -> str | None:
        """Return why the form does not cover the model, or ``None`` if it does."""
        return None

    def require(self, module: nn.Module, x: Tensor) -> None:
        """Refuse a model that the form does not cover, as its pass over a sample shows it.

        Args:
            module: The model, under the conditions of :meth:`measure`.
            x: An input of one sample, ``(1, *shape)``.

        Raises:
            FlsuiteError: If it is not covered.
        """
        # Nothing: the other forms hold however a parameter is used.
        return

    @abstractmethod
    def template(self, state: State) -> Any:
        """Return a template of what a client sends."""

    @abstractmethod
    def measure(self, module: nn.Module, sampled: Sampled) -> Any:
        """Return a client's Fisher, in float32 and on the CPU."""

    @abstractmethod
    def terms(self, state: State, fisher: Any) -> Tree:
        """Return ``F_i w_i`` as ``product``, and F_i as ``fisher`` where the server sums it."""

    @abstractmethod
    def blocks(self, means: Tree, updates: Sequence[ClientUpdate]) -> list[Block]:
        """Return the blocks of the quadratic.

        Args:
            means: The means by samples of the terms, and of the models as ``model``.
            updates: The updates without their models.
        """

    @abstractmethod
    def entries(self, values: Sequence[Tensor], like: State) -> State:
        """Return the values of the blocks as entries of the state, in the shapes of ``like``."""
