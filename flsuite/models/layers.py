"""The layers of a model, and its tensors by name, for algorithms that work layer by layer."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flsuite.common.state import Layer
from flsuite.models.base import ClientModel
from flsuite.models.modes import evaluating

_ELEMENTWISE = (  # they treat all channels alike, so channels may be permuted before them
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    nn.Dropout2d,
    nn.Identity,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)


def entry_names(model: nn.Module) -> list[str]:
    """Return the names of the state dict, tied tensors under their first name only."""
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}
    firsts: dict[int, str] = {}
    for name in model.state_dict():
        firsts.setdefault(id(tensors.get(name, name)), name)
    return list(firsts.values())


def batchnorm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers of a model by name. Their statistics are buffers."""
    return {name: part for name, part in model.named_modules() if isinstance(part, _BatchNorm)}


def has_gradient_hooks(model: LightningModule) -> bool:
    """Return whether a parameter has hooks on its gradient. Copies of the model have none."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


def to_channels_last(model: LightningModule) -> None:
    """Convert the convolutions of a flsuite model to the fastest memory format for images.

    A user's module keeps its own format, which is part of how it trains elsewhere.
    """
    # Tables have no convolutions to convert.
    if isinstance(model, ClientModel) and model.spec and len(model.spec.shape) == 3:
        model.to(memory_format=torch.channels_last)


def read_layers(
    model: nn.Module, shared: Collection[str]
) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """Return the Linear and Conv2d layers of a model, and the other modules with parameters.

    Args:
        model: The model.
        shared: Names of the shared entries.

    Returns:
        The layers with shared parameters that belong only to them, in the model's order, and the
        name and type of every other module that owns shared parameters.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    layers: list[Layer] = []
    others: dict[str, str] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(name, recurse=False))
        if not own or not any(entry in shared for entry in own):
            continue

        is_tied = any(uses[id(p)] > 1 for p in own.values())
        layer = _layer(name, module)
        if layer is None or is_tied or not all(entry in shared for entry in own):
            others[name or type(model).__name__] = _what(module, is_tied, layer is not None)
        else:
            layers.append(layer)
    return tuple(layers), others


def read_chain(model: nn.Module, shape: tuple[int, ...]) -> tuple[tuple[Layer, ...], str]:
    """Return the layers of a model as a chain, or why they do not form a chain.

    Such a model is an ``nn.Sequential`` of Conv2d, Linear, pools, elementwise activations, dropout
    and Flatten.

    Args:
        model: The model.
        shape: Shape of a sample as the model receives it.

    Returns:
        The chain and an empty text, or an empty chain and the reason.
    """
    sequence = _sequence(model)
    if sequence is None:
        inner = [type(module).__name__ for module in model.children()] or [type(model).__name__]
        return (), f"{' with '.join(inner[:3])} is not one nn.Sequential of layers"
    name, modules = sequence

    chain: list[Layer] = []
    positions = 1
    x = torch.zeros(1, *shape, device=next(model.parameters()).device)
    for place, module in modules:
        full_name = f"{name}.{place}" if name else place
        layer = _layer(full_name, module)
        if isinstance(module, nn.Flatten):
            # Only the output of a previous layer has channels that may be permuted.
            positions = x[0, 0].numel() if chain and x.ndim > 2 else 1
        elif layer is not None:
            reads_image = layer.kind == "linear" and bool(chain) and chain[-1].kind == "conv2d"
            chain.append(replace(layer, positions=positions if reads_image else 1))
        elif not isinstance(module, _ELEMENTWISE):
            return (), f"{full_name} is a {type(module).__name__}"
        try:
            with torch.no_grad(), evaluating(module):
                x = module(x.clone())  # some modules work in place
        except (RuntimeError, IndexError, ValueError):  # of Linear, Flatten and pools
            return (), f"{full_name} does not take what comes before it"
    return tuple(chain), ""


def uncovered(layer: nn.Module) -> str | None:
    """Return why a module does not count as a layer here, or ``None`` for Linear or Conv2d."""
    kind = type(layer).__name__
    # Check exact types, because a subclass may compute something else.
    if type(layer) is nn.Linear:
        return None
    if type(layer) is not nn.Conv2d:
        return f"{kind} is neither Linear nor Conv2d"
    if layer.groups != 1:
        return f"its {kind} has {layer.groups} groups"
    padding = layer.padding if isinstance(layer.padding, str) else layer.padding_mode
    if padding != "zeros":
        return f"its {kind} pads by {padding!r} instead of a number of zeros"
    return None


def _layer(name: str, module: nn.Module) -> Layer | None:
    """Return a module as a layer, if it is one."""
    if uncovered(module) is not None:
        return None
    return Layer(name, "linear" if type(module) is nn.Linear else "conv2d", module.bias is not None)


def _what(module: nn.Module, is_tied: bool, is_layer: bool) -> str:
    """Return a description of a module, for a message that refuses it."""
    kind = type(module).__name__
    if is_tied:
        return f"{kind} with shared weights"
    if is_layer:
        return f"{kind} with a private part"
    if isinstance(module, nn.Conv2d):
        return f"{kind} with groups or another padding than zeros"
    return kind


def _sequence(model: nn.Module) -> tuple[str, Iterator[tuple[str, nn.Module]]] | None:
    """Return the nn.Sequential with all parameters: its name and its flattened modules."""
    wanted = {id(p) for p in model.parameters()}
    for name, module in model.named_modules():
        if type(module) is nn.Sequential and wanted <= {id(p) for p in module.parameters()}:
            return name, _flattened(module)
    return None


def _flattened(sequence: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    for name, module in sequence.named_children():
        if type(module) is nn.Sequential:
            yield from ((f"{name}.{inner}", part) for inner, part in _flattened(module))
        else:
            yield name, module
