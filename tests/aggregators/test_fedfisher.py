"""FedFisher against closed forms, and its client half in a federation."""

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import FedFisher, FisherMerge
from flsuite.aggregators.part import ServerTools
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import Layer, State, StateLayout
from flsuite.data import DataSpec, FederatedDataModule
from flsuite.data.federated import DataSplit, PublishedSplits
from flsuite.data.partitions import Natural
from flsuite.models import MLP, Classifier
from flsuite.models.backbones import Backbone
from tests.aggregators.federations import (
    ServerHalf,
    fedavg,
    observed,
    random,
    server_of,
    signature,
    table_model,
    update,
)
from tests.conftest import classifier, digits, equal_states

FLAT = StateLayout(("w", "v"), 2)
NET = StateLayout(
    ("0.weight", "0.bias", "1.weight"),
    3,
    layers=(Layer("0", "conv2d", bias=True), Layer("1", "linear", bias=False)),
)
KINDS = ("diag", "kfac", "full")


def moments(size: int, seed: int, rank: int = 50) -> Tensor:
    rows = random(rank, size, seed=seed)
    return rows.T @ rows / rank


def net_state(seed: int, dtype: torch.dtype = torch.float64) -> State:
    return {
        "0.weight": random(2, 1, 2, 2, seed=seed).to(dtype),
        "0.bias": random(2, seed=seed + 1).to(dtype),
        "1.weight": random(3, 2, seed=seed + 2).to(dtype),
        "mean": random(2, seed=seed + 3).to(dtype),
        "count": torch.tensor(seed),
    }


def fisher_of(kind: str, seed: int) -> Any:
    """Return a Fisher of the small network, in float64."""
    if kind == "diag":
        return {name: net_state(seed)[name].square() for name in NET.parameters}
    if kind == "full":
        return moments(16, seed)
    return {
        "0": {"a": moments(5, seed), "g": moments(2, seed + 1)},
        "1": {"a": moments(2, seed + 2), "g": moments(3, seed + 3)},
    }


def three(kind: str, samples: Sequence[int] = (2, 3, 5), step: int = 1) -> list[ClientUpdate]:
    """Return updates of the small network. With step 0, their Fishers are equal."""
    return [
        update(i, net_state(10 * i), n, fisher=fisher_of(kind, 3 + step * i))
        for i, n in enumerate(samples)
    ]


def merge(
    layout: StateLayout,
    updates: Sequence[ClientUpdate],
    *args: Any,
    tools: ServerTools | None = None,
    **settings: Any,
) -> tuple[State, ServerHalf]:
    rule = FedFisher(*args, **{"select": tools is not None, **settings})
    made = ServerHalf(rule, layout, tools=tools or ServerTools())
    start = {name: torch.zeros_like(value) for name, value in updates[0].state.items()}
    return made.aggregate(start, iter(updates)), made


# The server


@pytest.mark.parametrize("solver", ["exact", "cg"])
def test_linear_regression_with_the_full_fisher_is_pooled_least_squares(solver: Any) -> None:
    layout, sizes = StateLayout(("w",), 3), (8, 20, 5)
    inputs = [random(n, 4, seed=n) for n in sizes]
    targets = [random(n, seed=50 + n) for n in sizes]
    updates = [
        update(i, {"w": torch.linalg.lstsq(x, y)[0]}, len(x), fisher=x.T @ x / len(x))
        for i, (x, y) in enumerate(zip(inputs, targets, strict=True))
    ]
    new, _ = merge(layout, updates, "full", solver)
    pooled = torch.linalg.lstsq(torch.cat(inputs), torch.cat(targets)[:, None])[0][:, 0]
    torch.testing.assert_close(new["w"], pooled, rtol=0, atol=1e-14)


