"""The target of an inversion, and what the attacker knows."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.rules.base import Rule
from flsuite.analysis.runs import read_partition
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import torch_generator
from flsuite.common.state import Layer, State, StateLayout, cast, load_, mean_of
from flsuite.data.federated import FederatedData
from flsuite.data.images import Scaling
from flsuite.data.loader import TrainLoader
from flsuite.metrics.fisher.estimates import measuring
from flsuite.metrics.fisher.forms import kfac_factors
from flsuite.metrics.fisher.layers import recorded, unfolded
from flsuite.metrics.fisher.products import at_positions
from flsuite.models.abilities import require_logits
from flsuite.models.layers import read_layers
from flsuite.runs.fork import UPDATES, UpdateStore

Knowledge = Literal["client", "mean", "factors"]
"""``client`` is the client's model, ``mean`` the mean of all clients' models, and ``factors`` the
mean and the client's K-FAC factors."""

Factors = Mapping[str, State]
"""K-FAC factors ``a`` and ``g`` by layer."""


def known_to_server(aggregator: Aggregator | Rule, secure_sum: bool) -> tuple[Knowledge, ...]:
    """Return the server's knowledge for attacking a client.

    Args:
        aggregator: The algorithm, or its rule. Its updates determine the knowledge.
        secure_sum: Whether the server learns only sums over clients, plus the extras that the
            algorithm sends in the clear.

    Raises:
        FlsuiteError: If the algorithm cannot work with sums.
    """
    rule = Aggregator.of(aggregator).rule
    if secure_sum and "each update" in rule.needs:
        raise FlsuiteError(
            f"{type(rule).__name__} needs every client's own update, so it does not work "
            "with secure sums"
        )
    # K-FAC factors are the only statistic that is never summed.
    statistics = rule.statistics(StateLayout((), 0), {})
    sends_factors = any(not statistic.is_sum for statistic in statistics.values())
    return (*(() if secure_sum else ("client",)), "mean", *(("factors",) if sends_factors else ()))


def kept_models(run_dir: str | Path, round: int = 1) -> dict[int, State]:
    """Return the clients' trained models of a round, by client.

    Raises:
        FlsuiteError: If the run did not keep them.
    """
    store = UpdateStore(Path(run_dir) / UPDATES)
    fits = {client: store.read(round, client) for client in store.clients(round)}
    if not fits:
        raise FlsuiteError(
            f"{run_dir} has no clients' models of round {round}; fit it with "
            "--trainer.keep_updates true"
        )
    return {client: fit.state for client, fit in fits.items() if fit is not None}


def mean_model(run_dir: str | Path, round: int = 1) -> State:
    """Return the mean of the clients' models by samples, FedAvg's model.

    Raises:
        FlsuiteError: If the run did not keep them.
    """
    models = kept_models(run_dir, round)
    table = read_partition(run_dir)
    samples = table[table["split"] == "train"].groupby("client")["samples"].sum()

    mean = mean_of((state, float(samples[client])) for client, state in models.items())
    return cast(mean, next(iter(models.values())))


def sent_factors(
    model: nn.Module, data: FederatedData, client: int, seed: int, samples: int | None = 2000
) -> Factors:
    """Return the K-FAC factors that a client of FedFisher sends in round 1.

    Args:
        model: A model with the client's trained weights.
        data: The data of all clients.
        client: The client's number.
        seed: The run's seed, which selects the samples.
        samples: ``samples`` of FedFisher, the maximum number of samples for the factors.

    Raises:
        FlsuiteError: If the model has no logits, or layers that K-FAC does not cover.
    """
    require_logits("the inversion attack", model)
    layers, _ = read_layers(model, model.state_dict())
    batches = TrainLoader(data, client, seed, round=1).plain_batches(samples)
    with measuring(model):
        return kfac_factors(model, layers, batches, data.spec.task)


def public_images(
    data: FederatedData, owner: int, label: int, samples: int, seed: int = 0
) -> Tensor:
    """Return images of the other clients, excluding the owner's class.

    The server has these images and trains its generator on them.

    Args:
        data: The data of all clients.
        owner: The client under attack.
        label: Its class, of which the server has no image.
        samples: Number of images.
        seed: Seed of the selection.

    Returns:
        Images within [0, 1], ``(samples, channels, height, width)``.

    Raises:
        FlsuiteError: If the data are not images, or the other clients have too few.
    """
    if data.train.x.dtype != torch.uint8 or data.train.y.ndim != 1:
        raise FlsuiteError("the inversion attack needs images with one class each")
    rows = torch.cat([data.train_rows(c) for c in range(data.clients) if c != owner])
    rows = rows[data.train.y[rows] != label]
    if not 1 <= samples <= len(rows):
        raise FlsuiteError(
            f"public_images: samples must be within 1 and {len(rows)}, the images of the other "
            f"clients without class {label}, got {samples}"
        )

    draws = torch_generator(seed, "inversion/public")
    chosen = rows[torch.randperm(len(rows), generator=draws)[:samples]]
    return data.train.x[chosen].permute(0, 3, 1, 2).float() / 255


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
        require_logits("the inversion attack", model)
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
