"""The forms of a client's Fisher information: diagonal, K-FAC factors, or the full matrix.

A Linear or Conv2d layer is one matrix that multiplies the layer's inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.solvers import Block, Dense, Diagonal, Kronecker
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import Layer, State, StateLayout, Tree, clone, flatten, unflatten
from flsuite.data.federated import Batch, Task
from flsuite.metrics.fisher.estimates import Expectation, full_fisher, measuring
from flsuite.metrics.fisher.forms import kfac_factors, predictive_diagonal, require_kfac


def names(layer: Layer) -> tuple[str, ...]:
    """Return the names of a layer's state entries."""
    return (layer.weight_name, layer.bias_name) if layer.bias else (layer.weight_name,)


def columns(state: State, layer: Layer, bias: bool = True) -> int:
    """Return the number of columns of a layer's matrix.

    Args:
        state: The model.
        layer: The layer.
        bias: Whether to add the layer's bias, if any, as the last column.
    """
    return state[layer.weight_name][0].numel() + (layer.bias and bias)


def square_template(size: int) -> Tensor:
    """Return a float32 matrix ``(size, size)`` of one repeated zero, which takes no memory.

    It stands for a matrix that clients send. Only its shape and its dtype count.
    """
    return torch.zeros((), dtype=torch.float32).expand(size, size)


def matrix(state: State, layer: Layer, bias: bool = True) -> Tensor:
    """Return the float64 matrix of a layer.

    It is ``(out, in)``, or ``(out, in * height * width)`` for a convolution with unfolded inputs.
    The bias is the last column, with a constant input of 1.
    """
    weight = state[layer.weight_name].double().flatten(1)
    if not (layer.bias and bias):
        return weight
    return torch.cat([weight, state[layer.bias_name].double()[:, None]], 1)


def entries(value: Tensor, layer: Layer, like: State, bias: bool = True) -> State:
    """Return a layer's matrix as state entries, in the shapes of ``like``."""
    shape = like[layer.weight_name].shape
    if not (layer.bias and bias):
        return {layer.weight_name: value.reshape(shape)}
    return {layer.weight_name: value[:, :-1].reshape(shape), layer.bias_name: value[:, -1]}


Sampled = tuple[Iterable[Batch], Task, Expectation, Generator]
"""The input of a client's Fisher: its samples, their task, whether the expectation over the
prediction is exact or sampled, and the random generator of labels."""


class FisherForm(ABC):
    """A form of the Fisher information.

    Args:
        layout: The shared entries.
    """

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout

    def require(self, server: Server) -> None:
        """Refuse a model that the form does not cover. Most forms cover any model.

        Raises:
            FlsuiteError: If it is not covered.
        """
        return

    @abstractmethod
    def template(self, state: State) -> Any:
        """Return a template of what a client sends."""

    @abstractmethod
    def measure(self, module: nn.Module, sampled: Sampled) -> Any:
        """Return a client's Fisher, in float32 and on the CPU."""

    @abstractmethod
    def repaired(self, fisher: Any) -> Any:
        """Return a noisy Fisher without negative entries or eigenvalues."""

    @abstractmethod
    def terms(self, state: State, fisher: Any) -> Tree:
        """Return ``F_i w_i`` as ``product``, and F_i as ``fisher`` if the server sums it."""

    @abstractmethod
    def blocks(self, means: Tree, updates: Sequence[ClientUpdate]) -> list[Block]:
        """Return the blocks of the quadratic.

        Args:
            means: The means of the terms, weighted by samples, and of the models as ``model``.
            updates: The updates without their models.
        """

    @abstractmethod
    def entries(self, values: Sequence[Tensor], like: State) -> State:
        """Return the blocks' values as state entries, in the shapes of ``like``."""


FormName = Literal["diag", "kfac", "full"]

_MOST_PARAMETERS = 20_000  # the matrix takes 1.6 GB in float32


class _DiagonalForm(FisherForm):
    """The diagonal, ``(F_i)_jj`` for each parameter."""

    def template(self, state: State) -> State:
        return {name: state[name].float() for name in self.layout.parameters}

    def measure(self, module: nn.Module, sampled: Sampled) -> State:
        return clone(predictive_diagonal(module, self.layout.parameters, *sampled))

    def repaired(self, fisher: State) -> State:
        return {name: value.clamp(min=0.0) for name, value in fisher.items()}

    def terms(self, state: State, fisher: State) -> Tree:
        own = {name: fisher[name].double() for name in self.layout.parameters}
        return {"fisher": own, "product": {n: f * state[n].double() for n, f in own.items()}}

    def blocks(self, means: Tree, updates: Sequence[ClientUpdate]) -> list[Block]:
        model, product, fisher = means["model"], means["product"], means["fisher"]
        return [Diagonal(model[n], product[n], fisher[n]) for n in self.layout.parameters]

    def entries(self, values: Sequence[Tensor], like: State) -> State:
        return dict(zip(self.layout.parameters, values, strict=True))


