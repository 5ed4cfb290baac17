"""The inversion attack: its prior, its search, and its use of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from flsuite.aggregators import FedAvg, FedFisher, OTFusion
from flsuite.common.errors import FlsuiteError
from flsuite.data import Digits, SoleOwner
from flsuite.data.federated import DataSpec
from flsuite.data.images import Scaling
from flsuite.metrics.fisher import kfac_factors
from flsuite.models import MLP, Classifier, LeNet5
from flsuite.models.layers import read_layers
from flsuite.studies.inversion import (
    GAN,
    GANTraining,
    Inversion,
    Target,
    kept_models,
    known_to_server,
    mean_model,
    public_images,
    reconstruction_figure,
    sent_factors,
    share_recognised,
)
from flsuite.studies.inversion.attack import Generator, _Critic, gradient_penalty
from flsuite.studies.inversion.target import batch_factors
from tests.conftest import trainer

PLAIN = Scaling(torch.tensor([1 / 255]), torch.zeros(1), 1)  # images within [0, 1], unchanged


def classifier(backbone: Any, side: int = 16, classes: int = 4) -> Classifier:
    """Return a built model whose weights come from a fixed seed."""
    torch.manual_seed(0)
    model = Classifier(backbone)
    model.ensure_built(DataSpec((1, side, side), classes))
    return model


def images(n: int, side: int = 16, seed: int = 0) -> Tensor:
    return torch.rand(n, 1, side, side, generator=torch.Generator().manual_seed(seed))


class Linear(LightningModule):
    """A linear classifier of single pixels, with logits that are a function of the pixels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.layer.weight.data.copy_(weight)

    def logits(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


class Affine(nn.Module):
    """A generator that maps latents within [-1, 1] onto the pixels of an image within [0, 1]."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, z: Tensor) -> Tensor:
        return ((z + 1) / 2).view(-1, 1, self.side, self.side)


class Indifferent(nn.Module):
    """A critic that considers all images equally real."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1) * 0


def pixels(side: int) -> GAN:
    return GAN(Affine(side), Indifferent(), side * side)


def test_the_gradient_penalty_of_a_linear_critic_is_its_closed_form() -> None:
    weight = torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    layer = nn.Linear(9, 1)
    layer.weight.data.copy_(weight)
    critic = nn.Sequential(nn.Flatten(), layer, nn.Flatten(0))

    penalty = gradient_penalty(critic, images(5, side=3))
    penalty.backward()

    norm = weight.norm()
    assert penalty.item() == pytest.approx(float((norm - 1) ** 2), rel=1e-6)
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, 2 * (norm - 1) * weight / norm)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 9, 13)])
def test_generator_and_critic_fit_the_shape(shape: tuple[int, ...]) -> None:
    made = Generator(shape, width=2, latent=5)(torch.randn(4, 5))
    assert made.shape == (4, *shape)
    assert made.min() >= 0
    assert made.max() <= 1
    assert _Critic(shape, width=2)(made).shape == (4,)


