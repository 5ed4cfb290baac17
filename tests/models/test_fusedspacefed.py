"""FusedSpaceFed: what a client keeps, what the warm-up trains, and which gradients flow."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from flsuite.aggregators import FedAvg, FedProx
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, StateLayout, clone
from flsuite.data import DataSpec, DataSplit, FederatedDataModule, PublishedSplits
from flsuite.federation import Synchronous
from flsuite.federation.client.callbacks import FitRecord
from flsuite.models import CNN, Classifier, FusedSpaceFed, ResNet20
from flsuite.models.fusedspacefed import reconstruction_error
from flsuite.runs.session import export_model
from flsuite.trainer import FederatedTrainer
from tests.aggregators.federations import Updates
from tests.conftest import equal_states, trainer
from tests.plain import plain_trainer

SPEC = DataSpec((1, 8, 8), 3)
SMALL = CNN(channels=(2, 4), hidden=(8,))


class Images(FederatedDataModule):
    """Random 8x8 images whose class is their brightness, or with three labels each."""

    def __init__(self, samples: int = 48, labels: bool = False, **kwargs: Any) -> None:
        super().__init__(clients=3, batch_size=8, val_fraction=0, standardize=False, **kwargs)
        self.samples = samples
        self.labels = labels

    def load(self) -> PublishedSplits:
        g = torch.Generator().manual_seed(0)
        y = torch.arange(self.samples) % 3
        x = torch.randint(0, 86, (self.samples, 8, 8, 1), generator=g) + 85 * y.view(-1, 1, 1, 1)
        if self.labels:
            y = torch.randint(0, 2, (self.samples, 3), generator=g)
        task = "multilabel" if self.labels else "multiclass"
        part = DataSplit(x.to(torch.uint8), y.to(torch.uint8) if self.labels else y)
        return PublishedSplits(DataSpec((1, 8, 8), 3, task), part, part)


def small(**kwargs: Any) -> FusedSpaceFed:
    return FusedSpaceFed(**{"backbone": SMALL, "latent_dim": 5, **kwargs})


def built(**kwargs: Any) -> FusedSpaceFed:
    torch.manual_seed(0)
    model = small(**kwargs)
    model.ensure_built(SPEC)
    return model


def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.rand(samples, 1, 8, 8, generator=g), torch.arange(samples) % 3


def federate(model: FusedSpaceFed, data: Images | None = None, **kwargs: Any) -> FederatedTrainer:
    made = trainer(**{"rounds": 1, "evaluate_every": 100, **kwargs})
    made.fit(model, data or Images())
    return made


def has_gradient(model: FusedSpaceFed, prefix: str) -> bool:
    named = [p for name, p in model.named_parameters() if name.startswith(prefix)]
    return any(p.grad is not None and bool(p.grad.any()) for p in named)


@pytest.mark.parametrize("autoencoder", ["unet", "bottleneck"])
@pytest.mark.parametrize("fusion", ["sum", "concat"])
def test_logits_and_columns(autoencoder: Any, fusion: Any) -> None:
    model = built(autoencoder=autoencoder, fusion=fusion)
    assert model(batch()[0]).shape == (6, 3)
    columns = model.eval().evaluation_step(batch())
    shapes = {"loss": (6,), "scores": (6, 3), "reconstruction": (6,)}
    assert {k: v.shape for k, v in columns.items()} == shapes


def test_fusion() -> None:
    x, other = batch()[0], torch.rand(6, 1, 8, 8)
    for settings, scale in (({"fusion_scale": 0.5}, 0.5), ({}, 1.0)):
        added, stacked = (built(fusion=fusion, **settings) for fusion in ("sum", "concat"))
        assert torch.equal(added.fuse(x, other), x + scale * other)
        assert torch.equal(stacked.fuse(x, other), torch.cat([x, scale * other], 1))
        assert torch.equal(added.classifier_inputs(x)[0], x)
    assert torch.equal(stacked.classifier_inputs(x)[0], torch.cat([x, torch.zeros_like(x)], 1))
    assert torch.equal(added.eval().classifier_inputs(x)[1], x + added.reconstruct(x))
    first = f"{added.head}0.weight"
    assert [model.state_dict()[first].shape[1] for model in (added, stacked)] == [1, 2]


def test_reconstruction_error_stays_in_float32() -> None:
    x = torch.full((2, 1, 4, 4), 0.5, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        error = reconstruction_error(x, torch.zeros(2, 1, 4, 4))
    assert error.dtype == torch.float32 and error.tolist() == [0.25, 0.25]


# The losses


def test_joint_loss_is_the_sum_of_its_terms() -> None:
    model = built(lambda_rec=2.0, lambda_sp=3.0).eval()
    assert model.drift().item() == 0 and "initial_encoder" not in model.state_dict()
    x, y = batch()
    with torch.no_grad():
        next(model.encoder.parameters()).add_(0.1)
        columns = model.evaluation_step((x, y))
        moved = 0.01 * next(model.encoder.parameters()).numel()
        expected = columns["loss"].mean() + 2 * columns["reconstruction"].mean() + 3 * moved
    torch.testing.assert_close(model.joint_loss(x, y), expected)


def test_task_aware_sends_classification_gradients_to_the_autoencoder() -> None:
    for aware in (True, False):
        model = built(task_aware=aware, lambda_rec=0.0)
        model.joint_loss(*batch()).backward()
        assert has_gradient(model, "classifier.")
        assert has_gradient(model, "encoder.") is has_gradient(model, "decoder.") is aware


def test_without_task_awareness_the_reconstruction_alone_trains_the_autoencoder() -> None:
    model, alone = built(task_aware=False), built(task_aware=False)
    x, y = batch()
    model.joint_loss(x, y).backward()
    reconstruction_error(alone.reconstruct(x), x).mean().backward()
    for a, b in zip(model.decoder.parameters(), alone.decoder.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_two_learning_rates() -> None:
    model = built(lr=0.3, autoencoder_lr=0.02)
    groups = model.configure_optimizers().param_groups
    assert [group["lr"] for group in groups] == [0.02, 0.3]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


# The warm-up


@pytest.mark.parametrize(
    ("autoencoder", "aggregator"), [("unet", FedAvg()), ("bottleneck", FedProx(mu=1.0))]
)
def test_warm_up_moves_the_encoder_only(autoencoder: Any, aggregator: FedAvg) -> None:
    """Weights and statistics of D and C stay, whatever an algorithm adds to the gradients."""
    model = small(autoencoder=autoencoder, warmup_epochs=50, backbone=ResNet20(width=4))
    model.ensure_built(SPEC)
    before, error = clone(model.state_dict()), _error(model)
    record = FitRecord(aggregator.halves, _client(before))
    plain_trainer(max_epochs=2, callbacks=[record]).fit(model, datamodule=Images())
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert _error(model) < error
    assert changed and all(name.startswith("encoder.") for name in changed)
    assert any("running_mean" in name for name in changed)
    assert all(p.requires_grad for p in model.parameters()) and model.decoder.training


def _error(model: FusedSpaceFed) -> float:
    """Computed as in the warm-up: batch statistics in the encoder, running ones in the decoder."""
    model = copy.deepcopy(model).train()
    model.decoder.eval()
    x = batch(24)[0]
    return reconstruction_error(model.reconstruct(x), x).mean().item()


def _client(state: State) -> Any:
    far = {k: v + 1 for k, v in state.items() if not k.startswith("encoder.")}
    layout = StateLayout(tuple(k for k in far if "running" not in k and "num_" not in k), 1)
    counts = torch.ones(3, dtype=torch.int64)
    return ClientContext(0, 1, 48, counts, far, {}, {}, layout=layout)


def test_nothing_moves_a_frozen_part_even_if_a_callback_gives_it_a_gradient() -> None:
    model = built()
    optimizer = model.configure_optimizers()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert model.warming_up
    model.on_before_optimizer_step(optimizer)
    assert has_gradient(model, "encoder.")
    assert not has_gradient(model, "decoder.") and not has_gradient(model, "classifier.")


class Watched(FusedSpaceFed):
    """Records the epoch of every step on the joint loss, on the class: fits may copy the model."""

    joint: ClassVar[list[int]] = []

    def joint_loss(self, x: Tensor, y: Tensor) -> Tensor:
        Watched.joint.append(self.current_epoch)
        return super().joint_loss(x, y)


def test_the_joint_loss_begins_after_the_extra_epochs_in_every_fit() -> None:
    """16 samples in batches of 8 make two steps per epoch.

    So the loss of the extra epochs can be reported apart from the joint one.
    """
    Watched.joint, updates = [], Updates()
    model = Watched(backbone=SMALL, latent_dim=5, warmup_epochs=2)
    assert model.extra_epochs == 2

    federate(model, rounds=2, max_epochs=3, callbacks=[updates])

    steps, clients, rounds = 2, 3, 2
    assert [update.steps for update in updates.all] == [steps * (2 + 3)] * clients * rounds
    assert sorted(Watched.joint) == sorted([2, 3, 4] * steps * clients * rounds)


def test_without_a_warm_up_joint_epochs_move_everything() -> None:
    model, updates = small(warmup_epochs=0), Updates()
    model.ensure_built(SPEC)
    before = clone(model.state_dict())
    federation = federate(model, callbacks=[updates]).federation
    assert [update.steps for update in updates.all] == [2] * 3
    first, second = federation.client_state(0), federation.client_state(1)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], first[name])}
    assert moved == {"encoder", "decoder", "classifier"}
    differ = {name for name in first if not torch.equal(first[name], second[name])}
    assert differ and all(name.startswith("encoder.") for name in differ)


# The federation


def tensors(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of nested data, with the path to each."""
    if isinstance(tree, Tensor):
        yield "", tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from ((f"{key}.{path}".rstrip("."), tensor) for path, tensor in tensors(value))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)


