"""Gradient dissimilarity: a case by hand, the decomposition, and its callback."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flsuite.aggregators import LocalOnly
from flsuite.callbacks import GradientDissimilarity
from flsuite.callbacks.dissimilarity import gradient_batches, head_gradients, head_parameters
from flsuite.common.errors import FlsuiteError
from flsuite.data import Digits, Dirichlet, MedMNIST
from flsuite.data.federated import Rows
from flsuite.metrics import RunningDissimilarity
from flsuite.models import CNN, MLP, Backbone, Classifier, ClientModel, FusedSpaceFed
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer

FUSED = ("gamma", "gamma_relative", "gamma_orig", "R", "Phi", "calibrated", "gamma_seconds")


def images(clients: int = 3) -> Digits:
    made = digits(clients, train_samples=60, val_fraction=0.0, standardize=False)
    made.batch_size = 8
    return made


def fused(**kwargs: Any) -> FusedSpaceFed:
    return FusedSpaceFed(backbone=CNN(channels=(2, 4), hidden=(8,)), latent_dim=4, **kwargs)


def fit(
    model: ClientModel, data: Any = None, callback: Any = None, **kwargs: Any
) -> FederatedTrainer:
    callbacks = [callback] if callback else None
    made = trainer(**{"rounds": 2, "evaluate_every": 100, "callbacks": callbacks, **kwargs})
    made.fit(model, data or images())
    return made


def logged(made: FederatedTrainer, metric: str) -> dict[int, float]:
    """Return the values of a metric by round."""
    rows = made.run.folder.table.rows
    return {
        row[0]: row[8] for row in rows if (row[5], row[6], row[7]) == ("global", "train", metric)
    }


def assert_identity(found: dict[str, float], fused_gamma: str) -> None:
    """Compare to 1e-5 of the largest term."""
    largest = max(abs(found[name]) for name in (fused_gamma, "gamma_orig", "R", "Phi"))
    assert largest > 0
    assert found[fused_gamma] == pytest.approx(
        found["gamma_orig"] + found["R"] + found["Phi"], rel=1e-5, abs=1e-5 * largest
    )


# The metric, and its naive twin: all gradients at once


def gradient_dissimilarity(gradients: Tensor) -> float:
    """Return ``Gamma`` of stacked gradients ``(clients, d)``."""
    return float(_centred(gradients).square().sum(1).mean())


def relative_dissimilarity(gradients: Tensor) -> float:
    """Return ``Gamma / ||m||^2`` of gradients ``(clients, d)``, invariant to the loss's scale."""
    square = float(gradients.double().mean(0).square().sum())
    return gradient_dissimilarity(gradients) / square


def decompose(original: Tensor, fused: Tensor) -> dict[str, float]:
    """Decompose the dissimilarity of gradients ``(clients, d)`` at plain and at fused inputs.

    Each part comes from its own definition. ``calibrated`` is 1 if ``R + Phi < 0``, else 0.
    """
    # float64 before the difference, as plain and fused gradients are nearly equal.
    plain, change = _centred(original), _centred(fused.double() - original.double())
    spread, cross = float(change.square().sum(1).mean()), 2 * float((plain * change).sum(1).mean())
    return {
        "gamma_orig": gradient_dissimilarity(original),
        "R": spread,
        "Phi": cross,
        "gamma_fused": gradient_dissimilarity(fused),
        "calibrated": float(spread + cross < 0),
    }


def _centred(gradients: Tensor) -> Tensor:
    gradients = gradients.double()
    return gradients - gradients.mean(0)


def test_by_hand() -> None:
    """Clients at (1, 0) and (3, 4): mean (2, 2), squared distance 5 to each, ||m||^2 8."""
    gradients = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    assert gradient_dissimilarity(gradients) == 5
    assert relative_dissimilarity(gradients) == 5 / 8
    # At the fused input both give (2, 1): r = (1, 1), (-1, -3) with mean (0, -1),
    # so R = 5 and Phi = -10.
    found = decompose(gradients, torch.tensor([[2.0, 1.0], [2.0, 1.0]]))
    assert found == {"gamma_orig": 5, "R": 5, "Phi": -10, "gamma_fused": 0, "calibrated": 1}
    assert decompose(gradients, 2 * gradients)["calibrated"] == 0


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_running_equals_stacked(offset: float) -> None:
    g = torch.Generator().manual_seed(0)
    original = torch.randn(9, 50, generator=g, dtype=torch.float64) + offset
    other = original + 0.5 * torch.randn(9, 50, generator=g, dtype=torch.float64)
    running = RunningDissimilarity()
    for o, f in zip(original, other, strict=True):
        running.add(f, o)
    found, expected = running.summary(), decompose(original, other)
    assert_identity(expected, "gamma_fused")
    expected["gamma"] = expected.pop("gamma_fused")
    expected["gamma_relative"] = relative_dissimilarity(other)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-8)
    assert_identity(found, "gamma")


