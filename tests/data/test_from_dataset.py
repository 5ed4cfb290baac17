"""Map-style datasets and plain data modules as federated data."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from flsuite.common.errors import FlsuiteError
from flsuite.data import (
    IID,
    Dirichlet,
    FederatedData,
    FromDataModule,
    FromDataset,
    Natural,
    Pathological,
)
from flsuite.data.loader import TrainLoader
from flsuite.data.map_style import _Reader, _StoredSplit
from flsuite.models import MLP, Classifier
from tests.conftest import trainer
from tests.plain import Blobs, Sentences, blobs, pad, slope


class Pairs(Dataset):
    """Tensors and numbers, as torchvision's datasets return them."""

    classes = ["even", "odd"]

    def __init__(self, samples: int = 40, noise: float = 0.0) -> None:
        self.targets = [number % 2 for number in range(samples)]
        self.noise = noise

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number >= len(self):
            raise IndexError
        x = torch.full((3,), float(number))
        return x + self.noise * torch.rand(3) * np.random.rand(), self.targets[number]


class Columns:
    """The interface of a Hugging Face dataset with a torch format."""

    column_names = ["text", "label"]

    def __init__(self, samples: int = 30) -> None:
        self.rows = [
            {"text": torch.arange(1 + number % 4), "label": torch.tensor(number % 3)}
            for number in range(samples)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | str) -> Any:
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Tensor]]:
        return [self.rows[number] for number in numbers]


class Arrays(Pairs):
    """Arrays and classes, without an attribute that has all classes."""

    def __init__(self, samples: int = 40, noise: float = 0.0) -> None:
        super().__init__(samples, noise)
        self.numbers = self.__dict__.pop("targets")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Any:
        x = np.full((2, 3), number + self.noise * np.random.rand(), dtype=np.float32)
        return x, np.int64(self.numbers[number])


