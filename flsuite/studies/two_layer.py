"""FedFisher's synthetic experiment: the full Fisher on two-layer networks.

Jhunjhunwala, Wang and Joshi 2024, FedFisher: Leveraging Fisher Information for One-Shot Federated
Learning, AISTATS, arXiv:2403.12329. The network is ``f(x) = m^(-1/2) sum_r a_r relu(w_r . x)`` with
m hidden neurons. Its weights w_r are trained on the loss ``(f - y)^2 / 2``, with fixed signs a_r.

``python -m flsuite.studies.two_layer --output FOLDER`` writes a table and a figure.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flsuite.analysis.panels import new_figure, tidy
from flsuite.common.arguments import NonNegativeInt, PositiveFloat, PositiveInt, require
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import make_folder
from flsuite.common.random import numpy_generator

WIDTHS = (16, 64, 256, 1024, 4096)
STEPS = (1, 4, 16, 64, 256, 1024, 4096)
# With smaller weights, neurons turn on and off more often during training.
KAPPAS = (1.0, 0.3)

# The paper's sizes and rates are not published. Here, training converges within STEPS.
_WIDTH, _STEPS = 256, 256
_CLIENTS, _SAMPLES, _INPUTS = 5, 20, 10
_RATE = 1.0

_LABELS = {"width": "width m", "steps": "local steps K"}


class Clients(NamedTuple):
    """The data of all clients.

    Attributes:
        x: Inputs of norm 1, ``(clients, samples, inputs)``.
        y: Targets, ``(clients, samples)``.
    """

    x: Tensor
    y: Tensor


class Network(NamedTuple):
    """One network, or a network per client with the same signs.

    Attributes:
        weights: ``w``, ``(..., width, inputs)``.
        signs: ``a``, 1 or -1, ``(width,)``.
    """

    weights: Tensor
    signs: Tensor

    @property
    def output_weights(self) -> Tensor:
        """Return ``m^(-1/2) a``."""
        return self.signs / math.sqrt(len(self.signs))


def outputs(network: Network, x: Tensor) -> Tensor:
    """Return ``f(x)``, ``(..., samples)``, of inputs ``(..., samples, inputs)``."""
    return (x @ network.weights.mT).relu() @ network.output_weights


def jacobian(network: Network, x: Tensor) -> Tensor:
    """Return the Jacobian of the outputs, ``(..., samples, width * inputs)``.

    A row is ``m^(-1/2) a_r 1[w_r . x > 0] x``, neuron by neuron.
    """
    slopes = (x @ network.weights.mT > 0) * network.output_weights
    return (slopes[..., :, None] * x[..., None, :]).flatten(-2)


def train(network: Network, clients: Clients, steps: int) -> Network:
    """Return the clients' networks after steps of full-batch gradient descent.

    Args:
        network: The network that all clients start from, or one per client.
        clients: Their data.
        steps: Number of steps per client.
    """
    weights, output_weights = network.weights, network.output_weights
    rate = _RATE / clients.x.shape[1]
    for _ in range(steps):
        hidden = clients.x @ weights.mT
        errors = hidden.relu() @ output_weights - clients.y
        # The gradient J^T (f - y) / n is computed without the Jacobian.
        slopes = (hidden > 0) * output_weights
        weights = weights - rate * (slopes * errors[..., None]).mT @ clients.x
    return Network(weights.expand(len(clients.x), -1, -1), network.signs)


def fuse(models: Sequence[Tensor], jacobians: Sequence[Tensor]) -> Tensor:
    """Return FedFisher's model for the full Fishers ``F_i = J_i^T J_i / n_i``.

    It minimizes ``sum p_i (w - w_i)^T F_i (w - w_i)`` with ``p_i = n_i / N``, and takes the minimum
    closest to the mean ``wbar = sum p_i w_i``. With the rows ``sqrt(p_i / n_i) J_i`` of all
    clients in J, and ``r_i = sqrt(p_i / n_i) J_i w_i`` in r, it is ``wbar + J^+ (r - J wbar)``.
    ``p_i / n_i`` is 1 / N for all rows, so the factor cancels. No matrix is ``(d, d)``.

    Args:
        models: The parameters w_i of each client, ``(d,)``.
        jacobians: The Jacobian of each client, ``(samples, d)``.
    """
    samples = torch.tensor([len(rows) for rows in jacobians]).to(models[0])
    mean = samples / samples.sum() @ torch.stack(list(models))

    rows = torch.cat(list(jacobians))
    targets = torch.cat([own @ w for own, w in zip(jacobians, models, strict=True)])
    # gelsd returns the shortest solution, whatever the rank.
    residual = (targets - rows @ mean)[:, None]
    return mean + torch.linalg.lstsq(rows, residual, driver="gelsd").solution[:, 0]


def _training_error(network: Network, clients: Clients) -> float:
    """Return the mean of ``(f - y)^2 / 2`` of one network over the samples of all clients."""
    return float((outputs(network, clients.x) - clients.y).square().mean() / 2)


def draw_clients(seed: int) -> Clients:
    """Draw the data in float64: five clients with twenty samples of ten inputs.

    The inputs follow Li et al. 2020, Federated Optimization in Heterogeneous Networks,
    arXiv:1812.06127, with alpha and beta 1, scaled to norm 1. The targets are ``u_i . x /
    sqrt(10)``, with the client's own u_i.
    """
    x, y = np.empty((_CLIENTS, _SAMPLES, _INPUTS)), np.empty((_CLIENTS, _SAMPLES))
    deviations = np.arange(1, _INPUTS + 1) ** -0.6  # variances j^-1.2
    for client in range(_CLIENTS):
        generator = numpy_generator(seed, "two-layer data", client=client)
        centre = generator.normal(generator.normal(), 1.0, _INPUTS)
        drawn = generator.normal(centre, deviations, (_SAMPLES, _INPUTS))
        slope = generator.normal(generator.normal(), 1.0, _INPUTS)

        x[client] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        y[client] = x[client] @ slope / math.sqrt(_INPUTS)
    return Clients(torch.from_numpy(x), torch.from_numpy(y))


def draw_network(seed: int, width: int, kappa: float) -> Network:
    """Draw the network that all clients start from, in float64.

    Args:
        seed: The seed.
        width: Hidden neurons m.
        kappa: Standard deviation of the weights.
    """
    generator = numpy_generator(seed, "two-layer network")
    signs = generator.choice([-1.0, 1.0], width)
    weights = kappa * generator.normal(size=(width, _INPUTS))
    return Network(torch.from_numpy(weights), torch.from_numpy(signs))


def synthetic_table(
    seeds: Sequence[int],
    widths: Sequence[int] = WIDTHS,
    steps: Sequence[int] = STEPS,
    kappas: Sequence[float] = KAPPAS,
) -> pd.DataFrame:
    """Return the training error of FedFisher and FedAvg by the width and by the local steps.

    The columns are ``kappa``, ``varied`` (``width`` or ``steps``), ``seed``, ``width``, ``steps``,
    ``method`` and ``error``. If the width varies, there are 256 steps, and vice versa.

    Args:
        seeds: Seeds of the data and of the first network.
        widths: Hidden neurons.
        steps: Local steps of a client.
        kappas: Standard deviations of the weights of the first network.

    Raises:
        FlsuiteError: If an argument is out of range.
    """
    at_least_1 = {"seeds": len(seeds), "widths": min(widths, default=None)}
    require("synthetic_table", PositiveInt | None, **at_least_1)
    require("synthetic_table", NonNegativeInt | None, steps=min(steps, default=None))
    require("synthetic_table", PositiveFloat | None, kappas=min(kappas, default=None))

    rows: list[tuple[float, str, int, int, int, str, float]] = []
    for kappa in kappas:
        for seed in seeds:
            for width in widths:
                by_steps = _errors(seed, width, [_STEPS], kappa)
                rows += [(kappa, "width", seed, width, *errors) for errors in by_steps]
            by_steps = _errors(seed, _WIDTH, steps, kappa)
            rows += [(kappa, "steps", seed, _WIDTH, *errors) for errors in by_steps]
    columns = ["kappa", "varied", "seed", "width", "steps", "method", "error"]
    return pd.DataFrame(rows, columns=columns)


def _errors(
    seed: int, width: int, steps: Sequence[int], kappa: float
) -> Iterator[tuple[int, str, float]]:
    """Yield local steps, method and training error, from one training of each client."""
    clients, local, trained = draw_clients(seed), draw_network(seed, width, kappa), 0
    for count in sorted(steps):
        local, trained = train(local, clients, count - trained), count

        models = list(local.weights.flatten(1))
        fused = fuse(models, list(jacobian(local, clients.x)))
        # All clients have equally many samples.
        for method, model in (("FedFisher", fused), ("FedAvg", torch.stack(models).mean(0))):
            network = Network(model.unflatten(0, (width, _INPUTS)), local.signs)
            yield count, method, _training_error(network, clients)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean, standard deviation and range over the seeds of :func:`synthetic_table`."""
    keys = ["kappa", "varied", "width", "steps", "method"]
    errors = table.groupby(keys, sort=False)["error"]
    rows = errors.agg(seeds="size", mean="mean", std="std", least="min", largest="max")
    return rows.reset_index()


