"""FisherAveraging against cases worked by hand, and its client half in a federation."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import Aggregator, FedAvg, FedFisher, FisherAveraging, FisherMerge, RegMean
from flsuite.aggregators.part import ServerTools
from flsuite.common.messages import ClientContext, ClientUpdate
from flsuite.common.state import State, StateLayout, clone, nbytes
from flsuite.data import DataSpec, FederatedDataModule
from flsuite.data.loader import TrainLoader
from flsuite.federation import Processes, Vectorized
from flsuite.metrics.fisher import predictive_diagonal
from flsuite.models import NFClassifier
from flsuite.models.backbones import MLP
from flsuite.models.base import ClientModel
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    ServerHalf,
    Updates,
    assert_same_models,
    federation,
    observed,
    run,
    server_of,
    signature,
    table_data,
    table_model,
)
from tests.conftest import classifier, digits, equal_states, trainer
from tests.metrics.test_empirical import looped
from tests.plain import plain_trainer

LAYOUT = StateLayout(("w", "flow.a"), 2, {"flow": ("flow.a",)})


def update(
    client: int, w: float, a: list[float], fisher: list[float], samples: int = 1
) -> ClientUpdate:
    state = {"w": torch.tensor([w]), "flow.a": torch.tensor(a), "steps": torch.tensor(client)}
    extras = {"fisher": {"flow.a": torch.tensor(fisher)}}
    return ClientUpdate(client, 1, samples, 1, torch.tensor([samples]), state, extras)


def merge(*updates: ClientUpdate, **settings: Any) -> tuple[State, ServerHalf]:
    made = ServerHalf(FisherAveraging(**settings), LAYOUT)
    start = {"w": torch.zeros(1), "flow.a": torch.tensor([0.5, 0.5, 0.5]), "steps": torch.tensor(0)}
    return made.aggregate(start, iter(updates)), made


def test_squared_gradients_of_the_training_are_those_of_its_steps() -> None:
    """Steps of rate 0.1 on ``a / 2 (w - m)^2`` from 0: the gradient shrinks by ``1 - 0.1 a``."""
    a, m, steps = 3.0, 2.0, 4
    sent = Updates()
    made = federation(
        FisherAveraging(groups=None, estimator="training"), 1, max_epochs=steps, callbacks=[sent]
    )
    made.fit(Quadratic(lambda p: torch.optim.SGD(p, lr=0.1)), Quadratics((a,), (m,)))
    gradients = [-a * m * (1 - 0.1 * a) ** step for step in range(steps)]
    expected = sum(g**2 for g in gradients) / steps
    assert float(sent.all[0].extras["fisher"]["w"]) == pytest.approx(expected, rel=1e-5)


# The server


def test_two_clients_and_three_parameters_by_hand() -> None:
    """Fishers 1 and 3, equal ones, 0 and 2; the other entries take the mean by samples, 1 to 3."""
    new, made = merge(
        update(0, 4.0, [1.0, 2.0, 10.0], [1.0, 0.5, 0.0], samples=1),
        update(1, 8.0, [5.0, 4.0, 7.0], [3.0, 0.5, 2.0], samples=3),
    )
    assert new["flow.a"].tolist() == [4.0, 3.0, 7.0] and new["flow.a"].dtype == torch.float32
    assert new["w"].tolist() == [7.0] and new["steps"].item() == 1
    assert made.metrics["fisher_mass/flow"] == pytest.approx((1.5 + 5.5) / 2)
    assert made.metrics["fisher_covered/flow"] == 1.0


def test_by_samples_it_is_the_laplace_posterior_of_all_of_them() -> None:
    """Weights 1 * 1 and 3 * 3 for the first, 1 and 3 for the second."""
    new, _ = merge(
        update(0, 0.0, [1.0, 2.0, 0.0], [1.0, 0.5, 1.0], 1),
        update(1, 0.0, [5.0, 4.0, 0.0], [3.0, 0.5, 1.0], 3),
        by_samples=True,
    )
    torch.testing.assert_close(new["flow.a"], torch.tensor([4.6, 3.5, 0.0]))


def test_without_fisher_a_parameter_is_fedavgs() -> None:
    """The mean is by samples, and a Fisher up to the damping is ignored."""
    updates = (
        update(0, 0.0, [1.0, 2.0, 3.0], [0.0, 1e-9, 1.0], 1),
        update(1, 0.0, [5.0, 4.0, 5.0], [0.0, 0.0, 1.0], 3),
    )
    new, made = merge(*updates)
    torch.testing.assert_close(new["flow.a"], torch.tensor([4.0, 2.0, 4.0]))
    damped, _ = merge(*updates, damping=1e-6)
    torch.testing.assert_close(damped["flow.a"], torch.tensor([4.0, 3.5, 4.0]))
    assert made.metrics["fisher_covered/flow"] == pytest.approx(2 / 3)
    uniform, _ = merge(*updates, weighting="uniform")
    torch.testing.assert_close(uniform["flow.a"], torch.tensor([3.0, 2.0, 4.0]))


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_equal_fishers_give_the_plain_mean_and_one_fisher_wins(scale: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 3)
    fisher = (torch.rand(3) + 0.1) * scale
    equal, _ = merge(
        *(update(i, 0.0, values[i].tolist(), fisher.tolist(), i + 1) for i in range(3))
    )
    torch.testing.assert_close(equal["flow.a"], values.mean(0))
    alone = [[0.0] * 3, fisher.tolist(), [0.0] * 3]
    won, _ = merge(*(update(i, 0.0, values[i].tolist(), alone[i], i + 1) for i in range(3)))
    assert torch.equal(won["flow.a"], values[1])


@pytest.mark.parametrize("rule", [FisherAveraging(), FisherMerge(groups=["flow"])])
def test_sums_are_all_that_the_server_needs(rule: Any) -> None:
    updates = [update(i, 1.0 + i, [1.0, 2.0 * i, 3.0], [1.0, i, 0.0], i + 1) for i in range(3)]
    made = ServerHalf(rule, LAYOUT)
    expected = made.aggregate(updates[0].state, updates)
    new = made.aggregate_sums(updates[0].state, updates)
    assert equal_states(new, expected)


# A federation


def small_data() -> FederatedDataModule:
    return table_data(4, 60)


def model() -> NFClassifier:
    return NFClassifier(
        feature_dim=6,
        couplings=2,
        flow_width=8,
        backbone=MLP(hidden=(8,), dropout=0.2),
        k_last=0,
        k_flow_last=0,
    )


def fit(aggregator: Any, **settings: Any) -> tuple[FederatedTrainer, list[ClientUpdate]]:
    return observed(aggregator, data=small_data(), **{"model": model(), **settings})


@cache
def in_bf16(kind: type[Any]) -> tuple[FederatedTrainer, list[ClientUpdate]]:
    """Return a round of FedAvg or FisherAveraging, fitted once."""
    return fit(kind(), precision="bf16-mixed")


def test_the_pass_changes_nothing_but_adds_its_bytes() -> None:
    """The clients' weights, buffers and metrics equal FedAvg's, bit for bit."""
    _, plain = in_bf16(FedAvg)
    made, found = in_bf16(FisherAveraging)
    assert all(module.training for module in made.lightning_module.modules())
    _, batch = fit(FisherAveraging(estimator="batch", batches=1), precision="bf16-mixed")
    for a, b in zip([*plain, *plain], [*found, *batch], strict=True):
        assert equal_states(a.state, b.state) and a.metrics["loss"] == b.metrics["loss"]
        fisher = b.extras["fisher"]
        assert fisher.keys() == {
            name for name in b.state if name.startswith("flow.") and "conditioner" in name
        }
        assert b.bytes_up == a.bytes_up + nbytes(fisher) and b.bytes_down == a.bytes_down
        mass = sum(float(f.sum()) for f in fisher.values())
        assert b.metrics["fisher_mass"] == pytest.approx(mass, rel=1e-5) and mass > 0


def test_the_fisher_sent_is_the_one_of_the_clients_own_samples() -> None:
    """The Fisher is at the update's weights, in float32 although the fit was not."""
    made, found = in_bf16(FisherAveraging)
    own = made.federation.data  # type: ignore[union-attr]
    template = made.federation.uplink.statistics  # type: ignore[union-attr]
    for update in found:
        assert signature(update.extras) == signature(template)
        built = model()
        built.ensure_built(own.spec)
        built.load_state_dict(update.state, strict=False)
        rows = own.train_rows(update.client)
        names = list(update.extras["fisher"])
        for name, expected in looped(
            built.eval(), names, (own.train.x[rows], own.train.y[rows])
        ).items():
            torch.testing.assert_close(
                update.extras["fisher"][name], expected, rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": 5, "max_steps": 3}])
def test_kept_models_have_the_fishers_of_their_fits(limit: dict[str, Any], tmp_path: Path) -> None:
    """The pass takes the first batches of the epoch that follows the fit's."""
    kept = str(tmp_path / "kept")
    fit(FedAvg(), model=Likely(), keep_updates=True, run_dir=kept, **limit)
    rule = FisherAveraging(batches=1)
    (made, whole), (again, found) = (
        fit(rule, model=Likely(), from_updates=source, **limit) for source in (None, kept)
    )
    assert_same_models(made, again)
    for one, other in zip(whole, found, strict=True):
        assert equal_states(one.extras["fisher"], other.extras["fisher"])
    with pytest.raises(FlsuiteError, match="FisherAveraging changes how clients train"):
        fit(FisherAveraging(estimator="training"), model=Likely(), from_updates=kept, **limit)


class Unlikely(ClientModel):
    """A model that declares a group but has no likelihood."""

    parameter_groups = {"flow": ("linear.",), "empty": ("nothing.",)}

    def build(self, spec: DataSpec) -> None:
        self.linear = nn.Linear(spec.shape[0], spec.num_classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.linear(batch[0]), batch[1])

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        logits = self.linear(batch[0])
        return {
            "loss": F.cross_entropy(logits, batch[1], reduction="none"),
            "scores": logits.softmax(1),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Likely(Unlikely):
    """A model with a classifier's conditional likelihood."""

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return -F.cross_entropy(self.linear(batch[0]), batch[1], reduction="none")


class Blind(Likely):
    """A model that changes its batches when they are on its device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return torch.zeros_like(batch[0]), batch[1]


def test_the_pass_sees_what_training_steps_receive() -> None:
    _, found = fit(FisherAveraging(), model=Blind())
    for fisher in (update.extras["fisher"] for update in found):
        assert not fisher["linear.weight"].any() and fisher["linear.bias"].all()


@pytest.mark.parametrize("estimator", ["training", "exact"])
def test_fishers_of_a_stack_are_those_of_single_fits(estimator: Any) -> None:
    rule = FisherAveraging(estimator=estimator, batches=1)
    limit = {"max_epochs": 5, "max_steps": 3}
    engines = None, Vectorized()
    alone, stacked = (fit(rule, model=Likely(), engine=e, **limit)[1] for e in engines)
    for one, other in zip(alone, stacked, strict=True):
        for name, own in one.extras["fisher"].items():
            torch.testing.assert_close(other.extras["fisher"][name], own, rtol=1e-5, atol=0.0)


def test_models_that_do_not_fit_are_told_what_to_add() -> None:
    with pytest.raises(FlsuiteError, match=r"no parameters in the group 'flows'"):
        trainer(aggregator=FisherAveraging(groups=["flows"]), rounds=1).fit(Likely(), small_data())
    with pytest.raises(FlsuiteError, match=r"'empty' \(it has flow\)"):
        trainer(aggregator=FisherAveraging(groups=["empty"]), rounds=1).fit(Likely(), small_data())
    with pytest.raises(FlsuiteError, match=r"Unlikely has none: add a method"):
        trainer(aggregator=FisherAveraging(), rounds=1).fit(Unlikely(), small_data())


@pytest.mark.parametrize("make", [FisherMerge, partial(FisherAveraging, None, "training")])
def test_clients_that_share_no_parameters_are_refused_before_training(make: Any) -> None:
    made = trainer(rounds=1, aggregator=make())
    with pytest.raises(FlsuiteError, match=r"^Fisher\w+ needs shared parameters"):
        made.fit(classifier(private=["network"]), digits())
    assert made.round == 0


# FisherMerge: all parameters, and the Fisher of the model's own prediction


def whole(client: int, w: float, fisher: float, samples: int = 1) -> ClientUpdate:
    state = {"w": torch.tensor([w]), "mean": torch.tensor([w]), "steps": torch.tensor(client)}
    extras = {"fisher": {"w": torch.tensor([fisher])}}
    return ClientUpdate(client, 1, samples, 1, torch.tensor([samples]), state, extras)


def merged(*updates: ClientUpdate, **settings: Any) -> tuple[State, ServerHalf]:
    made = ServerHalf(FisherMerge(**settings), StateLayout(("w",), len(updates)))
    start = {"w": torch.zeros(1), "mean": torch.zeros(1), "steps": torch.tensor(0)}
    return made.aggregate(start, iter(updates)), made


def test_merging_weights_fishers_by_samples_and_buffers_as_fedavg() -> None:
    """Weights 1 * 2 and 3 * 4, and 1 and 3."""
    new, made = merged(whole(0, 1.0, 2.0, 1), whole(1, 8.0, 4.0, 3))
    assert new["w"].item() == pytest.approx((2 + 12 * 8) / 14)
    assert new["mean"].item() == pytest.approx((1 + 3 * 8) / 4) and new["steps"].item() == 1
    assert made.metrics["fisher_covered/all"] == 1.0


def test_targets_that_are_no_classes_are_refused() -> None:
    """Of one output, a softmax's Fisher is zero, and the aggregate would silently be FedAvg's."""
    for rule in (FisherMerge(), FedFisher("diag")):
        server = server_of({"w": torch.zeros(1)}, tools=ServerTools(task="other"))
        with pytest.raises(FlsuiteError, match="needs classes or labels, but the data has other"):
            Aggregator(rule).prepare(server)


def test_on_the_floor_it_is_fedavg() -> None:
    """The floor is one on sum p_i F_i, here (1 * 2 + 3 * 4) / 4 = 3.5."""
    updates = whole(0, 1.0, 2.0, 1), whole(1, 8.0, 4.0, 3)
    for floor, covered in ((3.4, 1.0), (3.6, 0.0), (1e300, 0.0)):
        new, made = merged(*updates, floor=floor)
        assert made.metrics["fisher_covered/all"] == covered
        assert (new["w"].item() == new["mean"].item()) == (not covered)


def merge_fit(aggregator: Any, **settings: Any) -> tuple[FederatedTrainer, list[ClientUpdate]]:
    return fit(aggregator, model=table_model(), **settings)


def test_merging_measures_the_trained_model_on_the_clients_own_samples() -> None:
    """Norm layers too, in float32 although the fit was not, and the fits are FedAvg's."""
    _, plain = merge_fit(FedAvg(), precision="bf16-mixed")
    made, found = merge_fit(FisherMerge(samples=None), precision="bf16-mixed")
    own = made.federation.data  # type: ignore[union-attr]
    for before, update in zip(plain, found, strict=True):
        assert equal_states(before.state, update.state)
        built = table_model()
        built.ensure_built(own.spec)
        built.load_state_dict(update.state)
        names = [name for name, _ in built.named_parameters()]
        (batch,) = own.batches_of(own.train, [own.train_rows(update.client)])
        expected = predictive_diagonal(built.eval(), names, [batch], own.spec.task)
        assert update.extras["fisher"].keys() == set(names)
        assert update.metrics["fisher_mass"] > 0
        for name in names:
            torch.testing.assert_close(
                update.extras["fisher"][name], expected[name], rtol=1e-4, atol=1e-8
            )


def test_merging_is_the_same_in_workers_and_after_a_resume(tmp_path: Path) -> None:
    rule = FisherMerge(samples=20, expectation="sampled")
    whole, folder = run(rule, 2, small_data()), str(tmp_path / "run")
    run(rule, 1, small_data(), engine=Processes(workers=2), run_dir=folder)
    resumed = federation(rule, 2, run_dir=folder)
    resumed.fit(table_model(), small_data(), ckpt_path="last")
    assert_same_models(whole, resumed)


def test_merging_says_what_it_needs() -> None:
    for rule in (FisherMerge(), FedFisher(), RegMean(alpha=0.1)):
        with pytest.raises(FlsuiteError, match=r"\w+ needs the logits.*Unlikely"):
            trainer(aggregator=rule, rounds=1).fit(Unlikely(), small_data())


def everything(model: pl.LightningModule) -> tuple[Any, ...]:
    """Return everything that the pass could change."""
    modes = [module.training for module in model.modules()]
    grads = [p.grad is None or p.grad.clone() for p in model.parameters()]
    return clone(model.state_dict()), modes, torch.get_rng_state(), grads


def test_the_pass_leaves_modes_generators_and_gradients_as_they_were() -> None:
    built = model()
    module = small_data()
    module.use_seed(0)
    module.setup()
    built.ensure_built(module.spec)
    names = tuple(n for n, _ in built.named_parameters() if n.startswith("flow."))
    layout = StateLayout((), 1, {"flow": names})
    client = ClientContext(0, 1, 1, torch.ones(1), {}, {}, {}, layout=layout)
    loader = TrainLoader(module.federated, 0, 0, 1)
    plain_trainer(precision="bf16-mixed").fit(built, loader)
    state, modes, generator, grads = everything(built)
    FisherAveraging().half.measure(client, built, loader)
    state2, modes2, generator2, grads2 = everything(built)
    assert equal_states(state, state2) and modes == modes2 and torch.equal(generator, generator2)
    assert all(a is b or torch.equal(a, b) for a, b in zip(grads, grads2, strict=True))
    assert client.extras["fisher"]
