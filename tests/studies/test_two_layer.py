"""FedFisher's synthetic experiment, against gradient descent and closed forms."""

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from flsuite.aggregators.rules.solvers import Dense, gradient_descent
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import torch_generator
from flsuite.metrics.fisher import full_fisher
from flsuite.studies import two_layer
from flsuite.studies.two_layer import (
    Clients,
    Network,
    draw_clients,
    draw_network,
    fuse,
    jacobian,
    outputs,
    summary,
    synthetic_figure,
    synthetic_table,
    train,
)

STORED = Path(__file__).parents[2] / "configs" / "one_shot" / "synthetic.csv"
FIGURE = STORED.parent / "figures" / "synthetic.png"


class Module(nn.Module):
    """The network as a module that torch differentiates."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.weights = nn.Parameter(network.weights.clone())
        self.register_buffer("signs", network.signs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(nn.functional.linear(x, self.weights))
        return (hidden * self.signs).sum(1, keepdim=True) / math.sqrt(len(self.signs))


def random(*shape: int, client: int = 0) -> Tensor:
    generator = torch_generator(7, "test", client=client)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def moments(models: Sequence[Tensor], jacobians: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of the models, the mean Fisher matrix S, and its target."""
    fishers = [rows.T @ rows / len(rows) for rows in jacobians]
    samples = torch.tensor([len(rows) for rows in jacobians], dtype=torch.float64)
    terms = list(zip(samples / samples.sum(), fishers, models, strict=True))
    mean, fisher = sum(p * w for p, _, w in terms), sum(p * f for p, f, _ in terms)
    return mean, fisher, sum(p * f @ w for p, f, w in terms)


def descend(models: Sequence[Tensor], jacobians: Sequence[Tensor], steps: int) -> Tensor:
    """Return the minimum by lemma 1: gradient descent from the mean, with the matrix S."""
    mean, fisher, target = moments(models, jacobians)
    block = Dense(mean, target, fisher)
    path = gradient_descent(block)
    return mean + next(islice(path, steps - 1, None))