def test_no_mean_gradient() -> None:
    for gradients, expected in (([[1.0], [-1.0]], float("inf")), ([[0.0], [0.0]], 0)):
        running = RunningDissimilarity()
        for gradient in gradients:
            running.add(torch.tensor(gradient))
        assert running.summary()["gamma_relative"] == expected


# The callback


@pytest.fixture(scope="module")
def unwatched() -> FederatedTrainer:
    torch.set_num_threads(1)
    return fit(fused(fusion="concat"))


@pytest.fixture(scope="module")
def watched() -> FederatedTrainer:
    torch.set_num_threads(1)
    return fit(fused(fusion="concat"), callback=GradientDissimilarity(every=1, batches=None))


def assert_decomposed(made: FederatedTrainer) -> None:
    for round in range(1, made.round + 1):
        found = {name: logged(made, name)[round] for name in FUSED}
        assert_identity(found, "gamma")
        assert found["gamma"] > 0 and found["gamma_seconds"] > 0
        assert found["calibrated"] == float(found["R"] + found["Phi"] < 0)


def test_decomposition_of_a_federation(watched: FederatedTrainer) -> None:
    assert watched.round == 2
    assert_decomposed(watched)


def test_decomposition_on_breastmnist(real_data: Path) -> None:
    callback = GradientDissimilarity(every=1, batch_norm="eval")
    options = {"clients": 3, "partition": Dirichlet(0.3), "standardize": False, "resize": 16}
    data = MedMNIST("breastmnist", root=str(real_data), download=False, **options)
    assert_decomposed(fit(fused(), data, callback, rounds=1))


def test_callback_equals_the_stacked_gradients(unwatched: FederatedTrainer) -> None:
    """Against the stacked gradients of a new copy of each client's model."""
    federation, run = unwatched.federation, unwatched.run
    found = GradientDissimilarity(batches=2, batch_norm="eval").measure(run, 2)
    plain, both = [], []
    for client in range(3):
        model = fused(fusion="concat")
        model.ensure_built(federation.data.spec)
        model.load_state_dict(federation.client_state(client))
        model.eval()
        batches = list(gradient_batches(federation.data, client, run.options.seed, 2, 2))
        samples = sum(len(y) for _, y in batches)
        for k, rows in enumerate((plain, both)):
            loss = sum(model.head_losses(b)[k] * len(b[1]) for b in batches) / samples
            parts = torch.autograd.grad(loss, list(model.classifier.parameters()))
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
    expected = decompose(torch.stack(plain), torch.stack(both))
    expected["gamma"] = expected.pop("gamma_fused")
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_leaves_no_trace(unwatched: FederatedTrainer, watched: FederatedTrainer) -> None:
    """Weights, statistics and private entries equal those of a run without it, bit for bit."""
    network = CNN(channels=(2, 4), hidden=(8,), norm="batch")
    callback = GradientDissimilarity(every=1, batches=None)
    pairs = [(unwatched, watched)]
    pairs.append((fit(Classifier(network)), fit(Classifier(network), callback=callback)))
    for without, with_it in pairs:
        for client in range(3):
            assert equal_states(
                without.federation.client_state(client), with_it.federation.client_state(client)
            )


def test_resident_model_and_random_numbers_are_given_back(unwatched: FederatedTrainer) -> None:
    model = unwatched.run.evaluator.model.train()
    model.decoder.eval()  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model.zero_grad()
    found = [GradientDissimilarity().measure(unwatched.run, round) for round in (2, 2, 3)]
    assert found[0] == found[1] != found[2], "the same batches every time"
    assert torch.equal(torch.rand(1), expected)
    assert all(p.grad is None for p in model.parameters())
    assert equal_states(dict(model.state_dict()), before)
    assert model.encoder.training and not model.decoder.training  # type: ignore[union-attr]
    assert model._trainer is not None


