"""Tests of the data module: validation, test samples, scaling, batches, seeds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import POOLED
from flsuite.data import (
    IID,
    CropFlip,
    DataSpec,
    DataSplit,
    Digits,
    Dirichlet,
    FederatedDataModule,
    Natural,
    PublishedSplits,
    Synthetic,
    TaskSequence,
)
from flsuite.data.loader import TrainLoader, batch_bounds


class Images(FederatedDataModule):
    """Random images of three classes: 120 for training, 60 for testing.

    With ``published``, there are 30 for validation.
    """

    def __init__(
        self, channels: int = 3, published: bool = False, owners: Sequence[int] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.channels, self.published, self.owners = channels, published, owners

    def load(self) -> PublishedSplits:
        generator = torch.Generator().manual_seed(0)
        train, test, val = (self._split(n, generator) for n in (sum(self.owners) or 120, 60, 30))
        if self.owners:
            train.ids = torch.arange(len(self.owners)).repeat_interleave(torch.tensor(self.owners))
        return PublishedSplits(
            DataSpec((self.channels, 8, 8), 3), train, test, val if self.published else None
        )

    def _split(self, samples: int, generator: torch.Generator) -> DataSplit:
        ceiling = torch.tensor([256, 128, 64])[: self.channels]
        x = torch.rand(samples, 8, 8, self.channels, generator=generator) * ceiling
        return DataSplit(x.to(torch.uint8), torch.randint(0, 3, (samples,), generator=generator))


def made(**kwargs: Any) -> Images:
    module = Images(**{"clients": 4, "batch_size": 16, **kwargs})
    module.setup()
    return module


def of_clients(module: FederatedDataModule, name: str) -> Tensor:
    """Return the clients' samples of a split, client by client."""
    split = getattr(module.federated, name)
    return split.x[split.rows.values]


# Validation


@pytest.mark.parametrize(
    ("published", "val_fraction", "train", "held", "validation"),
    [
        (False, None, 108, 12, 12),
        (False, 0.0, 120, 0, None),
        (False, 0.5, 60, 60, 60),
        (True, None, 120, 0, 30),
        (True, 0.0, 120, 0, None),
        (True, 0.5, 60, 60, 60),
    ],
)
def test_validation_samples(
    published: bool, val_fraction: float | None, train: int, held: int, validation: int | None
) -> None:
    data = made(published=published, val_fraction=val_fraction).federated
    assert len(data.train.rows.values) == train
    assert (None if data.val is None else len(data.val)) == validation
    for client in range(4):
        assert len(data.train.rows[client]) == train / 4
    if held:
        own = data.train.take(data.train.rows.values).x
        samples = torch.cat([own, data.val.x]).flatten(1)
        assert len(samples.unique(dim=0)) == len(data.train.x.flatten(1).unique(dim=0)) == 120
        assert data.val.rows.lengths().tolist() == [held / 4] * 4
    elif data.val is not None:
        assert not len(data.val.rows), "the publisher's split is nobody's own"


@pytest.mark.parametrize("val_fraction", [None, 0.5, 0.9])
def test_a_client_keeps_a_sample_to_train_on(val_fraction: float | None) -> None:
    module = made(clients=4, owners=(1, 2, 5, 40), partition=Natural(), val_fraction=val_fraction)
    sizes = [module.federated.samples(client) for client in range(4)]
    fraction = 0.1 if val_fraction is None else val_fraction
    assert sizes == [n - min(round(fraction * n), n - 1) for n in (1, 2, 5, 40)] and min(sizes) >= 1


# The server's samples


def test_the_server_holds_samples_that_no_client_has() -> None:
    whole, data = made().federated, made(server_samples=30, val_fraction=0.2).federated
    assert whole.server is None and len(whole.train) == 120
    assert data.server is not None and (len(data.server), len(data.train)) == (30, 90)
    assert len(data.test) == 60
    samples = torch.cat([data.train.take(data.train.rows.values).x, data.val.x]).flatten(1)
    assert samples.unique(dim=0).equal(data.train.x.flatten(1).unique(dim=0))
    together = torch.cat([data.train.x, data.server.x]).flatten(1)
    assert len(together.unique(dim=0)) == len(whole.train.x.flatten(1).unique(dim=0)) == 120


