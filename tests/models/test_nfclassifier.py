"""NFClassifier: its losses by hand, the plain classifier without replay, and tasks."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite import FederatedTrainer, FederationError, FlsuiteError
from flsuite.aggregators import Centralized, FedProx
from flsuite.common.state import clone
from flsuite.data import DataSpec, Dirichlet, Synthetic
from flsuite.data.loader import TrainLoader
from flsuite.federation import Processes, Synchronous
from flsuite.models import Classifier, NFClassifier
from flsuite.models.backbones import MLP, Backbone, ResNet20, StridedCNN
from flsuite.models.flows import soft_cross_entropy
from flsuite.models.nfclassifier import _Head
from tests.conftest import digits, equal_states, state, trainer
from tests.plain import plain_trainer

TABLE = DataSpec((5,), 3)
IMAGES = DataSpec((1, 8, 8), 3)


def small(**settings: Any) -> NFClassifier:
    sizes = {"feature_dim": 6, "couplings": 2, "flow_width": 8, "backbone": MLP(hidden=(8,))}
    return NFClassifier(**{"lr": 1e-2, **sizes, **settings})


def built(spec: DataSpec = TABLE, **settings: Any) -> NFClassifier:
    torch.manual_seed(0)
    made = small(**settings)
    made.ensure_built(spec)
    for parameter in made.flow.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def batch(n: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 3


def table(clients: int = 4) -> Synthetic:
    rows = {"features": 5, "classes": 3, "samples": 150, "batch_size": 16}
    return Synthetic(clients=clients, partition=Dirichlet(0.5, min_samples=4), **rows)


def fit(model: Any = None, **settings: Any) -> FederatedTrainer:
    made = trainer(**{"rounds": 2, **settings})
    made.fit(model or small(), table())
    return made


@pytest.fixture(scope="module")
def plainly() -> FederatedTrainer:
    """Return a fitted federation of two rounds, for tests that only look at it."""
    torch.set_num_threads(1)
    return fit()


def one_fit(model: NFClassifier, callbacks: Any = (), **settings: Any) -> NFClassifier:
    data = table(1)
    data.use_seed(0)
    data.setup()
    model.ensure_built(data.spec)
    plain_trainer(callbacks=list(callbacks), **settings).fit(
        model, TrainLoader(data.federated, 0, 0, 1)
    )
    return model


def test_the_replay_is_weighted_alike_under_autocast() -> None:
    """Only the head's own layers may run in bfloat16."""
    model = built(k_replay=0.3)
    x, y = batch()
    model.previous.meet(y)
    codes, log_density = (value.detach() for value in model.flow.density(model.features(x), y))

    weights = []
    for enabled in (False, True):
        model.on_train_start()
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model.replay_loss(codes, log_density, y)
        weights.append({name: model._sums[name] for name in ("density", "credibility")})

    assert weights[0] == weights[1]


def test_the_replay_is_weighed_and_trains_the_hidden_layer_only() -> None:
    model = built(k_replay=0.3, theta=0.25)
    x, y = batch()
    model.previous.meet(y)
    codes, log_density = (value.detach() for value in model.flow.density(model.features(x), y))
    torch.manual_seed(5)
    loss = model.replay_loss(codes, log_density, y)
    torch.manual_seed(5)
    classes = torch.multinomial(torch.ones(3), 12, replacement=True)
    drawn = torch.randn(12, 6)
    p = (log_density / 6).exp().mean()
    z = model.flow.generate(drawn, classes).detach()
    weights = []
    for u, c in zip(drawn, classes, strict=True):
        own = codes[y == c]
        normal = torch.distributions.Normal(own.mean(0), own.var(0, correction=0).sqrt())
        weights.append(normal.log_prob(u).exp().mean())
    losses = F.cross_entropy(model.head(z), classes, reduction="none")
    expected = 0.3 * (0.75 * p + 0.25) * (torch.stack(weights) * losses).mean()
    torch.testing.assert_close(loss, expected.detach())
    loss.backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {"head.hidden.weight", "head.hidden.bias"}


