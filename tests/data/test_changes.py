"""Tests of arguments that change between two calls of setup()."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.data import (
    IID,
    CropFlip,
    Dirichlet,
    FederatedData,
    FederatedDataModule,
    PublishedSplits,
    Synthetic,
    TaskSequence,
)
from flsuite.data.loader import TrainLoader
from flsuite.errors import FlsuiteError
from tests.conftest import classifier, digits, trainer
from tests.data.test_module import Images


class Counting(Images):
    """Random images that count how often they are read."""

    reads = 0

    def load(self) -> PublishedSplits:
        self.reads += 1
        return super().load()


def made(module: FederatedDataModule) -> FederatedData:
    """Set the module up."""
    module.setup()
    return module.federated


def equal(a: FederatedData, b: FederatedData) -> bool:
    """Return whether two datasets, and their first training batches, are equal."""

    def tensors(data: FederatedData) -> list[Tensor]:
        splits = [split for split in (data.train, data.val, data.test) if split is not None]
        batches = [tensor for batch in TrainLoader(data, 1, seed=0, round=1) for tensor in batch]
        return [
            *(tensor for split in splits for tensor in (split.rows.values, split.rows.offsets)),
            *(tensor for split in splits for tensor in (split.x, split.y)),
            *(data.scaling.scale, data.scaling.shift),
            *batches,
        ]

    pairs = zip(tensors(a), tensors(b), strict=False)
    return a.batch_size == b.batch_size and all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    "change",
    [
        {"clients": 3},
        {"partition": Dirichlet(0.3)},
        {"batch_size": 5},
        {"val_fraction": 0.5},
        {"resize": 4},
        {"rgb": True},
        {"standardize": False},
        {"augment": CropFlip(1)},
        {"train_samples": 50},
        {"test_samples": 10},
        {"seed": 9},
        {"channels": 2},
        {"batch_size": 5, "seed": 9},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_changed_argument_is_used(change: dict[str, Any]) -> None:
    module = Images(channels=1, clients=4)
    before = made(module)
    for name, value in change.items():
        setattr(module, name, value)
    after = made(module)
    fresh = made(Images(**{"channels": 1, "clients": 4, **change}))
    assert equal(after, fresh) and not equal(after, before)


def test_training_uses_a_changed_batch_size() -> None:
    module = Synthetic(samples=100, clients=2, batch_size=4, val_fraction=0.0)
    trainer(rounds=1).fit(classifier(), module)
    assert len(TrainLoader(module.federated, 0, 0, 1)) == 10
    module.batch_size = 20
    trainer(rounds=1).fit(classifier(), module)
    assert len(TrainLoader(module.federated, 0, 0, 1)) == 2


@pytest.mark.parametrize(
    ("kwargs", "change"),
    [
        ({"partition": Dirichlet(100.0)}, lambda m: setattr(m.partition, "alpha", 0.1)),
        ({"augment": CropFlip(1)}, lambda m: setattr(m.augment, "padding", 3)),
        ({"owners": [30] * 4}, lambda m: m.owners.append(60)),
    ],
    ids=["partition", "augment", "list"],
)
def test_a_nested_argument_that_is_changed_in_place_is_used(
    kwargs: dict[str, Any], change: Callable[[Any], None]
) -> None:
    module = Images(clients=4, **kwargs)
    before = made(module)
    change(module)
    after = made(module)
    fresh = Images(clients=4, **kwargs)  # shares the changed objects
    assert after is not before and equal(after, made(fresh))


def test_the_files_are_read_again_only_where_rows_may_change() -> None:
    module = Counting(clients=4, partition=IID(), augment=CropFlip(1))
    before = made(module)
    assert made(module) is before and module.reads == 1, "nothing changed"
    module.batch_size, module.augment = 7, CropFlip(2)
    assert made(module).train is before.train and module.reads == 1
    module.clients = 3
    assert made(module).clients == 3 and module.reads == 2


def test_a_failed_setup_is_repeated() -> None:
    module = Images(clients=4)
    made(module)
    module.clients = 1000
    for _ in range(2):
        with pytest.raises(Exception, match="1000 clients cannot share 120"):
            module.setup()
    module.clients = 4
    assert made(module).clients == 4


# Sequences of tasks


def sequence(data: Synthetic | None = None, **kwargs: Any) -> TaskSequence:
    wrapped = data or table()
    return TaskSequence(wrapped, **{"tasks": 2, "classes_per_task": 2, **kwargs})


def table(**kwargs: Any) -> Synthetic:
    return Synthetic(**{"classes": 6, "samples": 600, "clients": 4, "batch_size": 16, **kwargs})


@pytest.mark.parametrize(
    "change", [{"batch_size": 5}, {"clients": 3}, {"val_fraction": 0.5}, {"samples": 500}]
)
def test_a_changed_argument_of_the_wrapped_module_is_used(change: dict[str, int]) -> None:
    module = sequence()
    before = made(module)
    for name, value in change.items():
        setattr(module.data, name, value)
    after = made(module)
    fresh = made(sequence(table(**change)))
    assert equal(after, fresh) and equal(after.at(20), fresh.at(20)) and not equal(after, before)
    assert (module.clients, module.batch_size) == (module.data.clients, module.data.batch_size)


def test_a_partition_of_the_wrapped_module_that_is_changed_in_place_is_used() -> None:
    module = sequence(table(partition=Dirichlet(100.0)))
    before = made(module)
    assert isinstance(module.data.partition, Dirichlet)
    module.data.partition.alpha = 3.0
    after = made(module)
    assert equal(after, made(sequence(table(partition=Dirichlet(3.0)))))
    assert not equal(after, before)


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": 3},
        {"classes_per_task": 3},
        {"rounds_per_task": 1},
        {"arrangement": "disjoint"},
        {"seed": 5},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_changed_argument_of_the_sequence_is_used(change: dict[str, Any]) -> None:
    module = sequence()
    made(module)
    for name, value in change.items():
        setattr(module, name, value)
    after: Any = made(module)
    fresh: Any = made(sequence(**change))
    assert (after.sequences, after.starts) == (fresh.sequences, fresh.starts)
    assert equal(after.at(2), fresh.at(2))


def test_the_batch_size_of_a_sequence_is_that_of_the_wrapped_module() -> None:
    module = sequence()
    made(module)
    module.batch_size, module.clients = 5, 3
    assert (module.data.batch_size, module.data.clients) == (5, 3)
    assert equal(made(module), made(sequence(table(batch_size=5, clients=3))))


def test_the_sequence_is_split_again_if_only_the_wrapped_seed_changes() -> None:
    module = sequence(seed=5)
    module.use_seed(1)
    before = made(module)
    module.use_seed(2)
    assert not equal(made(module), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("val_fraction", 1.5), ("batch_size", 0), ("clients", 0), ("batch_size", None)],
)
def test_a_changed_argument_is_checked_again(name: str, value: Any) -> None:
    module = digits()
    module.setup()
    setattr(module, name, value)
    with pytest.raises(FlsuiteError, match=rf"Digits: {name} must be"):
        module.setup()


def test_a_changed_arrangement_is_checked_again() -> None:
    module = TaskSequence(digits(partition=IID()), tasks=2, classes_per_task=2, rounds_per_task=1)
    module.arrangement = "disjiont"  # type: ignore[assignment]
    with pytest.raises(FlsuiteError, match="TaskSequence: arrangement must be one of"):
        module.setup()