def test_the_network_and_its_jacobian_are_those_of_torch() -> None:
    network, x = draw_network(1, width=12, kappa=1.0), draw_clients(1).x[0]
    module = Module(network)
    torch.testing.assert_close(outputs(network, x), module(x)[:, 0], rtol=1e-13, atol=1e-14)

    def at(weights: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weights": weights}, (x,))[:, 0]

    rows = torch.func.jacrev(at)(module.get_parameter("weights").detach()).flatten(1)
    torch.testing.assert_close(jacobian(network, x), rows, rtol=1e-13, atol=1e-14)
    fisher = full_fisher(module, ["weights"], [(x,)], task="other")
    own = jacobian(network, x)
    torch.testing.assert_close(own.T @ own / len(x), fisher, rtol=1e-12, atol=1e-13)


def test_training_is_gradient_descent_of_each_client_alone() -> None:
    clients, start = draw_clients(2), draw_network(2, width=8, kappa=1.0)
    trained = train(start, clients, 3)
    for weights, x, y in zip(trained.weights, clients.x, clients.y, strict=True):
        module = Module(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            ((module(x)[:, 0] - y).square().mean() / 2).backward()
            optimizer.step()
        torch.testing.assert_close(weights, module.weights.data, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("samples", [(4, 4, 4), (2, 3, 7)])
def test_the_form_by_samples_is_gradient_descent_with_the_full_fisher(
    samples: tuple[int, ...],
) -> None:
    # Inputs in random directions: gradient descent then converges within the test.
    x = nn.functional.normalize(random(3, 7, 10), dim=2)
    clients = Clients(x, random(3, 7, client=1))
    local = train(draw_network(3, width=16, kappa=1.0), clients, 20)
    models = list(local.weights.flatten(1))
    jacobians = [own[:n] for own, n in zip(jacobian(local, x), samples, strict=True)]
    assert sum(samples) < models[0].numel()

    expected = descend(models, jacobians, steps=5_000)
    assert (expected - descend(models, jacobians, steps=2_500)).abs().max() < 1e-11, "converged"
    torch.testing.assert_close(fuse(models, jacobians), expected, rtol=0, atol=1e-11)


def test_with_more_samples_than_parameters_it_is_the_one_minimum() -> None:
    jacobians = [random(n, 6, client=i) for i, n in enumerate((9, 14, 5))]
    models = [random(6, client=i) for i in range(3)]
    _, fisher, target = moments(models, jacobians)
    expected = torch.linalg.solve(fisher, target)
    torch.testing.assert_close(fuse(models, jacobians), expected, rtol=1e-12, atol=1e-12)


def test_dependent_rows_and_dead_networks_keep_the_mean_where_nothing_is_known() -> None:
    models, rows = [random(12, client=i) for i in range(2)], random(3, 12, client=5)
    mean = (models[0] + models[1]) / 2
    twice = fuse(models, [torch.cat([rows, rows]), torch.cat([rows, rows])])
    torch.testing.assert_close(twice, fuse(models, [rows, rows]), rtol=0, atol=1e-13)
    torch.testing.assert_close(fuse(models, [rows * 0, rows * 0]), mean, rtol=0, atol=1e-15)


def test_inputs_have_norm_one_and_clients_differ() -> None:
    clients = draw_clients(4)
    assert clients.x.shape == (5, 20, 10) and clients.y.shape == (5, 20)
    torch.testing.assert_close(clients.x.norm(dim=2), torch.ones(5, 20, dtype=torch.float64))
    assert not torch.equal(clients.x[0], clients.x[1])
    for x, y in zip(clients.x, clients.y, strict=True):
        slope = torch.linalg.lstsq(x, y[:, None]).solution
        torch.testing.assert_close(x @ slope, y[:, None], rtol=0, atol=1e-12)


def test_a_row_depends_on_its_own_seed_width_and_steps_alone() -> None:
    whole = synthetic_table([1, 2], widths=[4, 8], steps=[1, 3, 9], kappas=[1.0, 0.3])
    part = synthetic_table([2], widths=[8], steps=[9], kappas=[0.3])
    assert len(whole) == 2 * 2 * 2 * (2 + 3) and len(part) == 4
    keys = ["kappa", "varied", "seed", "width", "steps", "method"]
    both = part.merge(whole, on=keys, suffixes=("", "_whole"))
    assert len(both) == len(part)
    assert both["error"].tolist() == pytest.approx(both["error_whole"].tolist(), rel=1e-9)


def test_the_summary_has_mean_spread_and_range() -> None:
    fields = {"kappa": 1.0, "varied": "width", "seed": [1, 2], "width": 4, "steps": 256}
    table = pd.DataFrame({**fields, "method": "FedAvg", "error": [0.1, 0.3]})
    row = summary(table).iloc[0]
    expected = [2, 0.2, 0.1 * math.sqrt(2), 0.1, 0.3]
    found = row[["seeds", "mean", "std", "least", "largest"]].tolist()
    assert found == pytest.approx(expected)


def test_the_figure_has_a_row_per_kappa_with_both_methods() -> None:
    table = synthetic_table([1, 2], widths=[4, 8], steps=[1, 2], kappas=[1.0, 0.3])
    panels = synthetic_figure(table).axes
    assert [panel.get_xlabel() for panel in panels] == ["", "", "width m", "local steps K"]

    shown = [(1.0, "width"), (1.0, "steps"), (0.3, "width"), (0.3, "steps")]
    for panel, (kappa, varied) in zip(panels, shown, strict=True):
        rows = summary(table[(table["kappa"] == kappa) & (table["varied"] == varied)])
        for line in panel.lines:
            curve = rows[rows["method"] == line.get_label()]
            assert line.get_xdata().tolist() == curve[varied].tolist()
            assert line.get_ydata().tolist() == curve["mean"].tolist()
        assert len(panel.lines) == len(panel.collections) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": []}, "seeds must be at least 1, got 0"),
        ({"seeds": [1], "widths": [0]}, "widths must be at least 1, got 0"),
        ({"seeds": [1], "steps": [4, -1]}, "steps must be at least 0, got -1"),
        ({"seeds": [1], "kappas": [0.0]}, "kappas must be positive, got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        synthetic_table(**arguments)


def test_the_command_writes_the_table_and_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = synthetic_table([1, 2, 3], widths=[4], steps=[1], kappas=[1.0])
    monkeypatch.setattr(
        two_layer, "synthetic_table", lambda seeds: small[small["seed"].isin(seeds)]
    )

    two_layer.main(["--output", str(tmp_path / "new"), "--seeds", "2"])
    written = pd.read_csv(tmp_path / "new" / "synthetic.csv")
    assert written["seeds"].tolist() == [2] * 4
    assert (tmp_path / "new" / "figures" / "synthetic.png").is_file()
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "new" / "synthetic.csv"),
        str(tmp_path / "new" / "figures" / "synthetic.png"),
    ]


def test_the_stored_table_is_that_of_the_code() -> None:
    """Recompute some fast rows."""
    stored = pd.read_csv(STORED)
    assert stored["seeds"].eq(10).all() and FIGURE.is_file()
    again = summary(synthetic_table(range(1, 11), widths=[16], steps=[1], kappas=[0.3]))

    keys = ["kappa", "varied", "width", "steps", "method"]
    both = again.merge(stored, on=keys, suffixes=("", "_stored"))
    assert len(both) == len(again)
    for name in ("mean", "std", "least", "largest"):
        # Four digits are stored. Another machine may round differently.
        assert both[name].tolist() == pytest.approx(both[f"{name}_stored"].tolist(), rel=5e-3)