class Same(Backbone):
    """Extractor and head as the network of a plain classifier."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(MLP(hidden=(8,)).build(shape, 6), nn.LeakyReLU(), _Head(6, outputs))


def test_without_replay_its_classifier_is_a_plain_one_bit_for_bit() -> None:
    """An algorithm's term comes before the clipping in both."""
    settings: dict[str, Any] = {"aggregator": FedProx(), "max_epochs": 2}
    nf = fit(small(k_replay=0.0, clip=0.5, normalize_features=False), **settings)
    same = Classifier(Same(), optimizer=lambda p: torch.optim.Adam(p, lr=1e-2, fused=True))
    plain = fit(same, gradient_clip_val=0.5, **settings)
    ours = [value for name, value in state(nf).items() if not name.startswith("flow.")]
    assert ours
    assert all(torch.equal(a, b) for a, b in zip(ours, state(plain).values(), strict=True))
    assert nf.test()[0]["accuracy"] == plain.test()[0]["accuracy"]
    for a, b in zip(nf.federation.log.updates, plain.federation.log.updates, strict=True):
        assert a.steps == b.steps and a.metrics["loss"] == b.metrics["loss"], "a batch is one step"


def test_the_flow_teaches_the_features_nothing() -> None:
    """Neither the flow's loss nor the replay has a gradient for h_a."""
    model = built()
    x, y = batch()
    z = model.features(x).detach().requires_grad_()
    model.previous.meet(y)
    codes, log_density = model.flow.density(z.detach(), y)
    (-log_density.mean() + model.replay_loss(codes.detach(), log_density.detach(), y)).backward()
    assert z.grad is None and all(p.grad is None for p in model.extractor.parameters())
    assert any(p.grad is not None for p in model.flow.parameters())


def test_scores_need_no_label_and_nll_does() -> None:
    model = built().eval()
    x, y = batch()
    given, permuted = model.evaluation_step((x, y)), model.evaluation_step((x, (y + 1) % 3))
    assert torch.equal(given["scores"], permuted["scores"])
    assert torch.equal(given["scores"], model(x).softmax(1))
    assert not torch.equal(given["nll"], permuted["nll"])
    torch.testing.assert_close(given["nll"], -model.log_likelihood((x, y)).detach() / 6)


# From task to task


def test_begin_task_keeps_the_model_as_it_was_once() -> None:
    model = one_fit(small(backbone=StridedTable()))
    assert int(model.previous.task) == 0 and not model.previous.tasks
    start = clone(model.state_dict())
    model.begin_task(0)
    assert equal_states(start, clone(model.state_dict()))
    model.begin_task(1)
    for part in ("flow", "extractor", "head"):
        kept = clone(getattr(model.previous, part).state_dict())
        assert equal_states(kept, clone(getattr(model, part).state_dict()))
    assert torch.equal(model.previous.past, model.previous.met)
    one_fit(model)
    kept = clone(model.previous.flow.state_dict())
    model.begin_task(1)
    assert equal_states(kept, clone(model.previous.flow.state_dict()))
    assert not equal_states(kept, clone(model.flow.state_dict()))
    model.begin_task(2)
    assert equal_states(clone(model.previous.flow.state_dict()), clone(model.flow.state_dict()))


def test_features_have_one_scale_if_normalized() -> None:
    x = 100 * batch()[0]
    z = built().features(x)
    torch.testing.assert_close(z.mean(1), torch.zeros(12), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.var(1, correction=0), torch.ones(12), atol=1e-3, rtol=0)
    assert built(normalize_features=False).features(x).var(1).min() > 2


