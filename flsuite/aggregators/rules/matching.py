"""Matching: permute the neurons of one model into the order of another model's neurons.

A network computes the same function for any order of a hidden layer's neurons, as long as the next
layer reads them in the same order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.state import Layer, State


class Places(NamedTuple):
    """The target positions of a layer's neurons.

    Attributes:
        at: The position of each neuron, int64 ``(neurons,)``, all different.
        size: Number of positions, at least the number of neurons.
    """

    at: Tensor
    size: int


def read_layer(state: State, layer: Layer, inputs: Places | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight of a layer, and its bias if it has one.

    Args:
        state: The model.
        layer: The layer.
        inputs: The positions at which the weight reads the previous layer's neurons. ``None``: the
            layer reads the model's input, which keeps its order.
    """
    weight = state[layer.weight_name]
    if inputs is not None:
        weight = move_inputs(weight, layer, inputs)
    return weight, state[layer.bias_name] if layer.bias else None


def move(values: Tensor, places: Places, dim: int = 0) -> Tensor:
    """Return the entries along ``dim`` moved to their positions, and 0 at free positions.

    No value is rounded.
    """
    shape = list(values.shape)
    shape[dim] = places.size
    return values.new_zeros(shape).index_copy_(dim, places.at, values)


def move_inputs(weight: Tensor, layer: Layer, places: Places) -> Tensor:
    """Return a weight that reads the previous layer's neurons at their new positions.

    Args:
        weight: ``(out, in)`` or ``(out, in, height, width)``.
        layer: The layer of the weight. After a Flatten, each neuron of the previous layer has
            ``layer.positions`` adjacent columns.
        places: Positions of the previous layer's neurons.

    Raises:
        FlsuiteError: If the weight does not read that many neurons.
    """
    channels = len(places.at)
    if weight.shape[1] != channels * layer.positions:
        raise FlsuiteError(
            f"{layer.name} reads {weight.shape[1]} columns, but the layer before has {channels} "
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
    """Return the assignment of rows to positions with the largest total gain.

    Args:
        gains: The gain of each row at each position, float64 ``(rows, places)``, finite, with at
            least as many positions as rows.
    """
    from scipy.optimize import linear_sum_assignment

    gains = gains.clone()
    # Break ties, as between all-zero neurons, in favor of staying in place. The bonus is far below
    # the gains and far above their rounding.
    gains.diagonal().add_(1e-12 * float(gains.abs().max()))
    at = linear_sum_assignment(gains.numpy(), maximize=True)[1]
    return Places(torch.from_numpy(at), gains.shape[1])
