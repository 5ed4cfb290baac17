"""Tests of arguments that change between two calls of setup()."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
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
from tests.conftest import digits
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


def content(data: FederatedData) -> tuple[Any, list[Tensor]]:
    """Return the settings, rounds and first training batches of federated data."""
    rounds = [data, data.at(2), data.at(20)]
    splits = [s for view in rounds for s in (view.train, view.val, view.test) if s is not None]
    batches = [tensor for batch in TrainLoader(data, 1, seed=0, round=1) for tensor in batch]
    rows = (tensor for split in splits for tensor in (split.rows.values, split.rows.offsets))
    samples = (tensor for split in splits for tensor in (split.x, split.y))
    settings = data.batch_size, getattr(data, "sequences", ()), getattr(data, "starts", ())
    return settings, [*rows, *samples, data.scaling.scale, data.scaling.shift, *batches]


def equal(a: tuple[Any, list[Tensor]], b: tuple[Any, list[Tensor]]) -> bool:
    pairs = zip(a[1], b[1], strict=False)
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in pairs)


def images() -> Images:
    kwargs = {"partition": Dirichlet(100.0), "augment": CropFlip(1)}
    return Images(channels=1, clients=4, owners=[30] * 4, **kwargs)


def table(**kwargs: Any) -> Synthetic:
    return Synthetic(**{"classes": 6, "samples": 600, "clients": 4, "batch_size": 16, **kwargs})


def sequence(**kwargs: Any) -> TaskSequence:
    wrapped = table(partition=Dirichlet(100.0))
    return TaskSequence(wrapped, **{"tasks": 2, "classes_per_task": 2, **kwargs})


CHANGES: list[tuple[Callable[[], Any], dict[str, Any]]] = [
    (images, {"clients": 3}),
    (images, {"partition.alpha": 0.1}),
    (images, {"batch_size": 5}),
    (images, {"val_fraction": 0.5}),
    (images, {"resize": 4}),
    (images, {"standardize": False}),
    (images, {"augment.padding": 3}),
    (images, {"train_samples": 50}),
    (images, {"seed": 9}),
    (images, {"channels": 2}),
    (images, {"batch_size": 5, "seed": 9}),
    (sequence, {"data.batch_size": 5}),
    (sequence, {"data.partition.alpha": 3.0}),
    (sequence, {"batch_size": 5, "clients": 3}),
    (sequence, {"tasks": 3}),
    (sequence, {"rounds_per_task": 1}),
    (sequence, {"arrangement": "disjoint"}),
    (sequence, {"seed": 5}),
]


def apply(module: Any, change: dict[str, Any]) -> None:
    """Set arguments, also those of an argument: ``partition.alpha``."""
    for path, value in change.items():
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, module), name, value)


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_a_changed_argument_is_used(make: Callable[[], Any], change: dict[str, Any]) -> None:
    module, other = make(), make()
    before = content(made(module))
    apply(module, change)
    apply(other, change)
    after = content(made(module))
    assert equal(after, content(made(other))) and not equal(after, before)
    if isinstance(module, TaskSequence):
        wrapped = module.data
        assert (module.clients, module.batch_size) == (wrapped.clients, wrapped.batch_size)


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