class StridedTable(Backbone):
    """An extractor with buffers."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], outputs), nn.BatchNorm1d(outputs))


def test_before_the_first_task_change_nothing_is_rehearsed_or_distilled() -> None:
    model = built()
    x, y = batch()
    model.previous.meet(y)
    model.previous.look()
    z = model.features(x)
    assert model.rehearsal_loss(12) == 0.0 and model.distillation_loss(x, z, model.head(z)) == 0.0
    model.begin_task(1)
    assert model.rehearsal_loss(12) > 0
    z = z.detach()
    student = model.head(z).detach()
    assert float(model.distillation_loss(x, z, student)) == pytest.approx(
        0.2 * 0.1 * float(soft_cross_entropy(student, student)), rel=1e-5
    ), "the features are still the same"
    moved = model.distillation_loss(x, z + 1.0, student) - model.distillation_loss(x, z, student)
    assert float(moved) == pytest.approx(0.2 * 0.5, rel=1e-4)


def test_the_rehearsal_is_of_classes_from_before() -> None:
    model = built()
    model.begin_task(3, past=[1])
    model.previous.meet(torch.tensor([0, 2]))
    assert model.previous.past.tolist() == [0, 1, 0] and model.previous.met.tolist() == [1, 0, 1]
    torch.manual_seed(2)
    found = model.rehearsal_loss(30)
    torch.manual_seed(2)
    torch.multinomial(torch.tensor([0.0, 1.0, 0.0]), 30, replacement=True)
    y = torch.ones(30, dtype=torch.int64)
    z = model.previous.flow.generate(torch.randn(30, 6), y)
    torch.testing.assert_close(found, -0.1 * model.flow.density(z, y)[1].mean())


@pytest.mark.parametrize(("replay_classes", "drawn"), [("all", [0, 1]), ("own", [0])])
def test_only_classes_that_the_client_has_met_are_replayed_or_with_all_those_of_others(
    replay_classes: Any, drawn: list[int], monkeypatch: Any
) -> None:
    model = built(replay_classes=replay_classes)
    model.previous.meet(torch.tensor([0]))
    model.begin_task(1, seen=[0, 1], past=[1])
    assert model.previous.met.tolist() == [1, 0, 0], "what it has met are its own labels"
    assert model.previous.past.tolist() == [1, int(replay_classes == "all"), 0]
    asked: list[Tensor] = []
    generate = model.flow.generate
    monkeypatch.setattr(model.flow, "generate", lambda u, y: asked.append(y) or generate(u, y))
    x, y = batch(60)
    codes, log_density = model.flow.density(model.features(x).detach(), y)
    model.replay_loss(codes, log_density, y)
    assert asked[0].unique().tolist() == drawn


def test_a_client_that_joins_late_has_nothing_to_rehearse() -> None:
    model = built()
    model.begin_task(2)
    assert model.previous.tasks and not model.previous.classes and model.rehearsal_loss(4) == 0.0


class Tasks(pl.Callback):
    """Begins the second task after round two."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.fit_loop._data_source.instance
        pl_module.begin_task(int(loader.round > 2))  # type: ignore[operator]


@pytest.mark.parametrize("buffers", [pytest.param("average", marks=pytest.mark.long), "reset"])
def test_two_tasks_resume_and_workers_change_nothing(buffers: Any, tmp_path: Path) -> None:
    """What a client has met and kept is private, and no policy on buffers resets it."""

    def model() -> NFClassifier:
        return small(backbone=StridedTable(), k_global=0.1)

    settings = {"schedule": Synchronous(0.75), "callbacks": [Tasks()], "batchnorm": buffers}
    whole = fit(model(), rounds=4, **settings)
    elsewhere = {"engine": Processes(workers=2)} if buffers == "average" else {}
    fit(model(), rounds=3, run_dir=str(tmp_path / "run"), **settings, **elsewhere)
    resumed = trainer(rounds=4, run_dir=str(tmp_path / "run"), **settings)
    resumed.fit(model(), table(), ckpt_path="last")
    assert equal_states(state(whole), state(resumed))
    assert not any(name.startswith("previous.") for name in state(whole))
    name = "flow.flows.0.conditioner.initial_layer.weight"
    for client in range(4):
        ours = whole.federation.client_state(client)
        assert equal_states(ours, resumed.federation.client_state(client))
        labels = whole.federation.data.class_counts(client) > 0
        assert torch.equal(ours["previous.met"].bool(), labels), "its own labels, and no others"
        assert ours["previous.task"].item() == 1 and ours["previous.past"].any()
        assert not torch.equal(ours[f"previous.{name}"], state(whole)[name])
        assert buffers == "reset" or ours["previous.extractor.0.1.running_mean"].any()


def test_without_weights_for_it_no_second_model_is_kept() -> None:
    model = built(k_flow_last=0.0, k_last=0.0)
    kept = {name for name in model.state_dict() if name.startswith("previous.")}
    assert kept == {"previous.task", "previous.met", "previous.past"}
    model.begin_task(1, [0])
    assert model.rehearsal_loss(4) == 0.0


def test_distillation_from_the_global_classifier_holds_a_client_back() -> None:
    """With a large weight the features stay close to where the fit started."""
    free, held = (one_fit(built(lr=0.05, k_global=k)) for k in (0.0, 1000.0))
    start = built()
    x, _ = batch()
    with torch.no_grad():
        began = start.eval().features(x)
        distances = [float((m.eval().features(x) - began).norm()) for m in (free, held)]
    assert distances[1] < 0.5 * distances[0]
    assert held._received is None


# Training