@pytest.mark.parametrize(
    "kwargs",
    [{"clients": 9}, {"partition": Dirichlet(0.1)}, {"val_fraction": 0.0}, {"published": True}],
)
def test_the_servers_samples_depend_on_the_seed_alone(kwargs: dict[str, Any]) -> None:
    one, same = made(server_samples=30, seed=1), made(server_samples=30, seed=1, **kwargs)
    other = made(server_samples=30, seed=2)
    first, second, third = (module.federated.server for module in (one, same, other))
    assert first is not None and second is not None and third is not None
    assert first.x.equal(second.x) and first.y.equal(second.y)
    assert not first.x.equal(third.x)


def test_the_server_takes_its_part_of_a_fixed_subset() -> None:
    subset, split = (made(train_samples=50, server_samples=n).federated for n in (0, 20))
    assert split.server is not None and len(split.train) == 30
    together = torch.cat([split.train.x, split.server.x]).flatten(1)
    assert together.unique(dim=0).equal(subset.train.x.flatten(1).unique(dim=0))


def test_a_part_of_the_test_split_is_kept() -> None:
    few, whole = made(test_samples=20).federated, made().federated
    assert len(few.test) == 20 and few.train.x.equal(whole.train.x)
    rows = [{row.numpy().tobytes() for row in data.test.x} for data in (few, whole)]
    assert rows[0] <= rows[1]


class LargerTests(Images):
    """Test images are larger than the others."""

    def load(self) -> PublishedSplits:
        published = super().load()
        test = published.test.x.repeat_interleave(2, dim=1)
        return replace(published, test=replace(published.test, x=test))


def test_samples_of_another_shape_are_refused() -> None:
    LargerTests(clients=2, resize=8).setup()
    with pytest.raises(FlsuiteError, match=r"test samples have shape \(16, 8, 3\), and the train"):
        LargerTests(clients=2).setup()


def test_owners_stay_with_the_clients_samples() -> None:
    module = made(owners=(40, 40, 40), clients=3, partition=Natural(), server_samples=30)
    ids, server = module.federated.train.ids, module.federated.server
    assert ids is not None and server is not None and server.ids is not None
    assert (torch.bincount(ids) + torch.bincount(server.ids)).tolist() == [40, 40, 40]


def test_the_server_leaves_a_sample_per_client() -> None:
    assert made(server_samples=116).federated.samples(3) == 1
    for samples, left in ((117, 3), (120, 0), (500, 0)):
        message = f"server_samples {samples} leaves {left} of 120"
        with pytest.raises(FlsuiteError, match=message):
            made(server_samples=samples)


def test_the_servers_samples_are_of_the_classes_seen() -> None:
    module = TaskSequence(
        Images(clients=2, server_samples=30), tasks=3, classes_per_task=1, arrangement="disjoint"
    )
    module.setup()
    server, sizes = module.federated.server, []
    assert server is not None and len(server) == 30
    for round in (1, 11, 21):
        view = module.federated.at(round)
        assert view.stage is not None and view.server is not None
        assert set(view.server.y.tolist()) == set(view.stage.seen)
        sizes.append(len(view.server))
    assert sizes == sorted(sizes) and sizes[-1] == 30


# Parts of the training split


def test_parts_of_the_training_split_share_no_sample() -> None:
    bounds = [(0.0, 0.2), (0.2, 0.25), (0.25, 1.0)]
    parts = [made(train_part=part, seed=seed).federated for seed, part in enumerate(bounds)]
    assert [len(part.train) for part in parts] == [24, 6, 90]
    together = torch.cat([part.train.x for part in parts]).flatten(1)
    assert together.unique(dim=0).equal(made().federated.train.x.flatten(1).unique(dim=0))
    assert all(part.test.x.equal(parts[0].test.x) for part in parts)


