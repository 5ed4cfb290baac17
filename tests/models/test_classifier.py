"""The classifier: an ordinary LightningModule, in a federation and without one."""

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsuite.callbacks import FederationCallback
from flsuite.data import IID, DataSpec, DataSplit, FederatedDataModule, Natural, PublishedSplits
from flsuite.data.loader import TrainLoader
from flsuite.data.spec import Task
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientUpdate
from flsuite.models import (
    ACVAE,
    MLP,
    Backbone,
    Classifier,
    FusedSpaceFed,
    NFClassifier,
    ResNet20,
)
from flsuite.models.classifier import class_probabilities, classification_loss
from flsuite.random import seed_process
from flsuite.state import clone
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer


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


class Updates(FederationCallback):
    """Keeps the clients' messages."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[ClientUpdate]] = {}

    def on_client_end(self, trainer: Any, outcome: Any) -> None:
        self.rounds.setdefault(outcome.update.round, []).append(outcome.update)


class Starts(pl.Callback):
    """Records the BatchNorm statistics that each fit starts from."""

    seen: ClassVar[dict[tuple[int, int], dict[str, Tensor]]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        buffers = {k: v for k, v in pl_module.state_dict().items() if is_buffer(k)}
        Starts.seen[loader.round, loader.client] = clone(buffers)


def is_buffer(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def fit_resnet(**kwargs: Any) -> tuple[FederatedTrainer, Updates]:
    """Two rounds of a small ResNet with BatchNorm."""
    Starts.seen.clear()
    updates = Updates()
    made = trainer(**{"rounds": 2, "callbacks": [updates, Starts()], **kwargs})
    made.fit(Classifier(ResNet20(width=4), lambda p: torch.optim.SGD(p, lr=0.05)), tiny())
    return made, updates


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
        return PublishedSplits(
            DataSpec((5,), 3, "multilabel"),
            whole.take(torch.arange(60)),
            whole.take(torch.arange(60, 90)),
        )


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
    plain = pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    model = Classifier(backbone, lambda p: torch.optim.SGD(p, lr=0.01))
    model.ensure_built(data.spec)
    before = clone(model.state_dict())
    plain.fit(model, module.train_dataloader(), held)
    assert plain.global_step == len(TrainLoader(data, -1, 0, 1)) and not equal_states(
        before, model.state_dict()
    )
    by_hand = nn.functional.cross_entropy(model.eval()(data.scaling(data.test.x)), data.test.y)
    assert float(plain.callback_metrics["val/loss"]) == pytest.approx(
        float(by_hand.detach()), rel=1e-4
    )
    predicted = torch.cat(plain.predict(model, held))
    assert predicted.shape == (20, 3) and torch.allclose(predicted.sum(1), torch.ones(20))


def test_a_plain_trainer_builds_the_model_for_its_data_module() -> None:
    plain = pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    model = Classifier(MLP(hidden=(4,)))
    plain.fit(model, datamodule=tiny())
    assert model.spec is not None and model.spec.shape == (3, 8, 8) and plain.global_step == 6


# Checkpoints


@pytest.mark.parametrize("hidden", [(16,), (8, 8)])
def test_the_exported_model_is_an_ordinary_checkpoint(
    hidden: tuple[int, ...], tmp_path: Path
) -> None:
    made, module = trainer(rounds=2, run_dir=tmp_path), digits()
    made.fit(Classifier(MLP(hidden=hidden), lambda p: torch.optim.SGD(p, lr=0.1)), module)
    loaded = Classifier.load_from_checkpoint(tmp_path / "checkpoints" / "model.ckpt")
    assert loaded.spec == module.spec
    data = module.federated
    with torch.inference_mode():
        probabilities = loaded.eval()(data.scaling(data.test.x)).softmax(1)
    assert torch.allclose(probabilities, made.predict(), atol=1e-6)
    assert made.federation is not None and equal_states(
        dict(loaded.state_dict()), made.federation.state
    )


def test_the_exported_model_keeps_what_it_was_made_with(tmp_path: Path) -> None:
    made = trainer(rounds=1, run_dir=tmp_path)
    made.fit(Classifier(ResNet20(width=4, norm="group"), private=["network.head"]), tiny())
    loaded = Classifier.load_from_checkpoint(tmp_path / "checkpoints" / "model.ckpt")
    assert isinstance(loaded.backbone, ResNet20) and (
        loaded.backbone.width,
        loaded.backbone.norm,
    ) == (4, "group")
    assert tuple(loaded.private) == ("network.head",)
    plain = pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    plain.fit(loaded, datamodule=tiny())


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
    assert federation is not None and federation.entries.personal
    assert federation.state and not [name for name in federation.state if "norm" in name]
    assert all(update.state.keys() == federation.state.keys() for update in updates.rounds[2])
    one, two = federation.client_state(0), federation.client_state(1)
    private = [name for name in one if name not in federation.state]
    assert private and all("norm" in name for name in private)
    assert not torch.equal(one["network.norm.weight"], two["network.norm.weight"])
    assert not torch.equal(one["network.norm.running_mean"], two["network.norm.running_mean"])
    assert all(torch.equal(one[name], two[name]) for name in federation.state)
    steps = {0: 2 * 2, 1: 2 * 2, 2: 2 * 3}  # two rounds of ceil(n / 10) batches
    for client, number in steps.items():
        assert int(federation.client_state(client)["network.norm.num_batches_tracked"]) == number


def test_averaged_buffers() -> None:
    made, updates = fit_resnet(batchnorm="average")
    state = made.federation.state
    buffers = [name for name in state if is_buffer(name)]
    assert len(buffers) == 57, "19 norms"
    for name in buffers:
        sent = [update.state[name] for update in updates.rounds[2]]
        weights = torch.tensor(
            [update.samples for update in updates.rounds[2]], dtype=torch.float64
        )
        if name.endswith("num_batches_tracked"):
            assert int(state[name]) == max(int(value) for value in sent)
        else:
            mean = torch.tensordot(weights / weights.sum(), torch.stack(sent).double(), 1)
            assert torch.allclose(state[name], mean.float(), rtol=1e-5, atol=1e-7)
    after_first = Starts.seen[2, 0]
    assert (
        equal_states(after_first, Starts.seen[2, 2])
        and int(after_first["network.norm.num_batches_tracked"]) == 3
    )
    assert not made.federation.entries.personal


def test_local_buffers() -> None:
    made, updates = fit_resnet(batchnorm="local")
    federation = made.federation
    assert (
        not [name for name in federation.state if is_buffer(name)] and federation.entries.personal
    )
    assert not [name for update in updates.rounds[1] for name in update.state if is_buffer(name)]
    assert [int(Starts.seen[2, c]["network.norm.num_batches_tracked"]) for c in range(3)] == [
        2,
        2,
        3,
    ]
    means = [federation.client_state(c)["network.stages.0.0.norm1.running_mean"] for c in range(3)]
    assert not torch.equal(means[0], means[1]) and not torch.equal(means[1], means[2])
    assert torch.equal(
        federation.client_state(0)["network.norm.weight"],
        federation.client_state(1)["network.norm.weight"],
    )


def test_reset_buffers() -> None:
    made, updates = fit_resnet(batchnorm="reset")
    for seen in Starts.seen.values():
        for name, value in seen.items():
            assert torch.equal(
                value,
                torch.ones_like(value) if name.endswith("running_var") else torch.zeros_like(value),
            )
    assert len(Starts.seen) == 6
    name = "network.norm.running_mean"
    assert all(update.state[name].abs().sum() > 0 for update in updates.rounds[2]), "they travel"
    assert made.federation.state[name].abs().sum() > 0 and not made.federation.entries.personal
    counters = [
        int(update.state["network.norm.num_batches_tracked"]) for update in updates.rounds[2]
    ]
    assert counters == [2, 2, 3], "a fit's own batches only"


def test_the_policies_differ() -> None:
    states = [
        fit_resnet(batchnorm=policy)[0].federation.client_state(0)
        for policy in ("average", "local", "reset")
    ]
    name = "network.norm.running_mean"
    assert len({tuple(state[name].tolist()) for state in states}) == 3


# Mixed precision


def test_weights_stay_float32_under_mixed_precision() -> None:
    full, _ = fit_resnet()
    mixed, updates = fit_resnet(precision="bf16-mixed")
    dtypes = {name: value.dtype for name, value in mixed.federation.state.items()}
    assert dtypes == {name: value.dtype for name, value in full.federation.state.items()}
    assert set(dtypes.values()) == {torch.float32, torch.int64}
    assert all(
        update.state["network.head.weight"].dtype == torch.float32 for update in updates.rounds[1]
    )
    a, b = (
        mixed.federation.state["network.head.weight"],
        full.federation.state["network.head.weight"],
    )
    assert not torch.equal(a, b) and torch.allclose(a, b, atol=0.1)
    assert mixed.predict().dtype == torch.float32 and mixed.test()[0]["loss"] < 3


def test_mixed_precision_repeats() -> None:
    one, two = (fit_resnet(precision="bf16-mixed")[0].federation.state for _ in range(2))
    assert equal_states(one, two)


def test_a_partition_of_one_client_is_plain_training() -> None:
    """One client and one round end with the weights of a plain Trainer on the same batches."""
    module = TinyImages(clients=1, partition=IID(), batch_size=10, val_fraction=0.0)
    made = trainer(rounds=1, max_epochs=2)
    made.fit(Classifier(MLP(hidden=(8,)), lambda p: torch.optim.SGD(p, lr=0.05)), module)
    model = Classifier(MLP(hidden=(8,)), lambda p: torch.optim.SGD(p, lr=0.05))
    seed_process(3, "model")
    model.ensure_built(module.spec)
    plain = pl.Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    plain.fit(model, TrainLoader(module.federated, 0, seed=3, round=1))
    assert equal_states(dict(model.state_dict()), made.federation.state)
