"""Neurons of one layer brought into the order of another model's neurons.

A network computes the same function with the neurons of a hidden layer in any order, as long as the
next layer reads them in this order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flsuite.errors import FlsuiteError
from flsuite.state import Layer, State, StateLayout


class Places(NamedTuple):
    """The places where the neurons of a layer go.

    Attributes:
        at: The place of each neuron, int64 ``(neurons,)``, no two the same.
        size: Number of places, at least as many as neurons.
    """

    at: Tensor
    size: int


def read_layer(state: State, layer: Layer, inputs: Places | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight of a layer, and its bias if it has one.

    Args:
        state: The model.
        layer: The layer.
        inputs: The places where the weight reads the neurons of the layer before. ``None``: the
            layer reads the model's input, which keeps its order.
    """
    weight = state[layer.weight_name]
    if inputs is not None:
        weight = move_inputs(weight, layer, inputs)
    return weight, state[layer.bias_name] if layer.bias else None


def move(values: Tensor, places: Places, dim: int = 0) -> Tensor:
    """Return the entries along ``dim`` at their places, and 0 at places that no entry has.

    Nothing is rounded.
    """
    shape = list(values.shape)
    shape[dim] = places.size
    return values.new_zeros(shape).index_copy_(dim, places.at, values)


def move_inputs(weight: Tensor, layer: Layer, places: Places) -> Tensor:
    """Return a weight that reads the neurons of the layer before at their places.

    Args:
        weight: ``(out, in)`` or ``(out, in, height, width)``.
        layer: The layer of the weight. After a Flatten, each neuron of the layer before has
            ``layer.positions`` columns side by side.
        places: Places of the neurons of the layer before.

    Raises:
        FlsuiteError: If the weight does not read that many neurons.
    """
    channels = len(places.at)
    if weight.shape[1] != channels * layer.positions:
        raise FlsuiteError(
            f"{layer.name} reads {weight.shape[1]} columns, and the layer before has {channels} "
            f"neurons of {layer.positions} positions each; choose a network whose layers read all "
            "of the layer before"
        )
    blocks = weight.unflatten(1, (channels, layer.positions))
    return move(blocks, places, dim=1).flatten(1, 2)


def neurons(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the incoming weights of each neuron, and its bias, as float64 ``(out, inputs)``."""
    rows = weight.flatten(1).double()
    return rows if bias is None else torch.cat([rows, bias.double()[:, None]], dim=1)


def assign(gains: Tensor) -> Places:
    """Return the places of the rows with the largest total gain.

    Args:
        gains: The gain of each row at each place, float64 ``(rows, places)``, finite, with at least
            as many places as rows.
    """
    from scipy.optimize import linear_sum_assignment

    gains = gains.clone()
    # Of equal assignments, as between neurons that are all zero, the one that moves least. The
    # bonus is far below the gains and far above their rounding.
    gains.diagonal().add_(1e-12 * float(gains.abs().max()))
    at = linear_sum_assignment(gains.numpy(), maximize=True)[1]
    return Places(torch.from_numpy(at), gains.shape[1])


def require_chain(owner: str, layout: StateLayout) -> None:
    """Refuse a model whose weight layers do not follow one another."""
    if not layout.chain:
        raise FlsuiteError(f"{owner} needs a chain of Conv2d and Linear; {layout.no_chain}")