def test_a_part_is_counted_before_its_samples() -> None:
    def rows(**kwargs: Any) -> Tensor:
        return made(**kwargs).federated.train.x.flatten(1)

    first, whole = (rows(train_part=(0.5, 1.0), train_samples=n) for n in (20, None))
    assert len(first) == 20 and all((whole == sample).all(1).any() for sample in first)
    assert rows(train_samples=40).equal(rows(train_part=(0.0, 1 / 3))), "in the same order"
    assert rows(train_part=(0.0, 1.0)).equal(rows())


# Test samples


@pytest.mark.parametrize("alpha", [0.05, 0.5, 100.0])
def test_test_samples_follow_each_clients_class_mix(alpha: float) -> None:
    module = Digits(clients=8, partition=Dirichlet(alpha), val_fraction=0.0)
    module.setup()
    data = module.federated
    rows = data.test.rows.values
    assert len(rows.unique()) == len(rows) == 360, "every sample goes to exactly one client"

    def counts(split: DataSplit) -> Tensor:
        return torch.stack([split.y[own].bincount(minlength=10) for own in split.rows]).double()

    train, test = counts(data.train), counts(data.test)
    expected = train / train.sum(0) * data.test.y.bincount(minlength=10)
    assert (test - expected).abs().max() <= 1
    assert (test[train == 0] == 0).all(), "no test sample of a class without training samples"


# Pixels


def test_resize() -> None:
    module, plain = made(resize=16), made().federated
    data = module.federated
    assert data.train.x.shape == (120, 16, 16, 3) and data.train.x.dtype == torch.uint8
    assert data.test.x.shape[1:3] == (16, 16) and module.spec.shape == (3, 16, 16)
    batch, _ = next(iter(module.train_dataloader()))
    assert batch.shape == (16, 3, 16, 16)
    means = [d.train.x.double().mean((0, 1, 2)) for d in (data, plain)]
    assert torch.allclose(*means, atol=1.0), "the mean brightness is kept"
    assert made(resize=8).federated.train.x.equal(plain.train.x)


@pytest.mark.parametrize("channels", [1, 3])
def test_rgb(channels: int) -> None:
    module = made(channels=channels, rgb=True)
    assert module.spec.shape == (3, 8, 8) and module.federated.train.x.shape[-1] == channels
    batch, _ = next(iter(module.train_dataloader()))
    assert batch.shape == (16, 3, 8, 8)
    assert (channels == 1) == bool(
        batch[:, 0].equal(batch[:, 1]) and batch[:, 0].equal(batch[:, 2])
    )


@pytest.mark.parametrize(
    "kwargs", [{}, {"channels": 1}, {"channels": 1, "rgb": True}, {"resize": 12}]
)
def test_standardized_pixels(kwargs: dict[str, Any]) -> None:
    data = made(**kwargs).federated
    x = data.scaling(data.train.x).double()
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    test = data.scaling(data.test.x).double()
    assert 0 < test.mean((0, 2, 3)).abs().max() < 0.2, "the scale is that of the training split"


def test_plain_pixels() -> None:
    data = made(standardize=False).federated
    x = data.scaling(data.train.x)
    assert x.min() >= 0 and x.max() <= 1
    assert torch.allclose(x, data.train.x.permute(0, 3, 1, 2) / 255)


def test_a_channel_without_contrast_stays_finite() -> None:
    class Flat(Images):
        def load(self) -> PublishedSplits:
            source = super().load()
            source.train.x[..., 0] = 7
            return source

    module = Flat(clients=2)
    module.setup()
    x = module.federated.scaling(module.federated.train.x)
    assert torch.isfinite(x).all() and x[:, 0].abs().max() < 1e-4