def test_the_rounding_of_a_sent_fisher_is_not_inverted() -> None:
    """Three Fishers of rank 3 leave directions of 16 unknown, where float32 sends its rounding."""
    fishers = [moments(16, seed, rank=3) for seed in (1, 2, 3)]
    exact, sent = (
        merge(
            NET,
            [update(i, net_state(4 + i), fisher=f.to(dtype)) for i, f in enumerate(fishers)],
            "full",
            "exact",
        )[0]
        for dtype in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(sent, exact, rtol=0, atol=1e-4)


def test_the_diagonal_to_the_end_is_the_fisher_weighted_mean() -> None:
    """It is FisherMerge with the floor 0, and wbar where no client has any Fisher."""
    updates = [
        update(
            i,
            {"w": random(4, seed=i), "v": random(1, seed=9 + i)},
            samples,
            fisher={"w": torch.tensor([1.0, 0.0, 1e-12, 2.0 * i]).double(), "v": torch.zeros(1)},
        )
        for i, samples in enumerate((1, 3))
    ]
    new, made = merge(FLAT, updates, "diag", "exact")
    n, w = torch.tensor([1.0, 3.0]).double(), [u.state["w"] for u in updates]
    fishers = [u.extras["fisher"]["w"] for u in updates]
    quotient = sum(n[i] * fishers[i] * w[i] for i in range(2)) / sum(
        n[i] * fishers[i] for i in range(2)
    )
    expected = torch.where(torch.arange(4) == 1, (w[0] + 3 * w[1]) / 4, quotient)
    torch.testing.assert_close(new["w"], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(new["v"], fedavg(updates)["v"])
    assert made.metrics["fisher_zero"] == 2 / 5
    assert made.metrics["residual"] < 1e-12 and made.metrics["selected_step"] == 1.0


def test_kfac_reaches_the_pseudoinverse_of_the_whole_layer() -> None:
    """With the bias as the last column and the kernel unfolded."""
    updates = three("kfac")
    new, _ = merge(NET, updates, "kfac", "exact")

    matrix, target = torch.zeros(10, 10).double(), torch.zeros(10).double()
    for u in updates:
        pair = u.extras["fisher"]["0"]
        fisher = u.samples / 10 * torch.kron(pair["g"], pair["a"])
        weight = torch.cat([u.state["0.weight"].flatten(1), u.state["0.bias"][:, None]], 1)
        matrix, target = matrix + fisher, target + fisher @ weight.flatten()
    solution = (torch.linalg.pinv(matrix, hermitian=True) @ target).view(2, 5)
    torch.testing.assert_close(new["0.weight"].flatten(1), solution[:, :-1], rtol=0, atol=1e-10)
    torch.testing.assert_close(new["0.bias"], solution[:, -1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("solver", ["cg", "gd", "adam", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_fishers_give_fedavg(kind: Any, solver: Any) -> None:
    updates = three(kind, step=0)
    new, made = merge(NET, updates, kind, solver, steps=100)
    torch.testing.assert_close(new, fedavg(updates), rtol=0, atol=1e-12)
    assert new["count"].item() == 20 and made.metrics["fisher_zero"] == 0


@pytest.mark.parametrize("solver", ["cg", "gd", "adam", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_clients_return_the_same_model(kind: Any, solver: Any) -> None:
    """Fishers of low rank and of tiny entries must not amplify the rounding of their sums."""
    state = net_state(1, torch.float32)
    updates = []
    for i, samples in enumerate((1, 4, 9)):
        fisher = fisher_of(kind, 3 + i)
        if kind == "kfac":
            fisher["0"] = {"a": moments(5, i, rank=1).float(), "g": 1e-9 * moments(2, i).float()}
        updates.append(update(i, state, samples, fisher=fisher))
    new, _ = merge(NET, updates, kind, solver, steps=200)
    torch.testing.assert_close(new, state, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_all_that_the_server_needs(kind: Any) -> None:
    """Only the samples and the K-FAC factors are sent in the clear."""
    updates = three(kind)
    expected, made = merge(NET, updates, kind)
    sent = set(FedFisher(kind).terms(updates[0], NET))
    assert sent == {"samples", "model", "product"} | (set() if kind == "kfac" else {"fisher"})
    own = FedFisher(kind).statistics(NET, updates[0].state)["fisher"]
    assert own.is_sum == (kind != "kfac") and own.is_psd == (kind != "diag")

    single = ["fisher"] if kind == "kfac" else []
    new = made.aggregate_sums(net_state(1), updates, single)
    assert equal_states(new, expected)


# The choice


def test_the_better_of_both_ways_is_taken() -> None:
    updates = three("kfac", (2, 2, 2))
    states: list[State] = []

    def score(state: State) -> float:
        states.append(state)
        return marks.get(len(states), 0.5)

    # In the last case both ways are best after the same number of steps.
    for marks, solver in (({3: 1.0}, "cg"), ({8: 1.0}, "gd"), ({8: 1.0, 3: 0.7}, "gd")):
        states.clear()
        # The mean, 1, 2, 5 and 7 steps of either.
        new, made = merge(NET, updates, "kfac", "cg+gd", steps=7, tools=ServerTools(score=score))
        assert len(states) == 10 and equal_states(new, states[max(marks) - 1])
        alone, _ = merge(NET, updates, "kfac", solver, steps=2)
        assert equal_states(new, alone)
        assert made.metrics["selected_solver"] == (solver == "gd")
        assert made.metrics["selected_step"] == 2


def test_without_a_score_the_last_model_is_taken_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    updates = three("kfac", (2, 2, 2))
    tools = ServerTools(missing={"score": "the server has no samples"})
    with caplog.at_level(logging.INFO, "flsuite"):
        new, made = merge(NET, updates, "kfac", "gd", steps=7, tools=tools)
    assert [r.message for r in caplog.records] == [
        "FedFisher takes the last model of gd: the server has no samples"
    ]
    assert made.metrics["selected_step"] == 7 and "selected_score" not in made.metrics
    caplog.clear()
    other, _ = merge(NET, updates, "kfac", "gd", steps=7)
    assert equal_states(new, other) and not caplog.records


# Refusals


def test_kfac_names_the_layer_that_it_does_not_cover() -> None:
    layout = StateLayout(
        ("0.weight", "network.1.weight"), 2, outside_layers={"network.1": "BatchNorm2d"}
    )
    with pytest.raises(FlsuiteError, match=r"network.1 \(BatchNorm2d\) .* use diag"):
        FedFisher().prepare(server_of({}, layout))
    FedFisher("diag").prepare(server_of({}, layout))
    with pytest.raises(FlsuiteError, match="w is of neither"):
        FedFisher().prepare(server_of({}, FLAT))


def test_the_full_fisher_of_a_large_model_is_refused() -> None:
    made = FedFisher("full")
    with pytest.raises(FlsuiteError, match="at most 20,000 parameters are allowed"):
        made.statistics(FLAT, {"w": torch.zeros(20_000), "v": torch.zeros(1)})
    assert made.statistics(FLAT, {"w": torch.zeros(19_999), "v": torch.zeros(1)})


# A federation


def fit(aggregator: Any, **settings: Any) -> tuple[FederatedTrainer, list[ClientUpdate]]:
    defaults = {"model": classifier(), "data": digits(server_samples=100)}
    return observed(aggregator, **{**defaults, **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_a_federation_does_not_get_worse_by_the_servers_samples(kind: Any) -> None:
    made, updates = fit(
        FedFisher(kind, samples=50), model=Classifier(MLP(hidden=(6,))), max_epochs=2
    )
    metrics, score = made.federation.log.server, made.federation.server.tools.score
    assert score is not None and metrics["selected_score"] >= score(fedavg(updates))
    expected = made.federation.uplink.statistics
    assert all(signature(u.extras) == signature(expected) for u in updates)
    assert all(u.metrics["after_fit_seconds"] > 0 for u in updates)


class GivenTable(FederatedDataModule):
    """Clients of three, one and forty samples, with a class or a label that no client has."""

    def __init__(self, multilabel: bool = False) -> None:
        super().__init__(clients=3, partition=Natural(), batch_size=16, val_fraction=0.0)
        self.multilabel = multilabel

    def load(self) -> PublishedSplits:
        owners = torch.tensor([0] * 3 + [1] + [2] * 40)
        x = random(44, 5).float()
        y = torch.arange(44) % 3
        if self.multilabel:
            y = nn.functional.one_hot(y, 4).to(torch.int64)
        spec = DataSpec((5,), 4, task="multilabel" if self.multilabel else "multiclass")
        return PublishedSplits(spec, DataSplit(x, y, owners), DataSplit(x, y))


class Saturated(Classifier):
    """A classifier whose logits are 300 times as large after its fit."""

    def logits(self, x: Tensor) -> Tensor:
        return 300 * super().logits(x)


@pytest.mark.parametrize(
    ("kind_of_model", "kind", "multilabel"),
    [
        (Classifier, "diag", True),
        (Classifier, "full", False),
        (Saturated, "diag", False),
        (Saturated, "kfac", False),
        (Saturated, "kfac", True),
        (Saturated, "full", True),
    ],
)
def test_uneven_clients_with_an_empty_class_and_saturated_logits(
    kind_of_model: type[Classifier], kind: Any, multilabel: bool
) -> None:
    made, updates = fit(
        FedFisher(kind), model=kind_of_model(MLP(hidden=(4,))), data=GivenTable(multilabel)
    )
    assert [u.samples for u in updates] == [3, 1, 40]
    assert made.round == 1 and not made.federation.log.failures
    assert all(value.isfinite().all() for value in made.federation.state.values())
    # At the mean it is 1: a solver that diverges, or fits rounding errors, is above.
    assert made.federation.log.server["residual"] < 1


class PlainLabels(LightningModule):
    """A plain LightningModule with a sigmoid per label, whose ``spec`` is its own affair."""

    spec = DataSpec((7,), 2, "multiclass")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def logits(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.layer(x), y.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("rule", [FedFisher("kfac"), FedFisher("diag"), FisherMerge()])
def test_the_task_of_a_fisher_is_that_of_the_data(rule: Any) -> None:
    """A Fisher per label, on any LightningModule with logits."""
    made, updates = fit(rule, model=PlainLabels(), data=GivenTable(multilabel=True))
    own = made.federation.data
    for one in updates:
        model = PlainLabels()
        model.load_state_dict(one.state)
        x, _ = next(own.batches_of(own.train, [own.train_rows(one.client)]))
        p = model.logits(x).sigmoid().detach()
        fisher = one.extras["fisher"]
        if "layer" in fisher:
            torch.testing.assert_close(fisher["layer"]["g"], (p * (1 - p)).mean(0).diag())
        else:
            torch.testing.assert_close(fisher["layer.bias"], (p * (1 - p)).mean(0))


def test_a_client_of_no_weight_does_no_harm() -> None:
    updates = three("kfac", (2, 2))
    other = {**net_state(7), "count": torch.tensor(0)}
    empty = update(2, other, 0, fisher=fisher_of("kfac", 9))
    without, _ = merge(NET, updates, "kfac")
    new, _ = merge(NET, [*updates, empty], "kfac")
    torch.testing.assert_close(new, without, rtol=0, atol=1e-12)


def test_no_more_than_one_model_is_held() -> None:
    held: list[int] = []

    def stream() -> Iterator[ClientUpdate]:
        before: list[Any] = []
        for i in range(3):
            state = net_state(10 * i)
            gone = [reference() is None for reference in before]
            held.append(len(gone) - sum(gone))
            before = [*before, weakref.ref(state["0.weight"])]
            yield update(i, state, fisher=fisher_of("kfac", i))
            del state

    ServerHalf(FedFisher(select=False), NET).aggregate(net_state(1), stream())
    assert max(held) <= 1


def test_the_best_of_the_scored_models_is_taken_and_logged() -> None:
    updates = three("kfac", (2, 2, 2))
    scored: list[State] = []

    def score(state: State) -> float:
        scored.append(state)
        return (0.5, 0.6, 0.6, 0.7, 0.7, 0.1, 0.2)[len(scored) - 1]

    new, made = merge(NET, updates, "kfac", "gd", steps=30, tools=ServerTools(score=score))
    # The mean, 1, 2, 5, 10, 20 and 30 steps, each a whole model.
    assert len(scored) == 7 and all(s.keys() == new.keys() for s in scored)
    assert equal_states(scored[0], fedavg(updates)) and equal_states(new, scored[3])
    assert made.metrics["selected_step"] == 5 and made.metrics["selected_score"] == 0.7
    assert 0 < made.metrics["residual"] < 1 and made.metrics["server_seconds"] > 0


def test_batch_norm_is_refused_by_kfac_and_covered_by_the_diagonal() -> None:
    with pytest.raises(FlsuiteError, match=r"network.1 \(BatchNorm1d\) is neither"):
        fit(FedFisher(), model=table_model(), data=GivenTable())
    made, updates = fit(FedFisher("diag"), model=table_model(), data=GivenTable())
    names = ("network.1.running_mean", "network.1.num_batches_tracked")
    mean = fedavg(updates)
    assert all(torch.equal(made.federation.state[name], mean[name]) for name in names)


class Twice(nn.Sequential):
    """A network that calls a layer twice, and counts its batches of training."""

    batches = 0

    def forward(self, x: Tensor) -> Tensor:
        Twice.batches += self.training
        first, layer, last = self
        return last(layer(layer(first(x).relu()).relu()))


class WithTwice(Backbone):
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Twice(nn.Linear(shape[0], 4), nn.Linear(4, 4), nn.Linear(4, outputs))


def test_a_layer_that_is_called_twice_is_refused_by_kfac_before_the_first_step() -> None:
    message = r"layer 'network.1' is not covered: it is called 2 times in a forward pass; .*"
    with pytest.raises(FlsuiteError, match=message + "use the diagonal Fisher"):
        fit(FedFisher(), model=Classifier(WithTwice()), data=GivenTable())
    assert Twice.batches == 0
    fit(FedFisher("diag"), model=Classifier(WithTwice()), data=GivenTable())
    assert Twice.batches > 0