def texts(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    text = torch.nn.utils.rnn.pad_sequence([s["text"] for s in samples], batch_first=True)
    return {"text": text, "label": torch.stack([s["label"] for s in samples])}


def split(train: Any, test: Any, **kwargs: Any) -> FederatedData:
    module = FromDataset(train, test, **{"clients": 2, "batch_size": 8, **kwargs})
    module.setup()
    return module.federated


def batches(data: FederatedData, client: int = 0, seed: int = 0, round: int = 1) -> list[Any]:
    return list(TrainLoader(data, client, seed, round))


def test_pairs_of_tensors_are_kept_in_memory() -> None:
    data = split(Pairs(), Pairs(10))
    assert not isinstance(data.train, _StoredSplit)
    assert torch.equal(data.train.x[:, 0], torch.arange(40.0)) and data.train.y.dtype == torch.int64
    assert data.spec.task == "multiclass" and data.spec.shape == (3,)
    x, y = batches(data)[0]
    assert torch.equal(x[:, 0] % 2, y.float())


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_arrays_and_their_classes_are_read_as_tensors_are(noise: float) -> None:
    """With noise, samples are read anew for each batch, and classes once."""
    data = split(Arrays(noise=noise), Arrays(10), partition=Pathological(1))
    assert isinstance(data.train, _StoredSplit) is bool(noise)
    assert data.spec.task == "multiclass" and data.spec.shape == (2, 3)
    for client in (0, 1):
        for x, y in batches(data, client):
            assert set(y.tolist()) == {int(y[0])} and torch.equal(x[:, 0, 0].int() % 2, y.int())


class Entries(Arrays):
    """Arrays with noise, and a second entry of another kind."""

    def __init__(self, second: Callable[[int], Any]) -> None:
        super().__init__(noise=0.1)
        self.second = second

    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(number)[0], self.second(number)


def unreadable(number: int) -> int:
    if number == 30:
        raise OSError("scan_30.png is truncated")
    return number % 2


@pytest.mark.parametrize(
    "second",
    [
        lambda number: [[1, 2, 3], [4]],
        lambda number: list(range(1 + number % 3)),
        lambda number: torch.arange(1 + number % 3),
        lambda number: torch.tensor([number % 2]),
        lambda number: None if number == 17 else number % 2,
        lambda number: bool(number % 2),
        unreadable,
    ],
    ids=["boxes", "tags", "tokens", "of shape (1,)", "with a gap", "truth values", "damaged"],
)
def test_second_entries_that_are_no_classes_need_none(second: Callable[[int], Any]) -> None:
    """A sample that cannot be read fails its client, and not the run."""
    data = split(Entries(second), Entries(second), collate=list)
    assert isinstance(data.train, _StoredSplit) and data.spec.task == "other"


def test_an_array_may_be_flipped_or_in_another_byte_order() -> None:
    class Odd(Arrays):
        def __getitem__(self, number: int) -> Any:
            x, y = super().__getitem__(number)
            return x.astype(">f4")[:, ::-1], y

    assert torch.equal(split(Odd(), Odd()).train.x[:, 0, 0], torch.arange(40.0))


@pytest.mark.parametrize(
    ("samples", "labels"),
    [
        (TensorDataset(torch.rand(60, 3), torch.arange(60) * 7), None),
        (slope(60, 0), None),
        (slope(60, 0), slope(60, 0).tensors[1]),
    ],
    ids=["whole numbers", "targets", "labels"],
)
def test_numbers_are_binned_for_the_partition_and_stay_targets(samples: Any, labels: Any) -> None:
    data = split(samples, samples, labels=labels, bins=3, partition=Dirichlet(0.3))
    assert data.spec.num_classes == 3 and data.spec.task == "other"
    assert sum(data.class_counts(c) for c in range(2)).sum() + len(data.val.rows.values) == 60  # type: ignore[union-attr]
    assert batches(data)[0][1].dtype == samples.tensors[1].dtype


def test_classes_are_read_where_the_training_samples_alone_are_in_memory() -> None:
    data = split(Arrays(), Arrays(noise=0.1))
    assert isinstance(data.test, _StoredSplit) and data.spec.task == "multiclass"


def test_tensors_are_not_copied_and_bytes_reach_the_model_as_they_are() -> None:
    images = torch.randint(256, (20, 3, 4, 4), dtype=torch.uint8)
    both = TensorDataset(images, torch.arange(20) % 2)
    data = split(both, both, val=both, in_memory=None)
    assert data.train.x.data_ptr() == images.data_ptr() and len(data.val or ()) == 20
    (x, _), *_ = batches(data)
    assert x.dtype == torch.uint8 and x.shape[1:] == (3, 4, 4)


def test_random_transforms_stay_random_and_depend_on_seed_round_and_client_alone() -> None:
    data = split(Pairs(noise=0.1), Pairs(10))
    assert isinstance(data.train, _StoredSplit) and data.spec.task == "multiclass"

    first = torch.cat([x for x, _ in batches(data)])
    torch.manual_seed(9)
    np.random.seed(9)
    assert torch.equal(first, torch.cat([x for x, _ in batches(data)]))
    later = torch.cat([x for x, _ in batches(data, round=2)])
    assert not torch.equal(first.sort(0).values, later.sort(0).values)
    before = torch.get_rng_state()
    batches(data)
    assert torch.equal(before, torch.get_rng_state())


def test_workers_read_the_same_batches() -> None:
    alone = batches(split(Pairs(noise=0.1), Pairs(10)))
    helped = batches(split(Pairs(noise=0.1), Pairs(10), workers=2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, helped, strict=True))


def sentences(**kwargs: Any) -> FederatedData:
    """Split sentences over three clients."""
    return split(Sentences(60, 0), Sentences(30, 1), collate=pad, clients=3, **kwargs)


@pytest.mark.parametrize(
    "labels",
    [None, "topic", lambda sample: "abc"[sample["topic"]], Sentences(60, 0).targets],
    ids=["found", "a field", "a function", "values"],
)
def test_labels_may_be_given_in_any_way(labels: Any) -> None:
    data = sentences(labels=labels, partition=Pathological(1), val_fraction=0.0)
    for client in range(3):
        assert int((data.class_counts(client) > 0).sum()) == 1
        (batch, *_) = batches(data, client)
        assert set(batch) == {"words", "topic"} and len(batch["topic"].unique()) == 1


def test_a_hugging_face_dataset_with_a_torch_format() -> None:
    kwargs = {"labels": "label", "collate": texts, "batch_size": 4}
    data = split(Columns(), Columns(12), partition=Dirichlet(1.0), **kwargs)
    assert data.spec.num_classes == 3 and int(data.class_counts(0).sum()) == data.samples(0)
    (batch, *_) = batches(data)
    assert batch["text"].ndim == 2 and len(batch["label"]) == 4


def test_labels_of_a_subset_are_those_of_its_samples() -> None:
    data = split(Subset(Pairs(noise=0.1), range(0, 40, 2)), Pairs(10))
    assert data.train.classes.tolist() == [0] * 20


def test_owners_are_clients() -> None:
    data = sentences(ids=lambda sample: f"person {sample['topic']}", partition=Natural())
    owners, tested = (
        [set(part.ids[part.rows[c]].tolist()) for c in range(3)] for part in (data.train, data.test)
    )
    assert all(len(own) == 1 for own in owners) and owners == tested


@pytest.mark.parametrize("in_memory", [True, False])
def test_labels_that_are_not_the_targets_are_no_classification(in_memory: bool) -> None:
    """They split the data, but the model is trained on something else."""
    samples = TensorDataset(torch.rand(40, 3), torch.arange(40) % 4)
    data = split(samples, samples, labels=lambda sample: sample[1] % 2, in_memory=in_memory)
    assert data.spec.task == "other" and data.spec.num_classes == 2


def test_samples_of_three_parts_and_joined_datasets_have_the_labels_of_an_attribute() -> None:
    def made(size: int) -> TensorDataset:
        parts = TensorDataset(torch.rand(size, 3), torch.arange(size) % 2, torch.ones(size))
        parts.targets = torch.arange(size) % 2  # type: ignore[attr-defined]
        return parts

    data = split(ConcatDataset([made(10), made(20)]), made(8), partition=Pathological(1))
    assert data.spec.num_classes == 2
    assert [len(batch) for batch in batches(data)] == [3] * len(batches(data))
    without = ConcatDataset([made(10), slope(20, 0)])
    with pytest.raises(FlsuiteError, match="Dirichlet splits by class, but these samples have no"):
        split(without, made(8), partition=Dirichlet(1.0))


@pytest.mark.parametrize(
    "sample",
    [
        lambda n: (torch.ones(2), n % 2, torch.tensor(n)),
        lambda n: torch.full((3,), float(n)),
        lambda n: {"x": {"y": torch.full((3,), float(n))}, "gap": float("nan"), "name": str(n)},
    ],
    ids=["triples", "tensors", "nested"],
)
def test_samples_of_any_structure_are_kept_as_they_are(sample: Callable[[int], Any]) -> None:
    """A third entry is not lost, and NaN is the same on every reading."""
    samples = [sample(number) for number in range(20)]
    kept, read = (split(samples, samples, in_memory=given) for given in (True, False))
    assert kept.train.dataset is not samples and read.train.dataset is samples  # type: ignore[attr-defined]
    assert repr(batches(kept)) == repr(batches(read))


class NoTest(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(blobs(40, 0), batch_size=4)


class Lists(NoTest):
    """Returns lists of loaders."""

    val: Any = []

    def val_dataloader(self) -> Any:
        return self.val

    def test_dataloader(self) -> Any:
        return [DataLoader(blobs(12, 1), batch_size=4)]


class Two(Lists):
    val = [DataLoader(blobs(12, 1)), DataLoader(blobs(12, 2))]


class Batched(Lists):
    """Has a batch sampler, and so no batch size."""

    def train_dataloader(self) -> DataLoader:
        data = blobs(40, 0)
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, True))