def test_identical_clients() -> None:
    """Clients have the same samples in different orders: the rest is rounding."""
    data = images()
    data.seed = 0  # its own seed, assigned once
    data.setup()
    data.federated.train.rows = Rows.of([np.arange(60)] * 3)
    made = fit(Classifier(MLP(hidden=(8,))), data, GradientDissimilarity(every=1, batches=None))
    assert len(logged(made, "gamma_relative")) == 2
    assert all(value < 1e-10 for value in logged(made, "gamma_relative").values())


def test_only_shared_parameters_count_and_a_classifier_has_no_decomposition(
    unwatched: FederatedTrainer,
) -> None:
    model = Classifier(MLP(hidden=(8,)), private=["network.1"])
    callback = GradientDissimilarity(every=2, clients=2)
    made = fit(model, images(4), callback, rounds=3)
    assert list(logged(made, "gamma")) == list(logged(made, "gamma_relative")) == [2, 3]
    assert not logged(made, "gamma_orig") and not logged(made, "Phi")
    counted = sum(p.numel() for p in head_parameters(model, made.federation.state))
    assert 0 < counted < sum(p.numel() for p in model.parameters())
    drawn = callback._measured(range(4), 3)
    assert len(drawn) == 2 and drawn == GradientDissimilarity(clients=2)._measured(range(4), 3)
    assert list(GradientDissimilarity(clients=9)._measured(range(4), 3)) == [0, 1, 2, 3]

    whole = unwatched.run.evaluator.model
    found = {id(p) for p in head_parameters(whole, unwatched.federation.state)}
    assert found == {id(p) for p in whole.classifier.parameters()}


def test_gradient_of_batches_is_that_of_all_samples() -> None:
    """Without BatchNorm, batches of any size give the gradient of the whole."""
    data = images(1)
    data.setup()
    model = Classifier(MLP(hidden=(8,)))
    model.ensure_built(data.spec)
    parameters = list(model.parameters())
    cut = gradient_batches(data.federated, 0, 0, 1, None)
    (found,) = head_gradients(model, parameters, cut, torch.device("cpu"))
    x, y = data.federated.scaling(data.federated.train.x), data.federated.train.y
    parts = torch.autograd.grad(model.training_step((x, y), 0), parameters)
    expected = torch.cat([part.reshape(-1) for part in parts]).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_client_may_have_one_sample() -> None:
    data = images(1)
    data.setup()
    data.federated.train.rows.values = data.federated.train.rows.values[:1]
    data.federated.train.rows.offsets = torch.tensor([0, 1])
    ((x, y),) = gradient_batches(data.federated, 0, 0, 1, 1)
    assert len(x) == len(y) == 2


class _Silent(Classifier):
    """A model that would step its optimizer by hand, and returns no loss."""

    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return None


class _Logging(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        return {"loss": loss}


class _Dropout(Backbone):
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, outputs))


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_any_training_step_works() -> None:
    made = fit(_Logging(_Dropout()), callback=GradientDissimilarity(every=1))
    assert len(logged(made, "gamma")) == 2


def test_errors() -> None:
    for kwargs, named in (
        ({"every": 0}, "every"),
        ({"batches": 0}, "batches"),
        ({"clients": 1}, "clients"),
        ({"batch_norm": "off"}, "batch_norm"),
    ):
        with pytest.raises(FlsuiteError, match=named):
            GradientDissimilarity(**kwargs)  # type: ignore[arg-type]
    made = fit(_Silent(MLP(hidden=(8,))), rounds=1)
    with pytest.raises(FlsuiteError, match="head_losses"):
        GradientDissimilarity().measure(made.run, 1)
    with pytest.raises(FlsuiteError, match="shares no"):
        head_parameters(made.run.evaluator.model, {})


def test_a_federation_without_shared_parameters_is_refused_before_it_trains(tmp_path: Path) -> None:
    made = {"aggregator": LocalOnly(), "run_dir": str(tmp_path / "run")}
    with pytest.raises(FlsuiteError, match=r"shares no .* remove the callback"):
        fit(classifier(), callback=GradientDissimilarity(), **made)
    assert not (tmp_path / "run").exists()