def synthetic_figure(table: pd.DataFrame) -> Figure:
    """Draw the mean over seeds by the width and by the local steps, and the range of the seeds.

    Each kappa has a row of panels.

    Args:
        table: The result of :func:`synthetic_table`.
    """
    rows = summary(table)
    kappas = rows["kappa"].unique()
    figure = new_figure(8, 0.6 + 2.6 * len(kappas))
    grid = figure.subplots(len(kappas), 2, squeeze=False, sharex="col", sharey=True)

    for panels, kappa in zip(grid, kappas, strict=True):
        for panel, varied in zip(panels, _LABELS, strict=True):
            _draw(panel, rows[(rows["kappa"] == kappa) & (rows["varied"] == varied)], varied)
        panels[0].set_ylabel(f"training error, kappa {kappa:g}")
    for panel, label in zip(grid[-1], _LABELS.values(), strict=True):
        panel.set_xlabel(label)
    grid[0, 0].legend(frameon=False)
    return figure


def _draw(panel: Axes, rows: pd.DataFrame, varied: str) -> None:
    """Draw the curves of both methods in one panel."""
    for method, curve in rows.groupby("method", sort=False):
        at = curve[varied].to_numpy()
        panel.plot(at, curve["mean"].to_numpy(), "o-", markersize=4, linewidth=1.8, label=method)
        panel.fill_between(at, curve["least"], curve["largest"], alpha=0.15, linewidth=0)

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(rows[varied].unique(), [str(value) for value in rows[varied].unique()])
    tidy(panel)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``synthetic.csv`` and ``figures/synthetic.png`` to a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m flsuite.studies.two_layer", description="FedFisher's synthetic experiment"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 1 on")
    request = parser.parse_args(arguments)

    try:
        table = synthetic_table(range(1, request.seeds + 1))
        figures = make_folder(request.output / "figures")
    except FlsuiteError as error:
        parser.error(str(error))
    csv, png = request.output / "synthetic.csv", figures / "synthetic.png"
    summary(table).to_csv(csv, index=False, float_format="%.4g")
    synthetic_figure(table).savefig(png)
    print(f"{csv}\n{png}")


if __name__ == "__main__":
    main()
