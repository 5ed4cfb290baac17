"""RegMean: Jin et al. 2023, eq. 2 and algorithm 1.

Dataless Knowledge Fusion by Merging Weights of Language Models, arXiv:2212.09849.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.after_fit import after_fit, plain_batches
from flsuite.aggregators.rules.base import LinearRule, timed, withheld_by
from flsuite.aggregators.rules.fisher_forms import columns, entries, matrix, square_template
from flsuite.common.arguments import PositiveInt, Settings, Share
from flsuite.common.client import ClientContext
from flsuite.common.errors import log
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import Layer, State, StateLayout, Tree, cast, clone, divided, scaled
from flsuite.data.loader import TrainLoader
from flsuite.metrics.fisher.products import gram_matrices
from flsuite.models.abilities import require_logits

_ALPHAS = (0.1, 0.9)
# Grams are sent in float32: relative to the largest eigenvalue, smaller ones are rounding.
_ROUNDING = 1e-7
_TAKES = "RegMean takes the mean of"


@dataclass(frozen=True)
class RegMean(LinearRule, Settings):
    """Merges linear layers so that their outputs are closest to each client's layer outputs.

    Take it to merge models with Linear and Conv2d layers without a search on the server.

    A client sends its model and, per linear layer, the Gram matrix of the layer's inputs X over its
    samples, ``G_i = X^T X / rows``. With ``G'_i = alpha G_i + (1 - alpha) diag G_i`` and
    ``p_i = n_i / N``, the layer is ``W = (sum p_i W_i G'_i) (sum p_i G'_i)^-1``. If the sum is
    singular, it is the solution closest to the clients' mean: a column whose input is zero for all
    clients keeps the mean. All other entries take FedAvg's value, including layers that are called
    twice. The original uses the plain mean instead of the weights ``p_i``.

    The server half uses sums, and never sees a single client's model.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation, without waiting for clients;
    - ``alpha``: the alpha in use;
    - ``selected_score``: its accuracy on the server's samples.

    Args:
        alpha: Weight of the Gram matrix, in [0, 1], against its diagonal. 1 is the least-squares
            solution. Default: .1 or .9, whichever has the better score on the server's samples
            (``data.server_samples``), the first on a tie.
        conv: Whether to include convolutions, with their inputs unfolded. The original averages
            them.
        bias: Whether to treat a bias as a column with the input 1. The original averages it.
        samples: Maximum number of a client's samples for its Gram matrices, without augmentation.
            The original uses at most 16,000. Default: all.
    """

    alpha: Share | None = None
    conv: bool = False
    bias: bool = False
    samples: PositiveInt | None = None

    weighting = "samples"
    needs = frozenset({"current models"})
    withholds = withheld_by("Gram matrices")

    # The client half

    def measure(self, client: ClientContext, module: LightningModule, loader: TrainLoader) -> None:
        layers, state = self._layers(client.layout), module.state_dict()
        with after_fit(client, module):
            batches = plain_batches(module, loader, self.samples)
            grams = clone(gram_matrices(module, layers, batches, self.bias))
        # Layers that are called twice have no Gram. Zeros determine nothing.
        for layer in layers:
            size = columns(state, layer, self.bias)
            grams.setdefault(layer.name, torch.zeros(size, size, dtype=torch.float32))
        client.extras["gram"] = grams

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        layers = self._layers(layout)
        sizes = {layer.name: columns(state, layer, self.bias) for layer in layers}
        grams = {name: square_template(size) for name, size in sizes.items()}
        return {"gram": Statistic(grams, is_psd=True)}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        """Return ``n_i``, ``n_i w_i``, ``n_i G_i``, ``n_i W_i G_i`` and ``n_i W_i diag G_i``."""
        grams, products, diagonals = {**scaled(update.extras["gram"], update.samples)}, {}, {}
        for layer in self._layers(layout):
            gram, weight = grams[layer.name], matrix(update.state, layer, self.bias)
            products[layer.name] = weight @ gram
            diagonals[layer.name] = weight * gram.diagonal()
        own = scaled({"samples": 1.0, "model": update.state}, update.samples)
        return {**own, "gram": grams, "product": products, "diagonal": diagonals}

    # The server half

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        with timed(server):
            means = divided(sums, sums["samples"])
            alphas = _ALPHAS if self.alpha is None else (self.alpha,)
            models = {alpha: self._merged(server, means, alpha) for alpha in alphas}
            alpha = server.metrics["alpha"] = _best(server, models)

        unknown = [name for name, gram in means["gram"].items() if not gram.any()]
        if unknown:
            log.info("%s %s: called twice, or all inputs are 0", _TAKES, ", ".join(unknown))
        return models[alpha]

    def _merged(self, server: Server, means: Tree, alpha: float) -> State:
        """Return the mean with the layers merged by their inputs."""
        model: State = means["model"]
        new = dict(model)
        for layer in self._layers(server.layout):
            gram, product, diagonal = (
                means[part][layer.name] for part in ("gram", "product", "diagonal")
            )
            reduced = alpha * gram + (1 - alpha) * gram.diagonal().diag()
            target = alpha * product + (1 - alpha) * diagonal
            wbar = matrix(model, layer, self.bias)
            merged = solve_from(wbar, target, reduced)
            new |= entries(merged, layer, server.state, self.bias)
        return new

    def _layers(self, layout: StateLayout) -> list[Layer]:
        """Return the layers that are merged by their inputs."""
        return [layer for layer in layout.layers if self.conv or layer.kind == "linear"]

    # Before the first round

    def check(self, model: LightningModule) -> None:
        require_logits("RegMean", model)

    def prepare(self, server: Server) -> None:
        """Refuse to pick alpha without a score, and log the modules that are averaged."""
        if self.alpha is None and server.tools.score is None:
            picks = "picks alpha by its score on the server's samples (or set alpha)"
            raise server.tools.refusal("RegMean", "score", picks)

        merged = {layer.name for layer in self._layers(server.layout)}
        others = [layer.name for layer in server.layout.layers if layer.name not in merged]
        if others := [*others, *server.layout.outside_layers]:
            log.info("%s %s", _TAKES, ", ".join(others))


def _best(server: Server, models: Mapping[float, State]) -> float:
    """Return the alpha whose model has the best score, the first on a tie."""
    score = server.tools.score
    if len(models) == 1 or score is None:
        return next(iter(models))
    scores = {alpha: score(cast(model, server.state)) for alpha, model in models.items()}
    server.metrics["selected_score"] = max(scores.values())
    # max returns the first on a tie.
    return max(scores, key=scores.__getitem__)


def solve_from(start: Tensor, target: Tensor, gram: Tensor) -> Tensor:
    """Return the solution of ``W gram = target`` that is closest to ``start``.

    Args:
        start: ``(out, in)``.
        target: ``(out, in)``.
        gram: Symmetric positive semidefinite, ``(in, in)``.
    """
    inverse = torch.linalg.pinv(gram, rtol=_ROUNDING, hermitian=True)
    return start + (target - start @ gram) @ inverse