class _KFACForm(FisherForm):
    """The factors of each Linear and Conv2d layer, ``F_i vec(W) = G_i W A_i``.

    The server needs every client's factors in addition to the sum of ``n_i G_i W_i A_i``.
    """

    def require(self, server: Server) -> None:
        outside = [f"{name} ({kind}) is" for name, kind in self.layout.outside_layers.items()]
        covered = {name for layer in self.layout.layers for name in names(layer)}
        outside += [f"{name} is of" for name in self.layout.parameters if name not in covered]
        if outside:
            raise FlsuiteError(
                f"FedFisher: K-FAC covers Linear and Conv2d; {outside[0]} neither: remove it, or "
                "use diag"
            )
        if server.tools.module is None:
            return
        # Otherwise, the training of the first round would be lost.
        module: Any = server.tools.module(server.state)
        with measuring(module):
            x = torch.zeros(1, *server.tools.shape, device=module.device)
            require_kfac(module, self.layout.layers, x)

    def template(self, state: State) -> dict[str, State]:
        return {
            layer.name: {
                "a": square_template(columns(state, layer)),
                "g": square_template(len(state[layer.weight_name])),
            }
            for layer in self.layout.layers
        }

    def measure(self, module: nn.Module, sampled: Sampled) -> dict[str, State]:
        factors = kfac_factors(module, self.layout.layers, *sampled)
        return {name: clone(pair) for name, pair in factors.items()}

    def repaired(self, fisher: Mapping[str, State]) -> dict[str, State]:
        return {
            name: {kind: _semidefinite(factor) for kind, factor in pair.items()}
            for name, pair in fisher.items()
        }

    def terms(self, state: State, fisher: Mapping[str, State]) -> Tree:
        products: State = {}
        for layer in self.layout.layers:
            a, g = fisher[layer.name]["a"].double(), fisher[layer.name]["g"].double()
            products[layer.name] = g @ matrix(state, layer) @ a
        return {"product": products}

    def blocks(self, means: Tree, updates: Sequence[ClientUpdate]) -> list[Block]:
        samples = sum(update.samples for update in updates)
        blocks: list[Block] = []
        for layer in self.layout.layers:
            pairs = [(u.samples / samples, u.extras["fisher"][layer.name]) for u in updates]
            factors = [(share, pair["a"], pair["g"]) for share, pair in pairs]
            wbar = matrix(means["model"], layer)
            blocks.append(Kronecker(wbar, means["product"][layer.name], factors))
        return blocks

    def entries(self, values: Sequence[Tensor], like: State) -> State:
        new: State = {}
        for layer, value in zip(self.layout.layers, values, strict=True):
            new |= entries(value, layer, like)
        return new


class _FullForm(FisherForm):
    """The full matrix ``(d, d)`` over all parameters in the model's order, for small models."""

    def template(self, state: State) -> Tensor:
        size = sum(state[name].numel() for name in self.layout.parameters)
        if size > _MOST_PARAMETERS:
            raise FlsuiteError(
                f"FedFisher: the full Fisher of {size:,} parameters is too large: at most "
                f"{_MOST_PARAMETERS:,} parameters are allowed; use kfac or diag"
            )
        return square_template(size)

    def measure(self, module: nn.Module, sampled: Sampled) -> Tensor:
        fisher = full_fisher(module, self.layout.parameters, *sampled)
        return fisher.to("cpu", torch.float32)

    def repaired(self, fisher: Tensor) -> Tensor:
        return _semidefinite(fisher)

    def terms(self, state: State, fisher: Tensor) -> Tree:
        own = fisher.double()
        return {"fisher": own, "product": own @ self._vector(state)}

    def blocks(self, means: Tree, updates: Sequence[ClientUpdate]) -> list[Block]:
        wbar = self._vector(means["model"])
        return [Dense(wbar, means["product"], means["fisher"])]

    def entries(self, values: Sequence[Tensor], like: State) -> State:
        return unflatten(values[0], like, self.layout.parameters)

    def _vector(self, state: State) -> Tensor:
        return flatten(state, self.layout.parameters, torch.float64)


FORMS: Mapping[str, type[FisherForm]] = {
    "diag": _DiagonalForm,
    "kfac": _KFACForm,
    "full": _FullForm,
}


def _semidefinite(matrix: Tensor) -> Tensor:
    """Return the nearest symmetric positive semidefinite matrix, in the Frobenius norm."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT).double() / 2)
    return ((vectors * values.clamp(min=0.0)) @ vectors.mT).to(matrix.dtype)
