"""Linear and Conv2d parameters as one matrix that multiplies the layer's inputs."""

import torch
from torch import Tensor

from flsuite.common.state import Layer, State


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
    """Return a float32 template ``(size, size)`` that takes no memory."""
    return torch.zeros(()).expand(size, size)


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