@pytest.mark.parametrize(("data", "own"), [(Batched, 5), (Lists, 4)])
def test_the_batch_size_is_the_given_one_or_that_of_the_loader(data: Any, own: int) -> None:
    """A list of one loader is that loader, and an empty one is none."""
    for given, expected in ((None, own), (7, 7)):
        module = FromDataModule(data(), clients=2, batch_size=given)
        module.setup()
        assert module.batch_size == expected and len(module.federated.test) == 12
        assert module.federated.val is not None, "from the training samples"


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(blobs(4, 0))


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return count()


class Failing(IterableDataset):
    def __iter__(self) -> Any:
        yield from (0, 1)
        raise OSError("the disk is gone")


class Transfers(Blobs):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Damaged(Pairs):
    """Has one file that cannot be read."""

    def __getitem__(self, number: int) -> Any:
        if number == 21:
            raise OSError("scan_21.png is truncated")
        return torch.ones(1), self.targets[number]


class Unfinished(NoTest):
    """Its author has not written the test loader yet."""

    def test_dataloader(self) -> DataLoader:
        raise NotImplementedError


WORDS = Sentences(9, 0)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no such field": (
        lambda: FromDataset(WORDS, WORDS, collate=pad, labels="theme"),
        "there is no field 'theme' in a sample, which has words, topic",
    ),
    "too few labels": (
        lambda: FromDataset(blobs(9, 0), blobs(9, 0), labels=[0, 1]),
        "data.labels must give one value per sample: 9 are expected",
    ),
    "negative classes": (
        lambda: FromDataset(TensorDataset(torch.ones(4, 1), -torch.ones(4).long()), Pairs(2)),
        "targets of classes must be 0 or above",
    ),
    "a dataset of a stream": (
        lambda: FromDataset(Stream(), Pairs(2)),
        "train is an IterableDataset, whose samples cannot be divided",
    ),
    "no numbers": (lambda: FromDataset(iter(()), Pairs(2)), "train must be a map-style dataset"),
    "random samples kept": (
        lambda: FromDataset(Pairs(9, noise=1.0), Pairs(2), in_memory=True),
        "samples of Pairs differ from one reading to the next",
    ),
    "nothing": (lambda: FromDataset(Pairs(0), Pairs(2)), "train has no samples"),
    "a stream without an end": (
        lambda: FromDataset(Endless(), Pairs(2), in_memory=True),
        "data.in_memory: Endless has more than 1,000,000 samples, or never ends; let its __iter__",
    ),
    "a stream that fails": (
        lambda: FromDataset(Failing(), Pairs(2), in_memory=True),
        r"sample 2 of Failing cannot be read \(OSError: the disk is gone\)",
    ),
    "a damaged file": (
        lambda: FromDataset(Damaged(66), Pairs(2)),
        "sample 21 of 66 in Damaged cannot be read \\(OSError: scan_21.png is truncated",
    ),
    "a damaged first file, read for its shape": (
        lambda: FromDataset(
            Subset(Damaged(66), [21, 1]), Pairs(2), labels=[0.0, 1.0], bins=2, in_memory=False
        ),
        "sample 0 of 2 in Subset cannot be read",
    ),
    "one bin": (lambda: FromDataset(slope(9, 0), slope(9, 0), bins=1), "bins must be at least 2"),
    "no train loader": (lambda: FromDataModule(LightningDataModule()), "has no train_dataloader"),
    "two tensors": (
        lambda: FromDataset((torch.ones(4, 1), torch.ones(4)), Pairs(2)),  # type: ignore[arg-type]
        r"wrap tensors in torch\.utils\.data\.TensorDataset",
    ),
    "resized by flsuite": (
        lambda: FromDataset(Pairs(), Pairs(), resize=8),
        "leave data.resize out, and transform the images in the dataset",
    ),
    "two loaders": (lambda: FromDataModule(Two()), "must return one torch DataLoader"),
    "a batch hook": (lambda: FromDataModule(Transfers()), "move it into the model"),
    "no batch": (
        lambda: FromDataset(WORDS, WORDS, clients=2, batch_size=8),
        "give FromDataset or your DataLoader a collate",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(name: str) -> None:
    make, line = WRONG[name]
    with pytest.raises(FlsuiteError, match=line) as error:
        make().setup()
    assert "\n" not in str(error.value)


def failed(samples: type[Pairs], rounds: int) -> list[float]:
    """Return the number of failed clients of each round, as the table has it."""
    data = FromDataset(samples(66), samples(4), in_memory=False, clients=3, val_fraction=0.0)
    made = trainer(rounds=rounds)
    made.fit(Classifier(MLP(hidden=(2,))), data)
    return [row[8] for row in made.run.folder.table.rows if row[7] == "failed"]


def test_a_sample_that_cannot_be_read_in_a_fit_loses_its_client_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert failed(Damaged, rounds=1) == [1.0]
    (line,) = [r.message for r in caplog.records if "cannot be read" in r.message]
    assert "round 1: client" in line and "sample 21 of 66 in Damaged" in line


class Sized(Pairs):
    """Has samples of another shape, once they have been read often."""

    reads = 0

    def __getitem__(self, number: int) -> Any:
        self.reads += 1
        size = 2 if number == 21 and self.reads > 150 else 1
        return torch.ones(size), self.targets[number]


def test_a_sample_of_another_shape_in_a_later_round_loses_its_client_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = failed(Sized, rounds=4)
    assert counts[0] == 0.0 and counts[-1] == 1.0
    assert "samples do not make a batch" in caplog.text


def test_without_a_test_loader_validation_samples_are_for_testing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Two(Blobs):
        test_dataloader = LightningDataModule.test_dataloader

    module = FromDataModule(Two(), clients=2, partition=IID())
    with caplog.at_level("WARNING", logger="flsuite"):
        module.setup()
    assert "Two has no test_dataloader" in caplog.text
    data = module.federated
    assert len(data.test) == 40 and len(data.val) == len(data.val.rows.values) == 16


@pytest.mark.parametrize("data", [NoTest, Unfinished])
def test_without_both_loaders_there_are_no_test_data(data: type[LightningDataModule]) -> None:
    module = FromDataModule(data(), clients=2)
    module.setup()
    assert len(module.federated.test) == 0 and module.federated.val is not None


def test_a_random_split_of_a_data_module_follows_the_seed() -> None:
    def first_rows(seed: int) -> Tensor:
        module = FromDataModule(Blobs(), clients=2)
        module.use_seed(seed)
        module.setup()
        return module.federated.train.x[:5]

    assert torch.equal(first_rows(1), first_rows(1))
    assert not torch.equal(first_rows(1), first_rows(2))


def test_samples_in_double_precision_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def points(dtype: torch.dtype) -> TensorDataset:
        return TensorDataset(torch.rand(20, 3, dtype=dtype), torch.arange(20) % 2)

    with caplog.at_level("WARNING", logger="flsuite"):
        split(points(torch.float32), points(torch.float32))
        assert not caplog.records
        split(points(torch.float64), points(torch.float64))
    assert "convert the datasets to float32" in caplog.text


@pytest.mark.parametrize(
    ("odd", "named"), [(torch.zeros(3), "0 and 2 .*entry 1"), (object(), "0 and 2 .*object")]
)
def test_samples_that_make_no_batch_are_named(odd: Any, named: str) -> None:
    from flsuite.data.map_style import readable

    samples = [(torch.zeros(4), 0), (torch.zeros(4), 1), (odd, 1)]
    with pytest.raises(FlsuiteError, match=f"do not make a batch: {named}"), readable():
        _Reader(samples, default_collate)[0, [0, 1, 2]]