def test_a_gan_learns_where_the_ink_is_and_is_a_function_of_its_seed() -> None:
    """Train on images that are bright only on the left."""
    real = 0.2 * images(64, side=8)
    real[..., :4] += 0.8
    training = GANTraining(epochs=12, batch_size=16, width=4, latent=4, lr=2e-2, critic_steps=1)
    gan = training.train(real, seed=0)
    made = gan.generator(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
    assert made[..., :4].mean() > 0.6
    assert made[..., 4:].mean() < 0.4

    short = replace(training, epochs=1, critic_steps=2)
    before = torch.random.get_rng_state()
    a, b, c = (short.train(real, seed).generator.state_dict()["0.weight"] for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(a, b) and not torch.equal(a, c)


def target(model: Any, factors: Any = None) -> Target:
    return Target(model, model.state_dict(), PLAIN, factors)


def test_the_attack_finds_the_optimum_of_a_linear_model() -> None:
    """Two classes: the loss falls in every pixel, by the sign of the weights' difference."""
    weight = torch.randn(2, 9, generator=torch.Generator().manual_seed(3))
    model = Linear(weight)
    attack = Inversion(steps=200, identity=100.0, lr=0.5)
    found = attack(pixels(3), Target(model, model.state_dict(), PLAIN), 1, images=4, seed=0)

    best = (weight[1] > weight[0]).float().view(1, 1, 3, 3)
    torch.testing.assert_close(found.images, best.expand(4, -1, -1, -1))
    lowest = nn.functional.cross_entropy(model.logits(best), torch.tensor([1]))
    torch.testing.assert_close(found.losses, lowest.detach().expand(4))


def test_the_critic_decides_where_the_target_says_nothing() -> None:
    class Bright(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).sum(1)

    gan = GAN(Affine(3), Bright(), 9)
    found = Inversion(steps=50, lr=0.1)(gan, target(Linear(torch.zeros(2, 9))), 0, 2, 0)
    torch.testing.assert_close(found.images, torch.ones(2, 1, 3, 3))


def test_the_best_restart_is_kept() -> None:
    aim = target(classifier(MLP(hidden=(8,)), side=4))
    one, five = (
        Inversion(steps=3, restarts=restarts)(pixels(4), aim, 2, images=6, seed=0).losses
        for restarts in (1, 5)
    )
    assert (five <= one + 1e-6).all()
    assert (five < one).any()


@pytest.mark.parametrize("bias", [False, True])
def test_factors_are_those_that_a_client_measures(bias: bool) -> None:
    model = classifier(LeNet5(bias=bias)).eval()
    layers, _ = read_layers(model, model.state_dict())
    x = images(6)
    found = batch_factors(model, layers, x, groups=2)

    for group, part in enumerate(x.split(3)):
        expected = kfac_factors(model, layers, [(part,)], "multiclass")
        for name, pair in expected.items():
            for kind, factor in pair.items():
                torch.testing.assert_close(found[name][kind][group], factor)


def factors_of(model: Any, x: Tensor) -> Any:
    """Return the factors that a client with these images measures."""
    layers, _ = read_layers(model, model.state_dict())
    return kfac_factors(model, layers, [(x,)], "multiclass")


def test_the_distance_is_zero_for_images_with_the_clients_factors() -> None:
    model, own, others = classifier(LeNet5(bias=False)).eval(), images(4), images(4, seed=1)
    aim = target(model, factors_of(model, own))
    same, different = aim.distances(torch.stack([own.flip(0), others])).tolist()
    assert same == pytest.approx(0, abs=1e-6 * different)
    assert different > 0
    with torch.no_grad():
        assert aim.distances(others[None]).item() == pytest.approx(different, rel=1e-6)


def test_a_relative_distance_counts_every_factor_alike() -> None:
    """Images with no ink are at distance 1 from each factor of the inputs."""
    model = classifier(LeNet5(bias=False)).eval()
    layers, _ = read_layers(model, model.state_dict())
    factors, black = factors_of(model, images(4)), torch.zeros(1, 2, 1, 16, 16)
    found = batch_factors(model, layers, black[0])
    of_gradients = sum(
        ((found[name]["g"][0] - pair["g"]).square().sum() / pair["g"].square().sum()).item()
        for name, pair in factors.items()
    )
    distance = target(model, factors).distances(black, relative=True).item()
    assert distance == pytest.approx(len(layers) + of_gradients, rel=1e-5)


def test_factors_pull_images_towards_the_clients() -> None:
    """A model that says nothing about the label still has the inputs' second moments."""
    model = Linear(torch.zeros(2, 4))
    model.spec = DataSpec((1, 2, 2), 2)  # type: ignore[assignment]
    own = torch.tensor([0.9, 0.1, 0.1, 0.9]).view(1, 1, 2, 2)
    attack = Inversion(steps=100, factors=1.0, relative=False, lr=0.1, restarts=1)
    found = attack(pixels(2), target(model, factors_of(model, own)), 0, images=1, seed=0)
    torch.testing.assert_close(found.images, own, atol=1e-3, rtol=0)


def digits(clients: int = 3) -> Digits:
    return Digits(clients=clients, partition=SoleOwner(label=4), val_fraction=0.0)


def test_the_servers_images_are_those_of_others() -> None:
    data = digits()
    data.setup()
    public = public_images(data.federated, owner=0, label=4, samples=200)
    assert public.shape == (200, 1, 8, 8)
    assert public.max() == 1

    def rows(x: Tensor) -> set[bytes]:
        return {row.numpy().tobytes() for row in x}

    stored = (public * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    federated = data.federated
    assert not rows(stored) & rows(federated.train.x[federated.train_rows(0)])

    with pytest.raises(FlsuiteError, match="public_images: samples must be within 1 and"):
        public_images(federated, owner=0, label=4, samples=5000)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of FedAvg with kept client models."""
    folder = tmp_path_factory.mktemp("run") / "kept"
    made = trainer(rounds=1, keep_updates=True, run_dir=str(folder), seed=1)
    made.fit(Classifier(MLP(hidden=(8,))), digits())
    torch.save(made.federation.state, folder / "global.pt")
    return folder


def test_the_mean_of_the_kept_models_is_fedavgs(run_dir: Path) -> None:
    models, mean = kept_models(run_dir), mean_model(run_dir)
    assert list(models) == [0, 1, 2]
    for name, value in torch.load(run_dir / "global.pt", weights_only=True).items():
        assert torch.equal(mean[name], value)


def test_factors_are_those_that_fedfisher_sends(run_dir: Path) -> None:
    data = digits()
    data.use_seed(1)
    data.setup()
    model = Classifier(MLP(hidden=(8,)))
    model.ensure_built(data.spec)
    model.load_state_dict(kept_models(run_dir)[1])
    found = sent_factors(model, data.federated, client=1, seed=1, samples=50)

    seen: dict[str, Any] = {}

    class Listening(FedFisher):
        def terms(self, update: Any, layout: Any) -> Any:
            seen[update.client] = update.extras["fisher"]
            return super().terms(update, layout)

    aggregator = Listening(samples=50, select=False)
    made = trainer(rounds=1, aggregator=aggregator, from_updates=str(run_dir), seed=1)
    made.fit(Classifier(MLP(hidden=(8,))), digits())
    for name, pair in found.items():
        for kind, factor in pair.items():
            assert torch.equal(factor, seen[1][name][kind])


def test_a_run_or_round_without_kept_models_is_refused(run_dir: Path, tmp_path: Path) -> None:
    for read in (kept_models, mean_model):
        with pytest.raises(FlsuiteError, match=r"--trainer\.keep_updates true"):
            read(tmp_path)
    with pytest.raises(FlsuiteError, match="no clients' models of round 2"):
        kept_models(run_dir, round=2)


def test_a_model_without_logits_is_refused() -> None:
    class Silent(LightningModule):
        pass

    with pytest.raises(FlsuiteError, match=r"Silent has none: add a method logits\(x\)"):
        Target(Silent(), {}, PLAIN)


def test_what_a_server_has_follows_from_the_algorithm() -> None:
    kfac, diag = FedFisher("kfac"), FedFisher("diag")
    assert known_to_server(FedAvg(), secure_sum=False) == ("client", "mean")
    assert known_to_server(kfac, secure_sum=False) == ("client", "mean", "factors")
    assert known_to_server(FedAvg(), secure_sum=True) == ("mean",)
    assert known_to_server(diag, secure_sum=True) == ("mean",)
    assert known_to_server(kfac, secure_sum=True) == ("mean", "factors")
    with pytest.raises(FlsuiteError, match="OTFusion needs every client's own update"):
        known_to_server(OTFusion(), secure_sum=True)


@pytest.mark.parametrize(
    ("made", "arguments", "text"),
    [
        (Inversion, {"steps": 0}, "steps must be at least 1"),
        (Inversion, {"lr": 0.0}, "lr must be positive"),
        (Inversion, {"momentum": 1.0}, "momentum must be above 0 and below 1"),
        (Inversion, {"identity": -1.0}, "identity must be at least 0"),
        (Inversion, {"factors": float("nan")}, "factors must be at least 0"),
        (GANTraining, {"epochs": 0}, "epochs must be at least 1"),
        (GANTraining, {"penalty": -1.0}, "penalty must be at least 0"),
    ],
)
def test_bad_arguments_are_refused(made: Any, arguments: Any, text: str) -> None:
    with pytest.raises(FlsuiteError, match=text):
        made(**arguments)


def test_images_that_a_gan_cannot_take_are_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"\(4, 4\) is too small: set data.resize"):
        GANTraining(epochs=1).train(images(4, side=4), 0)
    with pytest.raises(FlsuiteError, match=r"with n above 0, got \(0, 1, 16, 16\)"):
        GANTraining(epochs=1).train(images(0), 0)


def test_the_share_recognised_is_the_accuracy_on_the_label() -> None:
    judge, x = target(classifier(MLP(hidden=(8,)), side=4)), images(50, side=4)
    expected = (judge.logits(x).argmax(1) == 1).float().mean().item()
    assert share_recognised(judge, x, 1) == pytest.approx(expected)


def test_the_figure_has_a_row_per_label() -> None:
    figure = reconstruction_figure({"real": images(9), "found": images(2)}, columns=4)
    assert [text.get_text() for panel in figure.axes for text in panel.texts] == ["real", "found"]
    assert sum(len(panel.images) for panel in figure.axes) == 4 + 2
    with pytest.raises(FlsuiteError, match="columns must be at least 1"):
        reconstruction_figure({"real": images(9)}, columns=0)
