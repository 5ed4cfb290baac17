"""The model that an attacker inverts, and the distance of images to a client's K-FAC factors."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from flsuite.common.state import Layer, State, load_
from flsuite.data.images import Scaling
from flsuite.metrics.fisher.layers import recorded, unfolded
from flsuite.metrics.fisher.products import at_positions
from flsuite.models.layers import read_layers
from flsuite.studies.inversion.knowledge import Factors, require_logits

_TINY = torch.finfo(torch.float32).tiny


class Target:
    """The server's model as a function of images within [0, 1].

    Args:
        model: A built model with a method ``logits``. It is not changed.
        state: The weights.
        scaling: The map from stored images to the model's inputs.
        factors: The K-FAC factors of the client under attack, if the server has them.

    Raises:
        FlsuiteError: If the model has no logits.
    """

    def __init__(
        self, model: LightningModule, state: State, scaling: Scaling, factors: Factors | None = None
    ) -> None:
        require_logits(model)
        self.model = copy.deepcopy(model)
        load_(self.model.state_dict(), state)
        self.model.eval().requires_grad_(False)
        self.scaling = scaling
        self.factors = factors
        self.layers: Sequence[Layer] = read_layers(self.model, state)[0]

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of images ``(n, channels, height, width)``, ``(n, outputs)``."""
        return self.model.logits(self.scaling.of_fractions(images))  # type: ignore[operator]

    def distances(self, images: Tensor, relative: bool = False) -> Tensor:
        """Return the squared distances between the factors of groups of images and the client's.

        They are ``sum |A(images) - A|^2 + |G(images) - G|^2`` over layers, or 0 without factors.

        Args:
            images: ``(groups, n, channels, height, width)``.
            relative: Whether each term is divided by ``|A|^2`` or ``|G|^2``.

        Returns:
            One per group, ``(groups,)``, with gradients at the images.
        """
        total = images.new_zeros(len(images))
        if self.factors is None:
            return total
        inputs = self.scaling.of_fractions(images.flatten(0, 1))
        factors = batch_factors(self.model, self.layers, inputs, len(images))
        for layer in self.layers:
            for kind, wanted in self.factors[layer.name].items():
                wanted = wanted.to(images)
                squares = (factors[layer.name][kind] - wanted).square().sum((1, 2))
                # A client whose model is always certain may have a zero factor.
                scale = wanted.square().sum().clamp_min(_TINY) if relative else 1.0
                total = total + squares / scale
        return total


def batch_factors(
    model: nn.Module, layers: Sequence[Layer], inputs: Tensor, groups: int = 1
) -> dict[str, State]:
    """Return the K-FAC factors of groups of samples, with gradients with respect to the samples.

    They are the factors of :func:`flsuite.metrics.fisher.kfac_factors` for a classifier, which has
    no such gradients. The predicted probabilities are not held constant.

    Args:
        model: A model with a method ``logits``.
        layers: Its layers, each called once.
        inputs: ``(groups * n, ...)``.
        groups: Number of adjacent groups of samples.

    Returns:
        ``a`` and ``g`` by layer, ``(groups, size, size)`` each.
    """
    samples = len(inputs) // groups
    modules: dict[str, Any] = {layer.name: model.get_submodule(layer.name) for layer in layers}
    # Gradients at the layers' outputs are needed in any case.
    with torch.enable_grad(), recorded(modules) as calls:
        inputs = inputs if inputs.requires_grad else inputs.clone().requires_grad_()
        logits: Tensor = model.logits(inputs)  # type: ignore[operator]
        p = logits.softmax(1)
        columns = p.sqrt().T[..., None] * (torch.eye(p.shape[1]).to(p)[:, None] - p)
        edges: list[Any] = [calls[name][0].edge for name in modules]
        gradients = [torch.autograd.grad(logits, edges, c, create_graph=True) for c in columns]

    factors: dict[str, State] = {}
    for (name, layer), *of_columns in zip(modules.items(), *gradients, strict=True):
        a = unfolded(layer, calls[name][0].input)
        if layer.bias is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        # All columns of a sample count as positions.
        g = at_positions(layer, torch.stack(of_columns, 1)).transpose(1, 2).flatten(2)
        factors[name] = {
            "a": _products(a, groups) / samples,
            "g": _products(g, groups) / (samples * a.shape[2]),
        }
    return factors


def _products(rows: Tensor, groups: int) -> Tensor:
    """Return ``sum_n sum_t r_t r_t^T`` of each group of samples, ``(groups, size, size)``.

    Args:
        rows: ``(groups * n, size, positions)``.
        groups: Groups of samples.
    """
    of_group = rows.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
    return of_group @ of_group.mT
