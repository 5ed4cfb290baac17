"""RegMean: Jin et al. 2023, eq. 2 and algorithm 1.

Dataless Knowledge Fusion by Merging Weights of Language Models, arXiv:2212.09849.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

import flsuite.aggregators.layer_matrices as layer_matrices
from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.logit_pass import LogitPass
from flsuite.aggregators.sums import STATE, mean_state, means, state_summands, sum_up
from flsuite.data.loader import Batch
from flsuite.errors import FlsuiteError, require_whole
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.metrics.fisher import gram_matrices
from flsuite.state import Layer, State, StateLayout, clone

__all__ = ["RegMean"]

log = logging.getLogger("flsuite")

GRAM, PRODUCT, DIAGONAL = "gram/", "product/", "diagonal/"
"""The prefixes of the sums of ``n_i G_i``, of ``n_i W_i G_i`` and of ``n_i W_i diag G_i``."""

_ALPHAS = (0.1, 0.9)
# Grams travel in float32. Below this part of the largest eigenvalue there is rounding alone.
_ROUNDING = 1e-7


class RegMean(Aggregator):
    """Linear layers whose outputs are as close as possible to those of each client's layer.

    A client sends its model and, per linear layer, the Gram matrix of the layer's inputs X over its
    samples, ``G_i = X^T X / rows``. With ``G'_i = alpha G_i + (1 - alpha) diag G_i`` and
    ``p_i = n_i / N``, the layer is ``W = (sum p_i W_i G'_i) (sum p_i G'_i)^-1``. Where the sum is
    singular, it is the solution closest to the clients' mean: a column whose input is zero for all
    clients keeps the mean. All else takes FedAvg's value, and so do layers that are called twice.
    The original has the plain mean in place of the weights ``p_i``.

    The server half works from sums, and sees no model of a single client.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation, without waiting for clients;
    - ``alpha``: the one in use;
    - ``selected_score``: its accuracy on the server's samples.

    Args:
        alpha: Weight of the Gram matrix, in [0, 1], against its diagonal. 1 is the least-squares
            solution. Default: .1 or .9, whichever has the better score on the server's samples
            (``data.server_samples``), the first of equals.
        conv: Whether convolutions take part, with their inputs unfolded. The original takes their
            mean.
        bias: Whether a bias is a column with the input 1. The original takes its mean.
        samples: The largest number of a client's samples that its Gram matrices are computed over,
            without augmentation. The original takes at most 16,000. Default: all.
    """

    psd_extras = ("gram",)

    def __init__(
        self,
        alpha: float | None = None,
        conv: bool = False,
        bias: bool = False,
        samples: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.conv = conv
        self.bias = bias
        self.samples = samples
        require_whole("RegMean", 1, samples=samples)
        if alpha is not None and not 0 <= alpha <= 1:
            raise FlsuiteError(f"RegMean: alpha must be in [0, 1], got {alpha}")

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        sizes = {
            layer.name: layer_matrices.columns(global_state, layer, self.bias)
            for layer in self._layers
        }
        # Expanded: a template takes no memory.
        return {"gram": {name: torch.zeros(()).expand(size, size) for name, size in sizes.items()}}

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [_GramPass(client, self._layers, self.bias, self.samples)]

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        summed = sum_up(updates, self.summands)
        new = self.from_sums(global_state, summed.sums, summed.updates)
        self.metrics["server_seconds"] += summed.seconds
        return new

    def summands(self, update: ClientUpdate) -> State:
        """Return what a client adds to the sums, all that the server needs of it.

        These are ``n_i w_i`` (``state/NAME``), ``n_i G_i`` (``gram/LAYER``), ``n_i W_i G_i``
        (``product/LAYER``) and ``n_i W_i diag G_i`` (``diagonal/LAYER``), in float64.
        """
        summed, state = state_summands(update), update.state
        for layer in self._layers:
            gram = update.extras["gram"][layer.name].double() * update.samples
            weight = layer_matrices.matrix(state, layer, self.bias)
            summed[GRAM + layer.name] = gram
            summed[PRODUCT + layer.name] = weight @ gram
            summed[DIAGONAL + layer.name] = weight * gram.diagonal()
        return summed

    def from_sums(self, global_state: State, sums: State, updates: Sequence[ClientUpdate]) -> State:
        started = time.perf_counter()
        mean = means(sums, updates)
        averaged = mean_state(mean, updates, global_state)
        candidates = _ALPHAS if self.alpha is None else (self.alpha,)
        models = {alpha: averaged | self._merged(mean, alpha, global_state) for alpha in candidates}
        alpha = self._best(models)

        self._name_unknown(mean)
        self.metrics["alpha"] = alpha
        self.metrics["server_seconds"] = time.perf_counter() - started
        return models[alpha]

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model, and name the modules that take the mean."""
        super().configure(layout)
        if self.alpha is None and self.tools.score is None:
            picks = "picks alpha by its score on the server's samples (or set alpha)"
            raise self.tools.refusal("RegMean", "score", picks)

        merged = {layer.name for layer in self._layers}
        others = [layer.name for layer in layout.layers if layer.name not in merged]
        if others := [*others, *layout.outside_layers]:
            log.info("RegMean takes the mean of %s", ", ".join(others))

    @property
    def _layers(self) -> list[Layer]:
        """Return the layers that are merged by their inputs."""
        return [layer for layer in self.layout.layers if self.conv or layer.kind == "linear"]

    def _merged(self, mean: State, alpha: float, like: State) -> State:
        """Return the merged layers as entries of the state."""
        models = {name.removeprefix(STATE): value for name, value in mean.items()}
        new: State = {}
        for layer in self._layers:
            gram, product = mean[GRAM + layer.name], mean[PRODUCT + layer.name]
            reduced = alpha * gram + (1 - alpha) * gram.diagonal().diag()
            target = alpha * product + (1 - alpha) * mean[DIAGONAL + layer.name]
            wbar = layer_matrices.matrix(models, layer, self.bias)
            new |= layer_matrices.entries(solve_from(wbar, target, reduced), layer, like, self.bias)
        return new

    def _best(self, models: Mapping[float, State]) -> float:
        """Return the alpha whose model has the best score, the first of equals."""
        score = self.tools.score
        if len(models) == 1 or score is None:
            return next(iter(models))
        scores = {alpha: score(model) for alpha, model in models.items()}
        self.metrics["selected_score"] = max(scores.values())
        # max returns the first of equals.
        return max(scores, key=scores.__getitem__)

    def _name_unknown(self, mean: State) -> None:
        names = [layer.name for layer in self._layers if not mean[GRAM + layer.name].any()]
        if names:
            log.info(
                "RegMean takes the mean of %s: called twice, or all inputs are 0", ", ".join(names)
            )


class _GramPass(LogitPass):
    """The client half, which measures the inputs of the trained model's layers."""

    def __init__(
        self, client: ClientContext, layers: Sequence[Layer], bias: bool, samples: int | None
    ) -> None:
        super().__init__(client, "RegMean", samples)
        self.layers = layers
        self.bias = bias

    def extras(
        self, module: LightningModule, batches: Iterator[Batch], generator: torch.Generator
    ) -> dict[str, Any]:
        grams = clone(gram_matrices(module, self.layers, batches, self.bias))
        # Layers that are called twice have none. Zeros are inputs that determine nothing.
        for layer in self.layers:
            size = layer_matrices.columns(module.state_dict(), layer, self.bias)
            grams.setdefault(layer.name, torch.zeros(size, size))
        return {"gram": grams}


def solve_from(start: Tensor, target: Tensor, gram: Tensor) -> Tensor:
    """Return the solution of ``W gram = target`` that is closest to ``start``.

    Args:
        start: ``(out, in)``.
        target: ``(out, in)``.
        gram: Symmetric positive semidefinite, ``(in, in)``.
    """
    inverse = torch.linalg.pinv(gram, rtol=_ROUNDING, hermitian=True)
    return start + (target - start @ gram) @ inverse
