"""ACVAE: its terms against torch.distributions, predictions without labels, and training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch.distributions import Independent, Normal, kl_divergence

from flsuite.aggregators import Centralized
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import clone
from flsuite.data import DataSpec, Synthetic
from flsuite.data.federated import FederatedData
from flsuite.federation import Engine, InProcess, Vectorized
from flsuite.models import ACVAE, flows as gaussians
from tests.conftest import digits, trainer
from tests.plain import plain_trainer

IMAGES = DataSpec((1, 8, 8), 3)
TABLE = DataSpec((6,), 3)


def small(spec: DataSpec = IMAGES, **kwargs: Any) -> ACVAE:
    torch.manual_seed(0)
    made = ACVAE(**{"latent_dim": 4, "width": 4, "hidden": (8, 4), **kwargs})
    made.ensure_built(spec)
    return made


def batch(spec: DataSpec = IMAGES, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(n, *spec.shape, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(n) % spec.num_classes


def normal(mean: torch.Tensor, log_variance: torch.Tensor) -> Independent:
    return Independent(Normal(mean, (0.5 * log_variance).exp()), 1)


def class_densities(model: ACVAE, h: torch.Tensor) -> torch.Tensor:
    priors = zip(model.prior_mean, model.prior_log_variance, strict=True)
    return torch.stack([normal(*prior).log_prob(h) for prior in priors], 1)


def test_gaussians_are_those_of_torch_distributions() -> None:
    torch.manual_seed(0)
    m, v, pm, pv, x = torch.randn(5, 7, 4, dtype=torch.float64)
    torch.testing.assert_close(
        gaussians.kl_divergence(m, v, pm, pv), kl_divergence(normal(m, v), normal(pm, pv))
    )
    torch.testing.assert_close(gaussians.log_density(x, m, v), normal(m, v).log_prob(x))
    torch.manual_seed(1)
    drawn = gaussians.sample(m[:1].expand(40000, 4), v[:1].expand(40000, 4))
    torch.testing.assert_close(drawn.mean(0), m[0], atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.var(0), v[0].exp(), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("spec", [IMAGES, TABLE])
@pytest.mark.parametrize("reconstruction", ["mse", "bce"])
def test_the_loss_is_its_three_terms(spec: DataSpec, reconstruction: Any) -> None:
    weights = {"reconstruction_weight": 2.0, "kl_weight": 0.3, "cls_weight": 0.7}
    model = small(spec, reconstruction=reconstruction, dropout=0.0, **weights)
    model.eval()  # with running statistics, both calls see the same networks
    x, y = batch(spec)
    torch.manual_seed(5)
    loss = model.training_step((x, y), 0)
    torch.manual_seed(5)
    mean, log_variance = model.posterior(x)
    h = model.map(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))
    out = model.decoder(h).sigmoid()
    error = (
        -(x * out.log() + (1 - x) * (1 - out).log())
        if reconstruction == "bce"
        else 0.5 * (out - x) ** 2
    )
    prior = normal(model.prior_mean[y], model.prior_log_variance[y])
    kl = kl_divergence(normal(mean, log_variance), prior)
    joint = class_densities(model, h)
    cross_entropy = (joint.logsumexp(1) - joint.gather(1, y[:, None]).squeeze(1)).mean()
    expected = 2.0 * error.flatten(1).sum(1).mean() + 0.3 * kl.mean() + 0.7 * cross_entropy
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_a_prediction_is_bayes_rule_and_needs_no_label() -> None:
    model = small(class_prior=[1.0, 2.0, 1.0])
    model.eval()
    x, y = batch()
    h = model.latent(x)
    by_hand = class_densities(model, h) + torch.tensor([0.25, 0.5, 0.25]).log()
    torch.testing.assert_close(model(x), by_hand)
    given, permuted = model.evaluation_step((x, y)), model.evaluation_step((x, (y + 1) % 3))
    assert torch.equal(given["scores"], permuted["scores"])
    assert torch.equal(given["reconstruction"], permuted["reconstruction"])
    assert not torch.equal(given["kl"], permuted["kl"])
    assert torch.equal(given["scores"], model(x).softmax(1))


def test_the_mapper_starts_as_the_identity() -> None:
    model = small()
    z = torch.randn(5, 4)
    assert torch.equal(model.map(z), z)


def test_terms_are_float32_and_finite_under_bf16_and_far_out() -> None:
    model = small()
    x, y = batch()
    with torch.no_grad():
        model.prior_log_variance.fill_(-1e4)
        model.encoder.latent.bias.fill_(1e3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.training_step((x, y), 0)
        assert model.class_logits(model.latent(x)).dtype == torch.float32
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert model.posterior(x)[1].abs().max() <= 6 and model.priors()[1].min() == -6


def test_samples_reconstructions_and_pictures_have_the_shape_of_the_data() -> None:
    model, table = small(), small(TABLE)
    x, _ = batch()
    assert model.reconstruct(x).shape == x.shape
    assert table.reconstruct(batch(TABLE)[0]).shape == (6, 6)
    drawn = table.sample(torch.tensor([0, 0, 2]))
    assert drawn.shape == (3, 6) and drawn.min() >= 0 and drawn.max() <= 1
    pictures = model.eval().pictures(x)
    assert list(pictures["reconstructions"]) == ["image", "reconstruction"]
    assert list(pictures["samples"]) == ["0", "1", "2"]
    for grid in pictures.values():
        assert all(images.shape == (6, 1, 8, 8) for images in grid.values())
    assert table.pictures(batch(TABLE)[0]) == {}


@pytest.mark.long
def test_trained_centrally_it_classifies_digits_and_samples_the_given_class() -> None:
    made = trainer(aggregator=Centralized(), rounds=5, max_epochs=2, gradient_clip_val=0.5)
    model = ACVAE(
        latent_dim=8, width=8, cls_weight=5.0, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3)
    )
    made.fit(model, digits(standardize=False, train_samples=None))
    assert made.test()[0]["accuracy"] > 0.93
    model.eval()
    with torch.no_grad():
        wanted = torch.arange(10).repeat_interleave(20)
        found = model(model.sample(wanted)).argmax(1)
    assert (found == wanted).float().mean() > 0.8
    rows = {row[7]: row[8] for row in made.run.folder.table.rows if row[5:7] == ("global", "test")}
    assert rows["kl"] > 0.1 and rows["reconstruction"] > 0


def test_it_learns_a_table_and_a_plain_trainer_fits_it() -> None:
    data = Synthetic(features=6, classes=3, samples=600, clients=2, batch_size=32)
    model = ACVAE(
        latent_dim=4,
        hidden=(16,),
        dropout=0.0,
        cls_weight=5.0,
        optimizer=lambda p: torch.optim.AdamW(p, lr=5e-3),
    )
    data.setup()
    for split in (data.federated.train, data.federated.val, data.federated.test):
        split.x.sigmoid_()
    before = float((data.federated.test.y == 0).float().mean())
    plain_trainer(max_epochs=8).fit(model, datamodule=data)
    model.eval()
    right = (model(data.federated.test.x).argmax(1) == data.federated.test.y).float().mean()
    assert right > before + 0.2


def test_the_label_frequencies_of_a_fit_survive_as_weights() -> None:
    """The state holds weights only: pi is a setting, not a shared tensor."""
    assert "log_pi" not in clone(small().state_dict())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class_prior": [1.0, 0.0, 1.0]}, "class_prior must be positive"),
        ({"class_prior": [1.0, 1.0]}, "2 numbers for 3 classes"),
        ({"spec": DataSpec((1, 8, 8), 3, "multilabel")}, "one class per sample"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FlsuiteError, match=said):
        small(**settings)


@pytest.mark.draws
def test_predict_writes_reconstructions_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(rounds=1, run_dir=str(tmp_path / "run"), enable_progress_bar=True)
    made.fit(ACVAE(latent_dim=4, width=4), digits(clients=3, standardize=False))
    capsys.readouterr()
    made.predict()
    said = capsys.readouterr().out
    assert all(name in said for name in ("predictions.csv", "reconstructions.png", "samples.png"))
    files = [tmp_path / "run" / f"{name}.png" for name in ("reconstructions", "samples")]
    few, samples = map(imread, files)
    assert len(samples) > 3 * len(few), "ten rows, and two"
    images = 10 * (56 + 2) + 2
    labels = samples[:, :-images, :3]
    rows = np.array_split(labels.min(axis=(1, 2)), 10)
    assert all(row.min() < 0.2 for row in rows), "each row has its class"
    before = files[1].read_bytes()
    made.predict()
    assert files[1].read_bytes() == before


def test_negatives_present_leaves_absent_classes_alone() -> None:
    """A batch without class 2 does not train its prior; with all classes the losses are equal."""
    x, y = batch()
    models = [small(negatives=negatives, kl_weight=0.0) for negatives in ("present", "all")]
    for model in models:
        model.eval()
        torch.manual_seed(0)
        model.training_step((x, y % 2), 0).backward()
    absent, everything = models
    assert not absent.prior_mean.grad[2].any() and absent.prior_mean.grad[0].any()  # type: ignore[index]
    assert everything.prior_mean.grad[2].any()  # type: ignore[index]
    losses = []
    for model in models:
        torch.manual_seed(0)
        losses.append(model.training_step((x, y), 0))
    assert torch.equal(*losses)


def test_data_outside_of_the_unit_interval_is_refused() -> None:
    model = ACVAE(latent_dim=4, width=4)
    trainer(rounds=1).fit(model, digits(standardize=False))  # a built model meets other data
    for engine in (InProcess(), Vectorized(clients=5)):
        with pytest.raises(FlsuiteError, match=r"set data\.standardize to false"):
            trainer(rounds=1, engine=engine).fit(model, digits())


@pytest.mark.parametrize(
    ("engine", "number"), [(InProcess(), float("nan")), (Vectorized(clients=5), 5.0)]
)
def test_data_of_one_client_outside_of_the_unit_interval_is_refused(
    engine: Engine, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FederatedData.batches_of

    def changed(self: FederatedData, split: Any, batch_rows: Any, *args: Any) -> Any:
        bad, batch_rows = self.train_rows(3), list(batch_rows)
        for rows, (x, y) in zip(batch_rows, whole(self, split, batch_rows, *args), strict=True):
            is_bad = torch.isin(rows, bad) if split is self.train else torch.zeros(len(x)).bool()
            yield x.masked_fill(is_bad[:, None, None, None], number), y

    monkeypatch.setattr(FederatedData, "batches_of", changed)
    with pytest.raises(FlsuiteError, match="but this lies within"):
        trainer(rounds=1, engine=engine).fit(
            ACVAE(latent_dim=4, width=4), digits(standardize=False)
        )