@pytest.mark.parametrize("augment", [None, CropFlip(2)], ids=["plain", "augmented"])
@pytest.mark.parametrize(("channels", "rgb"), [(1, False), (1, True), (3, False)])
def test_batches_are_float_and_channels_last(
    channels: int, rgb: bool, augment: CropFlip | None
) -> None:
    module = made(channels=channels, rgb=rgb, augment=augment)
    for x, y in TrainLoader(module.federated, 1, seed=0, round=1):
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert x.is_contiguous(memory_format=torch.channels_last)


def test_tables_pass_through() -> None:
    module = Synthetic(features=6, clients=3, batch_size=10)
    module.setup()
    x, _ = next(iter(module.train_dataloader()))
    assert x.shape == (10, 6) and x.dtype == torch.float32 and module.spec.shape == (6,)
    rows = module.federated.train.x
    assert all((rows == sample).all(1).any() for sample in x), "rows are not scaled"


# Batches


def rows_of(module: Images, client: int = 0, seed: int = 0, round: int = 1, **kwargs: Any) -> Any:
    """Return the rows of each batch of an epoch, recognized by their pixels."""
    loader = kwargs.pop("loader", None) or TrainLoader(
        module.federated, client, seed, round, **kwargs
    )
    pixels = module.federated.scaling(module.federated.train.x)
    known = {row.numpy().tobytes(): i for i, row in enumerate(pixels)}
    return [[known[row.numpy().tobytes()] for row in x] for x, _ in loader]


def flat(batches: list[list[int]]) -> list[int]:
    """Return all rows of the batches, ascending."""
    return sorted(row for batch in batches for row in batch)


def test_epochs_differ_and_repeat() -> None:
    module = made()
    loader = TrainLoader(module.federated, 2, seed=5, round=3)
    first, second = rows_of(module, loader=loader), rows_of(module, loader=loader)
    assert len(loader) == len(first) == 2
    own = sorted(module.federated.train_rows(2).tolist())
    assert flat(first) == flat(second) == own and first != second
    again = TrainLoader(module.federated, 2, seed=5, round=3, epochs=2)  # read at once
    torch.rand(3)  # draws elsewhere do not matter
    assert [rows_of(module, loader=again), rows_of(module, loader=again)] == [first, second]
    assert rows_of(module, 2, seed=6, round=3) != first != rows_of(module, 2, seed=5, round=4)


def test_a_number_of_batches_instead_of_a_pass() -> None:
    module = made()
    few, many, whole = (rows_of(module, batches=n, epochs=3) for n in (1, 7, None))
    assert [len(batch) for batch in few] == [16] and len(many) == 7
    assert many[:2] == whole and flat(many[2:4]) == flat(whole) and many[2:4] != whole


def test_the_pooled_client_holds_everything() -> None:
    module = made()
    data = module.federated
    seen = flat(rows_of(module, client=POOLED, seed=0, round=1))
    assert seen == sorted(data.train.rows.values.tolist()) and data.samples(POOLED) == 108
    assert data.class_counts(POOLED).equal(sum(data.class_counts(c) for c in range(4)))
    assert len(module.train_dataloader()) == len(TrainLoader(data, POOLED, 0, 1)) == 7


@pytest.mark.parametrize(
    ("samples", "bounds"),
    [(1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 5)]), (6, [(0, 4), (4, 6)]), (9, [(0, 4), (4, 9)])],
)
def test_no_batch_of_one(samples: int, bounds: list[tuple[int, int]]) -> None:
    assert batch_bounds(samples, 4) == bounds


def test_a_single_sample_is_seen_twice() -> None:
    module = made(clients=2, owners=(1, 119), partition=Natural(), val_fraction=0.0)
    assert rows_of(module) == [[0, 0]] and module.federated.samples(0) == 1


# Augmentation


def crop(crop: CropFlip, x: Tensor, seed: int = 0) -> Tensor:
    return crop(x, torch.Generator().manual_seed(seed))


