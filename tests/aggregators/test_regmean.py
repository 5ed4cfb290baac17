"""RegMean against closed forms, and its client half in a federation."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import RegMean
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.rules.regmean import solve_from
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import Layer, State, StateLayout
from flsuite.models import Classifier
from flsuite.models.backbones import Backbone
from tests.aggregators.federations import (
    ServerHalf,
    fedavg,
    observed,
    random,
    server_of,
    signature,
    update,
)
from tests.conftest import classifier, digits, equal_states

LINEAR = StateLayout(("fc.weight", "fc.bias"), 3, layers=(Layer("fc", "linear", bias=True),))
SIZES = (8, 20, 6)


def gram(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def merge(
    updates: Sequence[ClientUpdate],
    layout: StateLayout = LINEAR,
    tools: ServerTools | None = None,
    **settings: Any,
) -> tuple[State, ServerHalf]:
    made = ServerHalf(RegMean(**settings), layout, tools=tools or ServerTools())
    start = {name: torch.zeros_like(value) for name, value in updates[0].state.items()}
    return made.aggregate(start, iter(updates)), made


def close(a: Tensor, b: Tensor, tolerance: float = 1e-13) -> bool:
    return float((a - b).abs().max()) < tolerance


def regressions(bias: bool) -> tuple[list[ClientUpdate], Tensor]:
    """Return clients that have solved their linear regressions, and the pooled solution."""
    inputs = [random(n, 4, seed=n) for n in SIZES]
    if bias:
        inputs = [torch.cat([x, torch.ones(len(x), 1)], 1) for x in inputs]
    targets = [random(n, 2, seed=50 + n) for n in SIZES]
    updates = []
    for i, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        solution = torch.linalg.lstsq(x, y)[0].T
        state = {"fc.weight": solution[:, :4], "fc.bias": solution[:, -1] if bias else y[0]}
        updates.append(update(i, state, len(x), gram={"fc": gram(x)}))
    return updates, torch.linalg.lstsq(torch.cat(inputs), torch.cat(targets))[0].T


# The server


def test_with_alpha_one_a_linear_model_is_pooled_least_squares() -> None:
    updates, pooled = regressions(bias=False)
    new, made = merge(updates, alpha=1.0)
    assert close(new["fc.weight"], pooled, 1e-14)
    # The bias takes the mean by samples.
    assert close(new["fc.bias"], fedavg(updates)["fc.bias"])
    assert made.metrics["alpha"] == 1.0 and made.metrics["server_seconds"] > 0


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("rows", [2, 30])
def test_equal_grams_give_fedavg(alpha: float, rows: int) -> None:
    """Singular ones too, of fewer rows than inputs."""
    same = gram(random(rows, 4))
    updates = [
        update(
            i,
            {"fc.weight": random(2, 4, seed=i), "fc.bias": random(2, seed=i)},
            n,
            gram={"fc": same},
        )
        for i, n in enumerate(SIZES)
    ]
    new, _ = merge(updates, alpha=alpha)
    assert all(close(new[name], value) for name, value in fedavg(updates).items())


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.9])
def test_the_formula(alpha: float) -> None:
    updates, _ = regressions(bias=False)
    new, _ = merge(updates, alpha=alpha)
    product, total = torch.zeros(2, 4).double(), torch.zeros(4, 4).double()
    for u in updates:
        own = u.extras["gram"]["fc"]
        reduced = alpha * own + (1 - alpha) * own.diagonal().diag()
        product += u.samples * u.state["fc.weight"] @ reduced
        total += u.samples * reduced
    assert close(new["fc.weight"], product @ torch.linalg.inv(total))


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_a_column_that_is_dead_everywhere_takes_the_mean(alpha: float) -> None:
    """A column that is dead on all clients but one takes that client's value with alpha 0."""
    updates, _ = regressions(bias=False)
    for u in updates:
        u.extras["gram"]["fc"][:, 2] = u.extras["gram"]["fc"][2] = 0.0
    new, _ = merge(updates, alpha=alpha)
    assert close(new["fc.weight"][:, 2], fedavg(updates)["fc.weight"][:, 2])
    assert new["fc.weight"].isfinite().all()
    updates[1].extras["gram"]["fc"][2, 2] = 1e-3
    new, _ = merge(updates, alpha=0.0)
    assert close(new["fc.weight"][:, 2], updates[1].state["fc.weight"][:, 2])


def test_rounding_of_float32_grams_is_not_solved_for() -> None:
    """Fewer rows than inputs: in the other directions the models stay at their mean."""
    inputs = [random(3, 40, seed=i).abs() for i in range(2)]
    updates = [
        update(
            i,
            {"fc.weight": random(2, 40, seed=i).float(), "fc.bias": torch.zeros(2)},
            gram={"fc": gram(x).float()},
        )
        for i, x in enumerate(inputs)
    ]
    new, _ = merge(updates, alpha=1.0)
    basis = torch.linalg.svd(torch.cat(inputs))[2][6:]
    away = (new["fc.weight"] - fedavg(updates)["fc.weight"]).double()
    assert float((away @ basis.T).abs().max()) < 1e-3 and float(away.abs().max()) > 0.01