@pytest.mark.long
def test_samples_of_a_trained_flow_are_told_apart_by_the_head() -> None:
    """Trained further on settled features, the flow also fits unseen samples better."""
    sizes: dict[str, Any] = {"feature_dim": 16, "flow_width": 32, "backbone": StridedCNN(8)}
    model = NFClassifier(lr=3e-3, flow_lr=1e-2, **sizes)
    made = trainer(aggregator=Centralized(), rounds=1, max_epochs=5)
    made.fit(model, digits(clients=4, train_samples=None))
    before = made.test()[0]
    assert before["accuracy"] > 0.75
    assert made.federation is not None
    data, optimizer = made.federation.data, torch.optim.Adam(model.flow.parameters(), lr=5e-3)
    x = data.scaling(data.train.x)
    for rows in torch.randint(0, len(x), (100, 128), generator=torch.Generator().manual_seed(0)):
        loss = -model.log_likelihood((x[rows], data.train.y[rows])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        wanted = torch.arange(10).repeat_interleave(30)
        u = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
        drawn = model.flow.generate(u, wanted)
        right = (model.head(drawn).argmax(1) == wanted).float().mean()
        nll = model.evaluation_step((data.scaling(data.test.x), data.test.y))["nll"].mean()
    assert right > 0.7 and nll < before["nll"]
    rows = {row[7]: row[8] for row in made.run.folder.table.rows if row[5] == "global"}
    logged = "nll flow_nll density credibility replay gradient_norm flow_gradient_norm"
    assert set(logged.split()) <= rows.keys()


def test_bf16_trains_with_densities_in_float32(plainly: FederatedTrainer) -> None:
    model = built(IMAGES, backbone=StridedCNN(4))
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    with torch.autocast("cpu", torch.bfloat16):
        assert model.features(x).dtype == torch.bfloat16
        outputs = model.evaluation_step((x, y))
        assert all(value.dtype == torch.float32 for value in outputs.values())
        assert model.log_likelihood((x, y)).dtype == torch.float32
    mixed, full = fit(precision="bf16-mixed"), state(plainly)
    assert all(value.dtype == full[name].dtype for name, value in state(mixed).items())
    assert not equal_states(full, state(mixed))
    assert mixed.test()[0]["loss"] == pytest.approx(plainly.test()[0]["loss"], abs=0.2)


def test_an_exploding_flow_is_clipped_and_reported_and_a_ruined_one_refused() -> None:
    made = fit(rounds=1, model=small(flow_lr=1e-3), callbacks=[Spoil(1e12)])
    (first, *_) = made.federation.log.updates  # type: ignore[union-attr]
    assert first.metrics["flow_gradient_norm"] > 1e6
    with pytest.raises(FederationError, match=r"its update was refused: .* is not finite"):
        fit(rounds=1, callbacks=[Spoil(math.inf)])


class Spoil(pl.Callback):
    """Multiplies the flow's gradient."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        if optimizer is trainer.optimizers[1]:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(self.factor)


def test_a_plain_trainer_fits_it_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = one_fit(built(), max_epochs=2)
    assert not [w for w in recwarn if "eval mode" in str(w.message)]
    assert model.trainer.global_step == 2 * 2 * model.trainer.num_training_batches, (
        "Lightning counts each optimizer's step"
    )
    assert model.previous.met.tolist() == [1, 1, 1]


def test_kept_optimizers_carry_both_adams(plainly: FederatedTrainer) -> None:
    assert not equal_states(state(fit(keep_optimizers=True)), state(plainly))


def test_it_builds_for_tables_images_and_colour() -> None:
    cases = (((5,), None), ((1, 28, 28), StridedCNN(4)), ((3, 32, 32), ResNet20(width=4)))
    for shape, backbone in cases:
        model = built(DataSpec(shape, 4), backbone=backbone)
        assert model.eval()(torch.rand(2, *shape)).shape == (2, 4)
    made = StridedCNN().build((1, 28, 28), 512)
    shapes = [tuple(m.weight.shape) for m in made if hasattr(m, "weight")]
    assert shapes == [(64, 1, 4, 4), (128, 64, 4, 4), (256, 128, 4, 4), (512, 256 * 9)]
    copy.deepcopy(NFClassifier())


# Refusals


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: small().ensure_built(DataSpec((5,), 3, "multilabel")), "one class per sample"),
        (lambda: NFClassifier().ensure_built(DataSpec((1, 4, 4), 3)), "at least 8 x 8"),
        (lambda: built().begin_task(1, [3]), "no class 3; there are 3 classes"),
        (lambda: built().begin_task(-1), "no task -1"),
        (lambda: StridedCNN(0), "width"),
        (lambda: fit(gradient_clip_val=0.5), "set model.clip to 0.5"),
        (lambda: fit(accumulate_grad_batches=2), "accumulate_grad_batches"),
    ],
)
def test_data_tasks_and_trainers_that_do_not_fit_are_refused(use: Any, said: str) -> None:
    with pytest.raises(FlsuiteError, match=said):
        use()
