"""Features and labels that differ from client to client."""

import pytest
import torch
from torch.utils.data import TensorDataset

from flsuite import FlsuiteError
from flsuite.data import Digits, Dirichlet, FeatureSkew, FromDataset, LabelNoise, Skew, Synthetic
from flsuite.data.federated import FederatedData


def split(skew: Skew | None, seed: int = 1, **kwargs: object) -> FederatedData:
    settings = {"clients": 4, "train_samples": 300, "partition": Dirichlet(1.0), **kwargs}
    module = Digits(skew=skew, seed=seed, **settings)  # type: ignore[arg-type]
    module.setup()
    return module.federated


def images(data: FederatedData, client: int, name: str = "train") -> torch.Tensor:
    part = getattr(data, name)
    return part.x[part.rows[client]].float()


def test_each_client_has_its_own_camera_in_every_split() -> None:
    plain, skewed = split(None), split(FeatureSkew(brightness=0.4))
    changes = torch.tensor(
        [
            [images(skewed, c, name).mean() - images(plain, c, name).mean() for c in range(4)]
            for name in ("train", "test", "val")
        ]
    )
    apart = changes.amax(0) - changes.amin(0)
    assert apart.max() < 30, "the same change, up to the bounds of a pixel"
    assert changes[0].max() - changes[0].min() > 30


CHANGES = {"rotation": 90.0, "blur": 2.0, "contrast": 0.5, "noise": 0.2, "inverted": 1.0}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_acts_and_is_the_same_for_the_same_seed(name: str) -> None:
    skew = FeatureSkew(**{name: CHANGES[name]})
    plain, one, again, other = split(None), split(skew), split(skew), split(skew, seed=2)
    assert torch.equal(one.train.x, again.train.x)
    assert not torch.equal(one.train.x, plain.train.x)
    assert one.train.x.dtype == torch.uint8
    assert torch.equal(one.train.y, plain.train.y)
    assert not torch.equal(one.train.rows.values, other.train.rows.values)


def test_a_blur_may_be_wider_than_the_image() -> None:
    assert images(split(FeatureSkew(blur=50.0)), 0).std() < images(split(None), 0).std()


def test_inverted_images_are_the_negatives() -> None:
    plain, skewed = split(None), split(FeatureSkew(inverted=1.0))
    assert torch.equal(images(skewed, 2), 255 - images(plain, 2))


def test_samples_read_before_are_not_changed() -> None:
    before = split(None).train.x.clone()
    split(FeatureSkew(noise=0.3))
    assert torch.equal(split(None).train.x, before)


def test_wrong_labels_are_in_training_alone_and_more_on_some_clients() -> None:
    settings = {"train_samples": 1000, "val_fraction": 0.2}
    plain, noisy = split(None, **settings), split(LabelNoise(0.8), **settings)
    wrong = (plain.train.y != noisy.train.y).float()
    rates = [float(wrong[rows].mean()) for rows in plain.train.rows]
    assert max(rates) <= 0.85
    assert max(rates) - min(rates) > 0.1
    assert torch.equal(plain.test.y, noisy.test.y)
    assert torch.equal(plain.val.y, noisy.val.y)
    assert noisy.train.y.max() < 10


def test_a_table_has_no_images() -> None:
    module = Synthetic(clients=3, skew=FeatureSkew(rotation=10.0))
    with pytest.raises(FlsuiteError, match="changes images of flsuite"):
        module.setup()


def test_the_noise_of_a_clients_splits_differs() -> None:
    plain, skewed = split(None), split(FeatureSkew(noise=0.3))
    noise = [images(skewed, 0, name)[:5] - images(plain, 0, name)[:5] for name in ("train", "test")]
    apart = [(one.abs() > 0).float() for one in noise]
    assert not torch.equal(*apart)


def test_samples_that_are_read_on_demand_are_refused_and_not_silently_left_as_they_are() -> None:
    samples = TensorDataset(torch.zeros(20, 2), torch.arange(20) % 2)
    data = FromDataset(samples, samples, in_memory=False, clients=2, skew=LabelNoise(1.0))
    with pytest.raises(FlsuiteError, match=r"data\.skew needs samples in memory; leave it out"):
        data.setup()
