"""The parameters of a Linear or Conv2d layer as one matrix that multiplies the layer's inputs."""

import torch
from torch import Tensor

from flsuite.state import Layer, State


def names(layer: Layer) -> tuple[str, ...]:
    """Return the entries of the state that a layer has."""
    return (layer.weight_name, layer.bias_name) if layer.bias else (layer.weight_name,)


def columns(state: State, layer: Layer, bias: bool = True) -> int:
    """Return the number of columns of a layer's matrix.

    Args:
        state: The model.
        layer: The layer.
        bias: Whether the layer's bias, if it has one, is the last column.
    """
    return state[layer.weight_name][0].numel() + (layer.bias and bias)


def matrix(state: State, layer: Layer, bias: bool = True) -> Tensor:
    """Return the float64 matrix of a layer.

    It is ``(out, in)``, or ``(out, in * height * width)`` of a convolution, whose inputs are
    unfolded. The bias is the last column. Its input is 1.
    """
    weight = state[layer.weight_name].double().flatten(1)
    if not (layer.bias and bias):
        return weight
    return torch.cat([weight, state[layer.bias_name].double()[:, None]], 1)


def entries(value: Tensor, layer: Layer, like: State, bias: bool = True) -> State:
    """Return the matrix of a layer as entries of the state, in the shapes of ``like``."""
    shape = like[layer.weight_name].shape
    if not (layer.bias and bias):
        return {layer.weight_name: value.reshape(shape)}
    return {layer.weight_name: value[:, :-1].reshape(shape), layer.bias_name: value[:, -1]}