def test_no_encoder_tensor_leaves_a_client_and_a_resume_keeps_them(tmp_path: Path) -> None:
    """Compared by name, key and value: the same weights under another name count too."""
    updates = Updates()

    def fit(rounds: int, run_dir: Path, ckpt_path: str | None = None, **kwargs: Any) -> list[State]:
        made = trainer(rounds=rounds, run_dir=run_dir, keep_optimizers=True, **kwargs)
        made.fit(small(lambda_sp=0.1), Images(), ckpt_path=ckpt_path)
        return [made.federation.client_state(client) for client in range(3)]

    states = fit(2, tmp_path / "whole", callbacks=[updates])
    assert len(updates.all) == 6
    encoders = [{k: v for k, v in own.items() if k.startswith("encoder.")} for own in states]
    sizes = {v.shape for v in encoders[0].values() if v.ndim > 1} | {
        (sum(v.numel() for v in encoders[0].values()),)
    }
    shared = {v.shape for k, v in states[0].items() if k not in encoders[0]}
    own = sizes - shared  # shapes that only the encoder has, the latent's among them
    assert torch.Size((5, 64)) in own
    last = {update.client: update for update in updates.all}
    for update in updates.all:
        sent = list(tensors({"state": update.state, "extras": update.extras}))
        assert sent and not any("encoder" in name or tensor.shape in own for name, tensor in sent)
    for client, encoder in enumerate(encoders):
        learned = [v for v in encoder.values() if v.ndim > 1]
        for _, tensor in tensors([last[client].state, last[client].extras]):
            assert not any(tensor.shape == v.shape and torch.equal(tensor, v) for v in learned)

    fit(1, tmp_path / "parts")
    resumed = fit(2, tmp_path / "parts", "last")
    assert all(equal_states(a, b) for a, b in zip(states, resumed, strict=True))


