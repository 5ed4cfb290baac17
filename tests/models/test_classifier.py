"""The classifier: an ordinary LightningModule, in a federation and without one."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import seed_process
from flsuite.common.state import clone
from flsuite.data import IID, DataSpec, DataSplit, FederatedDataModule, Natural, PublishedSplits
from flsuite.data.federated import Task
from flsuite.data.loader import TrainLoader
from flsuite.models import ACVAE, MLP, Backbone, Classifier, FusedSpaceFed, NFClassifier, ResNet20
from flsuite.models.classifier import class_probabilities, classification_loss
from flsuite.trainer import FederatedTrainer
from tests.aggregators.federations import Updates
from tests.conftest import classifier, digits, equal_states, trainer
from tests.plain import plain_trainer


class TinyImages(FederatedDataModule):
    """Three classes of colored squares, for three clients of different size and brightness."""

    def load(self) -> PublishedSplits:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.tensor([12, 20, 28])
        owners = torch.arange(3).repeat_interleave(sizes)
        y = torch.arange(60) % 3
        x = torch.randint(0, 60, (60, 8, 8, 3), generator=generator) + 50 * owners.view(-1, 1, 1, 1)
        x[torch.arange(60), :, :, y] += 60
        train = DataSplit(x.to(torch.uint8), y, owners)
        return PublishedSplits(DataSpec((3, 8, 8), 3), train, train.take(torch.arange(0, 60, 3)))


def tiny() -> TinyImages:
    return TinyImages(clients=3, partition=Natural(), batch_size=10, val_fraction=0.0)


class Starts(pl.Callback):
    """Records the BatchNorm statistics that each fit starts from."""

    seen: ClassVar[dict[tuple[int, int], dict[str, Tensor]]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        buffers = {k: v for k, v in pl_module.state_dict().items() if is_buffer(k)}
        Starts.seen[loader.round, loader.client] = clone(buffers)


def is_buffer(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def sgd(backbone: Backbone, **kwargs: Any) -> Classifier:
    return Classifier(backbone, lambda p: torch.optim.SGD(p, lr=0.05), **kwargs)


@dataclass
class Fitted:
    """Two rounds of a small ResNet with BatchNorm: its end, all updates, and where fits began."""

    made: FederatedTrainer
    updates: dict[int, list[ClientUpdate]]
    starts: dict[tuple[int, int], dict[str, Tensor]]


def fit_resnet(**kwargs: Any) -> Fitted:
    Starts.seen.clear()
    updates = Updates()
    made = trainer(**{"rounds": 2, "callbacks": [updates, Starts()], **kwargs})
    made.fit(sgd(ResNet20(width=4)), tiny())
    rounds = {n: [update for update in updates.all if update.round == n] for n in (1, 2)}
    return Fitted(made, rounds, dict(Starts.seen))


resnet = cache(fit_resnet)  # for tests that only look at it


# Loss and probabilities


def test_losses_are_torchs() -> None:
    logits, y = torch.randn(7, 5), torch.randint(0, 5, (7,))
    assert torch.allclose(classification_loss(logits, y).mean(), nn.CrossEntropyLoss()(logits, y))
    assert torch.allclose(class_probabilities(logits, y).sum(1), torch.ones(7))
    labels = torch.randint(0, 2, (7, 5)).to(torch.uint8)
    found = classification_loss(logits, labels)
    assert found.shape == (7,) and torch.allclose(
        found.mean(), nn.BCEWithLogitsLoss()(logits, labels.float())
    )
    assert torch.allclose(class_probabilities(logits, labels), logits.sigmoid())
    half = classification_loss(logits.bfloat16(), y)
    assert half.dtype == torch.float32, "the loss is taken in full precision"


class Labels(FederatedDataModule):
    """Tables with three independent labels, each the sign of a feature."""

    def load(self) -> PublishedSplits:
        x = torch.randn(90, 5, generator=torch.Generator().manual_seed(0))
        whole = DataSplit(x, (x[:, :3] > 0).to(torch.uint8))
        parts = [whole.take(torch.arange(*rows)) for rows in ((0, 60), (60, 90))]
        return PublishedSplits(DataSpec((5,), 3, "multilabel"), *parts)


@pytest.mark.parametrize("model", [Classifier, FusedSpaceFed, ACVAE, NFClassifier])
def test_targets_that_are_no_classes_are_one_line(model: Any) -> None:
    with pytest.raises(FlsuiteError, match="needs one class per sample") as error:
        model().ensure_built(DataSpec((1, 32, 32), 1, "other"))
    assert "\n" not in str(error.value)


def test_a_network_in_place_of_a_backbone_is_one_line() -> None:
    with pytest.raises(FlsuiteError, match=r"whose build\(shape, outputs\) returns the network"):
        Classifier(torch.nn.Linear(4, 2))  # type: ignore[arg-type]


def test_a_federation_learns_labels() -> None:
    made = trainer(rounds=5, max_epochs=4)
    module = Labels(clients=3, batch_size=5)
    made.fit(Classifier(MLP(hidden=()), lambda p: torch.optim.SGD(p, lr=1.0)), module)
    scores = made.test()[0]
    assert scores["accuracy"] > 0.9 and scores["auroc"] > 0.95
    probabilities, data = made.predict(), module.federated
    assert probabilities.shape == (30, 3)
    assert scores["loss"] == pytest.approx(
        float(nn.BCELoss()(probabilities, data.test.y.float())), rel=1e-4
    )


# Without a federation


@pytest.mark.parametrize(
    "backbone", [MLP(hidden=(16,)), ResNet20(width=4, norm="group")], ids=["mlp", "resnet"]
)
def test_a_plain_trainer_fits_and_validates(backbone: Backbone) -> None:
    module = tiny()
    module.setup()
    data = module.federated
    held = DataLoader(TensorDataset(data.scaling(data.test.x), data.test.y), batch_size=8)
    plain, model = plain_trainer(), sgd(backbone)
    model.ensure_built(data.spec)
    before = clone(model.state_dict())
    plain.fit(model, module.train_dataloader(), held)
    assert plain.global_step == len(TrainLoader(data, -1, 0, 1))
    assert not equal_states(before, model.state_dict())
    by_hand = nn.functional.cross_entropy(model.eval()(data.scaling(data.test.x)), data.test.y)
    assert float(plain.callback_metrics["val/loss"]) == pytest.approx(by_hand.item(), rel=1e-4)
    predicted = torch.cat(plain.predict(model, held))
    assert predicted.shape == (20, 3) and torch.allclose(predicted.sum(1), torch.ones(20))


def test_a_plain_trainer_builds_the_model_for_its_data_module() -> None:
    plain, model = plain_trainer(), Classifier(MLP(hidden=(4,)))
    plain.fit(model, datamodule=tiny())
    assert model.spec is not None and model.spec.shape == (3, 8, 8) and plain.global_step == 6


# Checkpoints


def test_the_exported_model_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    made, module = trainer(rounds=2, run_dir=tmp_path), digits()
    made.fit(sgd(MLP(hidden=(8, 8))), module)
    loaded = Classifier.load_from_checkpoint(tmp_path / "checkpoints" / "model.ckpt")
    assert loaded.spec == module.spec
    data = module.federated
    with torch.inference_mode():
        probabilities = loaded.eval()(data.scaling(data.test.x)).softmax(1)
    assert torch.allclose(probabilities, made.predict(), atol=1e-6)
    assert equal_states(dict(loaded.state_dict()), made.federation.state)


def test_the_exported_model_keeps_what_it_was_made_with(tmp_path: Path) -> None:
    made = trainer(rounds=1, run_dir=tmp_path)
    made.fit(Classifier(ResNet20(width=4, norm="group"), private=["network.head"]), tiny())
    loaded = Classifier.load_from_checkpoint(tmp_path / "checkpoints" / "model.ckpt")
    assert isinstance(loaded.backbone, ResNet20)
    assert (loaded.backbone.width, loaded.backbone.norm) == (4, "group")
    assert tuple(loaded.private) == ("network.head",)
    plain_trainer().fit(loaded, datamodule=tiny())


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_a_model_is_built_once(task: Task) -> None:
    model = classifier()
    torch.manual_seed(0)
    model.ensure_built(DataSpec((4,), 3, task))
    before = clone(model.state_dict())
    model.ensure_built(DataSpec((4,), 3, task, ("a", "b", "c")))
    assert equal_states(before, model.state_dict())


# Private parts and buffers


def test_private_norms_stay_with_their_clients() -> None:
    """FedBN: all entries of the normalization stay with the client."""
    updates = Updates()
    made = trainer(rounds=2, callbacks=[updates])
    made.fit(Classifier(ResNet20(width=4), private=["*norm*"]), tiny())
    federation = made.federation
    assert federation.entries.personal
    assert federation.state and not [name for name in federation.state if "norm" in name]
    assert all(update.state.keys() == federation.state.keys() for update in updates.all)
    one, two = federation.client_state(0), federation.client_state(1)
    private = [name for name in one if name not in federation.state]
    assert private and all("norm" in name for name in private)
    for name in ("network.norm.weight", "network.norm.running_mean"):
        assert not torch.equal(one[name], two[name])
    assert all(torch.equal(one[name], two[name]) for name in federation.state)
    steps = {0: 2 * 2, 1: 2 * 2, 2: 2 * 3}  # two rounds of ceil(n / 10) batches
    for client, number in steps.items():
        assert int(federation.client_state(client)["network.norm.num_batches_tracked"]) == number


def test_averaged_buffers() -> None:
    run = resnet(batchnorm="average")
    state, sent = run.made.federation.state, run.updates[2]
    buffers = [name for name in state if is_buffer(name)]
    assert len(buffers) == 57, "19 norms"
    weights = torch.tensor([update.samples for update in sent], dtype=torch.float64)
    for name in buffers:
        values = torch.stack([update.state[name] for update in sent])
        if name.endswith("num_batches_tracked"):
            assert state[name] == values.max()
        else:
            mean = torch.tensordot(weights / weights.sum(), values.double(), 1)
            assert torch.allclose(state[name], mean.float(), rtol=1e-5, atol=1e-7)
    after_first = run.starts[2, 0]
    assert equal_states(after_first, run.starts[2, 2])
    assert int(after_first["network.norm.num_batches_tracked"]) == 3
    assert not run.made.federation.entries.personal


def test_local_buffers() -> None:
    run = resnet(batchnorm="local")
    federation, counter = run.made.federation, "network.norm.num_batches_tracked"
    assert federation.entries.personal
    for state in (federation.state, *(update.state for update in run.updates[1])):
        assert state and not [name for name in state if is_buffer(name)]
    assert [int(run.starts[2, client][counter]) for client in range(3)] == [2, 2, 3]
    states = [federation.client_state(client) for client in range(3)]
    means = [state["network.stages.0.0.norm1.running_mean"] for state in states]
    assert not torch.equal(means[0], means[1]) and not torch.equal(means[1], means[2])
    assert torch.equal(states[0]["network.norm.weight"], states[1]["network.norm.weight"])


def test_reset_buffers() -> None:
    run = resnet(batchnorm="reset")
    assert len(run.starts) == 6
    for seen in run.starts.values():
        for name, value in seen.items():
            assert bool((value == float(name.endswith("running_var"))).all())
    name = "network.norm.running_mean"
    assert all(update.state[name].abs().sum() > 0 for update in run.updates[2]), "they travel"
    assert run.made.federation.state[name].abs().sum() > 0
    assert not run.made.federation.entries.personal
    counters = [int(u.state["network.norm.num_batches_tracked"]) for u in run.updates[2]]
    assert counters == [2, 2, 3], "a fit's own batches only"


# Mixed precision


def test_weights_stay_float32_under_mixed_precision_which_repeats() -> None:
    full, mixed = resnet(batchnorm="average").made, fit_resnet(precision="bf16-mixed")
    state = mixed.made.federation.state
    dtypes = {name: value.dtype for name, value in state.items()}
    assert dtypes == {name: value.dtype for name, value in full.federation.state.items()}
    assert set(dtypes.values()) == {torch.float32, torch.int64}
    name = "network.head.weight"
    assert all(update.state[name].dtype == torch.float32 for update in mixed.updates[1])
    a, b = state[name], full.federation.state[name]
    assert not torch.equal(a, b) and torch.allclose(a, b, atol=0.1)
    assert mixed.made.predict().dtype == torch.float32 and mixed.made.test()[0]["loss"] < 3
    again = fit_resnet(precision="bf16-mixed").made.federation.state
    assert equal_states(state, again)


def test_a_partition_of_one_client_is_plain_training() -> None:
    """One client and one round end with the weights of a plain Trainer on the same batches."""
    module = TinyImages(clients=1, partition=IID(), batch_size=10, val_fraction=0.0)
    made, model = trainer(rounds=1, max_epochs=2), sgd(MLP(hidden=(8,)))
    made.fit(sgd(MLP(hidden=(8,))), module)
    seed_process(3, "model")
    model.ensure_built(module.spec)
    plain_trainer(max_epochs=2).fit(model, TrainLoader(module.federated, 0, seed=3, round=1))
    assert equal_states(dict(model.state_dict()), made.federation.state)