def test_crop_flip_repeats_and_keeps_the_shape() -> None:
    x = torch.randn(32, 3, 8, 10)
    one, two, other = (crop(CropFlip(2), x, seed) for seed in (1, 1, 2))
    assert one.shape == x.shape and one.equal(two) and not one.equal(other)
    assert crop(CropFlip(0, flip=False), x).equal(x)
    is_same = [
        (a.equal(b), a.equal(b.flip(2))) for a, b in zip(crop(CropFlip(0), x), x, strict=True)
    ]
    assert set(is_same) == {(True, False), (False, True)}, "the same, or mirrored"


def test_crop_shifts_and_pads_with_zeros() -> None:
    cropped = crop(CropFlip(2, flip=False), torch.ones(200, 1, 6, 6))
    rows, columns = cropped.amax(3).sum((1, 2)), cropped.amax(2).sum((1, 2))
    assert set(rows.tolist()) == set(columns.tolist()) == {4.0, 5.0, 6.0}
    assert cropped.sum((1, 2, 3)).equal(rows * columns), "what is visible is one rectangle"


def test_augmentation_follows_the_loaders_seed() -> None:
    data = made(augment=CropFlip(2)).federated
    one, two = (torch.cat([x for x, _ in TrainLoader(data, 0, 1, 1)]) for _ in range(2))
    assert one.equal(two)


# Seeds and folders


def test_the_seed_of_the_module_comes_before_that_of_the_run() -> None:
    def of_run(run: int, **kwargs: Any) -> Images:
        module = Images(clients=4, partition=IID(), **kwargs)
        module.use_seed(run)
        module.setup()
        return module

    for split in ("train", "val", "test"):
        assert of_clients(of_run(1), split).equal(of_clients(of_run(1), split))
        assert of_clients(of_run(1, seed=5), split).equal(of_clients(of_run(2, seed=5), split))
        assert not of_clients(of_run(1), split).equal(of_clients(of_run(2), split))
    assert of_clients(of_run(7), "train").equal(of_clients(of_run(0, seed=7), "train"))


def test_the_argument_comes_before_the_environment_before_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLSUITE_DATA_ROOT", "~/environment")
    assert Images(root="~/argument").data_root("~/default") == tmp_path / "argument"
    assert Images().data_root("~/default") == tmp_path / "environment"
    monkeypatch.setenv("FLSUITE_DATA_ROOT", "")
    assert Images().data_root("~/default") == tmp_path / "default"
    monkeypatch.delenv("FLSUITE_DATA_ROOT")
    assert Images().data_root(Path("default")) == Path("default")


def test_data_is_not_split_before_setup() -> None:
    with pytest.raises(FlsuiteError, match=r"call setup\(\)"):
        _ = Images(clients=4).federated


def test_pooled_training_leaves_out_clients_outside_the_federation() -> None:
    module = Digits(clients=5, unseen_clients=0.4)
    module.setup()
    data = module.federated
    inside = [row for client in range(3) for row in data.train_rows(client).tolist()]
    assert sorted(data.train_rows(POOLED).tolist()) == sorted(inside)
    assert data.samples(POOLED) == len(inside)


@pytest.mark.parametrize(("unseen", "left"), [(0.4, 3), (2, 3), (0, 5), (0.1, 4)])
def test_clients_outside_the_federation_are_a_share_or_a_number(unseen: float, left: int) -> None:
    module = Digits(clients=5, unseen_clients=unseen)
    module.setup()
    assert (module.federated.clients, module.federated.unseen) == (left, 5 - left)


@pytest.mark.parametrize("unseen", [1.0, -1, 2.5, 5])
def test_a_wrong_number_of_clients_outside_is_refused(unseen: float) -> None:
    with pytest.raises(FlsuiteError, match="unseen_clients"):
        Digits(clients=5, unseen_clients=unseen).setup()
