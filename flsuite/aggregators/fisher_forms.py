"""The forms of a client's Fisher information: a diagonal, K-FAC factors, or the whole matrix.

A form says what a client measures and sends, what the server sums, and the blocks that it solves.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

import flsuite.aggregators.layer_matrices as layer_matrices
from flsuite.aggregators.solvers.blocks import Block, Dense, Diagonal, Factors, Kronecker
from flsuite.aggregators.sums import STATE
from flsuite.data.loader import Batch
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientUpdate
from flsuite.metrics.fisher import (
    Expectation,
    full_fisher,
    kfac_factors,
    predictive_diagonal,
    require_kfac,
)
from flsuite.state import State, StateLayout, clone

__all__ = ["FORMS", "DiagonalForm", "FisherForm", "FormName", "FullForm", "KFACForm"]

FormName = Literal["diag", "kfac", "full"]

FISHER, PRODUCT = "fisher/", "product/"
"""The prefixes of the sums of ``n_i F_i`` and of ``n_i F_i w_i``."""

_MOST_PARAMETERS = 20_000


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
    def measure(
        self,
        module: nn.Module,
        batches: Iterable[Batch],
        expectation: Expectation,
        generator: Generator,
    ) -> Any:
        """Return a client's Fisher, in float32 and on the CPU."""

    @abstractmethod
    def summands(self, state: State, fisher: Any) -> State:
        """Return F_i, where the server sums it, and ``F_i w_i``, in float64."""

    @abstractmethod
    def blocks(self, mean: State, updates: Sequence[ClientUpdate]) -> list[Block]:
        """Return the blocks of the quadratic.

        Args:
            mean: The means by samples of the models and of the summands.
            updates: The updates without their models.
        """

    @abstractmethod
    def entries(self, values: Sequence[Tensor], like: State) -> State:
        """Return the values of the blocks as entries of the state, in its shapes and dtypes."""


class DiagonalForm(FisherForm):
    """The diagonal, ``(F_i)_jj`` for each parameter."""

    def template(self, state: State) -> State:
        return {name: state[name].float() for name in self.layout.parameters}

    def measure(
        self,
        module: nn.Module,
        batches: Iterable[Batch],
        expectation: Expectation,
        generator: Generator,
    ) -> State:
        names = self.layout.parameters
        return clone(predictive_diagonal(module, names, batches, expectation, generator))

    def summands(self, state: State, fisher: State) -> State:
        own = {FISHER + name: fisher[name].double() for name in self.layout.parameters}
        return own | {
            PRODUCT + name: fisher[name].double() * state[name].double()
            for name in self.layout.parameters
        }

    def blocks(self, mean: State, updates: Sequence[ClientUpdate]) -> list[Block]:
        return [
            Diagonal(mean[STATE + name], mean[PRODUCT + name], mean[FISHER + name])
            for name in self.layout.parameters
        ]

    def entries(self, values: Sequence[Tensor], like: State) -> State:
        named = zip(self.layout.parameters, values, strict=True)
        return {name: value.to(like[name].dtype) for name, value in named}


class KFACForm(FisherForm):
    """The factors of each Linear and Conv2d layer, ``F_i vec(W) = G_i W A_i``.

    The server needs every client's factors beside the sum of ``n_i G_i W_i A_i``.
    """

    def fault(self) -> str | None:
        outside = [f"{name} ({kind}) is" for name, kind in self.layout.outside_layers.items()]
        covered = {name for layer in self.layout.layers for name in layer_matrices.names(layer)}
        outside += [f"{name} is of" for name in self.layout.parameters if name not in covered]
        if not outside:
            return None
        return f"K-FAC covers Linear and Conv2d; {outside[0]} neither: remove it, or use diag"

    def require(self, module: nn.Module, x: Tensor) -> None:
        require_kfac(module, self.layout.layers, x)

    def template(self, state: State) -> dict[str, State]:
        return {
            layer.name: {
                "a": _square(layer_matrices.columns(state, layer)),
                "g": _square(len(state[layer.weight_name])),
            }
            for layer in self.layout.layers
        }

    def measure(
        self,
        module: nn.Module,
        batches: Iterable[Batch],
        expectation: Expectation,
        generator: Generator,
    ) -> dict[str, State]:
        factors = kfac_factors(module, self.layout.layers, batches, expectation, generator)
        return {name: clone(pair) for name, pair in factors.items()}

    def summands(self, state: State, fisher: Mapping[str, State]) -> State:
        products: State = {}
        for layer in self.layout.layers:
            a, g = fisher[layer.name]["a"].double(), fisher[layer.name]["g"].double()
            products[PRODUCT + layer.name] = g @ layer_matrices.matrix(state, layer) @ a
        return products

    def blocks(self, mean: State, updates: Sequence[ClientUpdate]) -> list[Block]:
        samples = sum(update.samples for update in updates)
        models = {name.removeprefix(STATE): value for name, value in mean.items()}
        blocks: list[Block] = []
        for layer in self.layout.layers:
            pairs = [(u.samples / samples, u.extras["fisher"][layer.name]) for u in updates]
            factors = [Factors(share, pair["a"], pair["g"]) for share, pair in pairs]
            wbar = layer_matrices.matrix(models, layer)
            blocks.append(Kronecker(wbar, mean[PRODUCT + layer.name], factors))
        return blocks

    def entries(self, values: Sequence[Tensor], like: State) -> State:
        new: State = {}
        for layer, value in zip(self.layout.layers, values, strict=True):
            new |= layer_matrices.entries(value, layer, like)
        return new


class FullForm(FisherForm):
    """The whole matrix ``(d, d)`` over all parameters in the model's order, for small models."""

    def template(self, state: State) -> Tensor:
        size = sum(state[name].numel() for name in self.layout.parameters)
        if size > _MOST_PARAMETERS:
            raise FlsuiteError(
                f"FedFisher: the full Fisher of {size:,} parameters is a square matrix, and at "
                f"most {_MOST_PARAMETERS:,} parameters are allowed: use kfac or diag"
            )
        return _square(size)

    def measure(
        self,
        module: nn.Module,
        batches: Iterable[Batch],
        expectation: Expectation,
        generator: Generator,
    ) -> Tensor:
        names = self.layout.parameters
        fisher = full_fisher(module, names, batches, expectation, generator)
        return fisher.to("cpu", torch.float32)

    def summands(self, state: State, fisher: Tensor) -> State:
        own = fisher.double()
        return {f"{FISHER}all": own, f"{PRODUCT}all": own @ self._vector(state)}

    def blocks(self, mean: State, updates: Sequence[ClientUpdate]) -> list[Block]:
        models = {name.removeprefix(STATE): value for name, value in mean.items()}
        return [Dense(self._vector(models), mean[f"{PRODUCT}all"], mean[f"{FISHER}all"])]

    def entries(self, values: Sequence[Tensor], like: State) -> State:
        names = self.layout.parameters
        parts = values[0].split([like[name].numel() for name in names])
        named = zip(names, parts, strict=True)
        return {name: part.reshape(like[name].shape).to(like[name].dtype) for name, part in named}

    def _vector(self, state: State) -> Tensor:
        return torch.cat([state[name].double().flatten() for name in self.layout.parameters])


FORMS: Mapping[str, type[FisherForm]] = {
    "diag": DiagonalForm,
    "kfac": KFACForm,
    "full": FullForm,
}


def _square(size: int) -> Tensor:
    """Return a float32 template ``(size, size)`` that takes no memory."""
    return torch.zeros(()).expand(size, size)