def test_the_closest_solution_to_a_start() -> None:
    x, target, start = random(2, 3), random(4, 3), random(4, 3, seed=1)
    solution = solve_from(start, target @ gram(x), gram(x))
    assert close(solution @ gram(x), target @ gram(x))
    null = torch.linalg.svd(x)[2][2:]
    assert close(solution @ null.T, start @ null.T)


def test_convolutions_take_part_with_their_inputs_unfolded() -> None:
    """A kernel of the size of the image is a linear layer."""
    layout = StateLayout(("c.weight",), 3, layers=(Layer("c", "conv2d", bias=False),))
    linear, pooled = regressions(bias=False)
    updates = [
        replace(
            u,
            state={"c.weight": u.state["fc.weight"].view(2, 1, 2, 2)},
            extras={"gram": {"c": u.extras["gram"]["fc"]}},
        )
        for u in linear
    ]
    new, _ = merge(updates, layout, alpha=1.0, conv=True)
    assert close(new["c.weight"].flatten(1), pooled, 1e-14)
    new, _ = merge(updates, layout, alpha=1.0)
    assert close(new["c.weight"], fedavg(updates)["c.weight"])
    assert RegMean().statistics(layout, new)["gram"].template == {}


def test_sums_are_all_that_the_server_needs() -> None:
    updates, _ = regressions(bias=False)
    expected, made = merge(updates, alpha=0.5)
    new = made.aggregate_sums(updates[0].state, updates)
    assert equal_states(new, expected)
    own = RegMean().statistics(LINEAR, new)["gram"]
    assert own.is_sum and own.is_psd


# Alpha by score


def test_the_alpha_with_the_better_score_is_taken_the_first_of_equals() -> None:
    updates, _ = regressions(bias=False)
    models = [merge(updates, alpha=alpha)[0] for alpha in (0.1, 0.9)]
    for values, chosen in (((0.4, 0.5), 0.9), ((0.5, 0.4), 0.1), ((0.5, 0.5), 0.1)):
        scores = iter(values)
        new, made = merge(updates, tools=ServerTools(score=lambda state, s=scores: next(s)))
        assert made.metrics["alpha"] == chosen and made.metrics["selected_score"] == 0.5
        assert equal_states(new, models[(0.1, 0.9).index(chosen)])


def test_without_a_score_alpha_must_be_set() -> None:
    tools = ServerTools(missing={"score": "the server has no samples"})
    expected = r"RegMean picks alpha .*set alpha"
    with pytest.raises(FlsuiteError, match=expected):
        RegMean().prepare(server_of({}, LINEAR, tools=tools))


# A federation


def fit(aggregator: RegMean, **settings: Any) -> tuple[FederatedTrainer, list[ClientUpdate]]:
    data = digits(server_samples=100)
    return observed(aggregator, data=data, **{"model": classifier(), **settings})


@pytest.mark.parametrize("bias", [False, True])
def test_a_federation_picks_alpha_on_the_servers_samples(bias: bool) -> None:
    made, updates = fit(RegMean(bias=bias, samples=50))
    assert made.federation.log.server["alpha"] in (0.1, 0.9)
    expected = made.federation.uplink.statistics
    assert all(signature(u.extras) == signature(expected) for u in updates)
    assert [len(g) for g in updates[0].extras["gram"].values()] == [64 + bias, 16 + bias]
    if not bias:
        mean = fedavg(updates)
        for name, value in made.federation.state.items():
            assert torch.allclose(value, mean[name]) == name.endswith("bias")


class Repeated(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](self[0](x).relu())


class Twice(Backbone):
    """A network that calls one of its layers twice."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        first, repeated = nn.Linear(64, 8), Repeated(nn.Linear(8, 8))
        return nn.Sequential(nn.Flatten(), first, nn.LayerNorm(8), repeated, nn.Linear(8, outputs))


def test_layers_that_take_the_mean_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flsuite"):
        made, updates = fit(RegMean(alpha=0.9), model=Classifier(Twice()))
    messages = [r.message for r in caplog.records if r.message.startswith("RegMean takes the mean")]
    assert messages == [
        "RegMean takes the mean of network.2",
        "RegMean takes the mean of network.3.0: called twice, or all inputs are 0",
    ]
    mean, new = fedavg(updates), made.federation.state
    means = [name for name in new if torch.allclose(new[name], mean[name], atol=1e-6)]
    assert set(new) - set(means) == {"network.1.weight", "network.4.weight"}