def test_without_the_reconstruction_it_is_the_plain_classifier() -> None:
    """With ``fusion_scale: 0`` and no warm-up, C takes FedAvg's steps, bit for bit."""
    fused = built(fusion_scale=0.0, warmup_epochs=0, lr=0.1, momentum=0.9, weight_decay=5e-4)
    plain = Classifier(SMALL, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4))
    plain.ensure_built(SPEC)
    prefix = fused.head
    plain.network.load_state_dict(
        {k.removeprefix(prefix): v for k, v in fused.state_dict().items() if k.startswith(prefix)}
    )
    ours, theirs = (federate(model, rounds=3).federation.state for model in (fused, plain))  # type: ignore[union-attr]
    heads = {k.removeprefix(prefix): v for k, v in ours.items() if k.startswith(prefix)}
    assert equal_states(heads, {k.removeprefix("network."): v for k, v in theirs.items()})


class Starts(Callback):
    """Records the encoder that each fit starts from, on the class: every fit has a copy."""

    seen: list[tuple[int, int, State]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loader = trainer.train_dataloader
        Starts.seen.append((loader.round, loader.client, clone(pl_module.encoder.state_dict())))


def test_a_client_that_joins_late_starts_from_the_encoder_of_round_one() -> None:
    Starts.seen = []
    model = built()
    initial = clone(model.encoder.state_dict())
    federate(model, rounds=6, schedule=Synchronous(1), callbacks=[Starts()])
    first = {client: (round, encoder) for round, client, encoder in reversed(Starts.seen)}
    assert first.keys() == {0, 1, 2} and max(round for round, _ in first.values()) > 2
    assert all(equal_states(encoder, initial) for _, encoder in first.values())
    later = [encoder for round, client, encoder in Starts.seen if round > first[client][0]]
    assert later and not any(equal_states(encoder, initial) for encoder in later)


def test_multi_label() -> None:
    found = federate(small(), Images(labels=True)).test()[0]
    assert {"accuracy", "f1_macro", "reconstruction", "loss"} <= found.keys()


def test_exported_model_is_read_back(tmp_path: Path) -> None:
    data = Images()
    run = trainer(rounds=1).prepare(small(autoencoder="unet", fusion="concat", lambda_sp=0.1), data)
    run.evaluator.load(run.federation.client_state(None))
    export_model(run.evaluator.model, tmp_path / "model.ckpt")
    model = FusedSpaceFed.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert model.fusion == "concat" and model(batch()[0]).shape == (6, 3)


# Errors


@pytest.mark.parametrize("shape", [(20,), (1, 3, 3)])
def test_data_that_it_cannot_take(shape: tuple[int, ...]) -> None:
    with pytest.raises(FlsuiteError, match="4 x 4"):
        FusedSpaceFed().ensure_built(DataSpec(shape, 3))
