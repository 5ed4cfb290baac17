"""Tests of arguments as plain numbers, and of their snapshots."""

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from flsuite.data import (
    IID,
    CropFlip,
    DataSpec,
    Digits,
    Dirichlet,
    FederatedDataModule,
    NBaIoT,
    Pathological,
    QuantitySkew,
    Synthetic,
    Table,
    TaskSequence,
)
from flsuite.data.arguments import arguments, plain, snapshot

# NumPy scalars


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (
            Digits,
            {
                "clients": np.int64(5),
                "batch_size": np.int32(8),
                "val_fraction": np.float64(0.1),
                "resize": np.int64(9),
                "rgb": np.bool_(True),
                "train_samples": np.uint16(300),
                "seed": np.int64(3),
            },
        ),
        (Dirichlet, {"alpha": np.float64(0.5), "min_samples": np.int64(2)}),
        (Pathological, {"classes_per_client": np.int64(2)}),
        (QuantitySkew, {"distribution": np.str_("dirichlet"), "alpha": np.float32(0.5)}),
        (CropFlip, {"padding": np.int64(2), "flip": np.bool_(False)}),
        (Synthetic, {"features": np.int64(4), "separation": np.float32(2.0)}),
        (NBaIoT, {"device": np.int64(3), "rows_per_file": np.int64(9)}),
        (functools.partial(Table, "t.csv", "y"), {"test_fraction": np.float64(0.3)}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_numpy_scalars_are_kept_as_python_numbers(made: Any, given: dict[str, Any]) -> None:
    obj = made(**given)
    values = {name: getattr(obj, name) for name in given}
    assert values == {name: value.item() for name, value in given.items()}
    assert {type(value) for value in values.values()} <= {bool, int, float, str}
    assert yaml.safe_load(yaml.safe_dump(values)) == values


def test_numpy_scalars_do_not_reach_the_federated_data(tmp_path: Path) -> None:
    module = Digits(clients=np.int64(5), batch_size=np.int64(8), val_fraction=np.float64(0.1))
    module.batch_size = np.int64(16)
    module.use_seed(np.int64(4))  # type: ignore[arg-type]
    module.setup()
    stored = io.BytesIO()
    torch.save((module.federated.batch_size, module.partition_seed), stored)
    stored.seek(0)
    assert torch.load(stored, weights_only=True) == (16, 4)


@pytest.mark.parametrize(
    "rounds", [np.int64(2), [np.int64(2), np.int64(2)], (2, np.int64(2)), np.array([2, 2])]
)
def test_numpy_scalars_in_a_sequence_of_tasks(rounds: Any) -> None:
    module = TaskSequence(Digits(clients=2), np.int64(2), np.int64(3), rounds)
    assert type(module.tasks) is type(module.classes_per_task) is int
    module.setup()
    federated: Any = module.federated
    assert federated.starts == (1, 3) and all(type(start) is int for start in federated.starts)


def test_a_list_without_numpy_scalars_stays_the_same_object() -> None:
    names = ["a", "b"]
    assert plain(names) is names and plain([np.int64(1), 2]) == [1, 2]
    assert Table("t.csv", "y", features=names).features is names


# Snapshots


class Holder:
    """An object with one argument."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.zeros(3), lambda v: v.fill(1)),
        (torch.zeros(3, dtype=torch.bfloat16), lambda v: v.fill_(1)),
        ([1, [2]], lambda v: v[1].append(3)),
        ({"a": [1]}, lambda v: v["a"].append(2)),
        (Holder(Holder(1)), lambda v: setattr(v.value, "value", 2)),
        (functools.partial(print, [1]), lambda v: v.args[0].append(2)),
    ],
    ids=["array", "tensor", "list", "dict", "object", "partial"],
)
def test_a_snapshot_differs_after_a_change_in_place(value: Any, change: Any) -> None:
    before = snapshot(value)
    assert snapshot(value) == before
    change(value)
    assert snapshot(value) != before


def test_objects_are_compared_by_type_and_arguments() -> None:
    assert snapshot(Dirichlet(0.5)) == snapshot(Dirichlet(0.5)) != snapshot(Dirichlet(0.6))
    assert snapshot(CropFlip(1)) != snapshot(Pathological(1))
    generator = np.random.default_rng(0)
    assert snapshot(generator) == snapshot(generator) != snapshot(np.random.default_rng(0))
    assert snapshot(IID) == snapshot(IID) and snapshot(len) == snapshot(len) != snapshot(max)


def test_arguments_include_those_of_base_classes() -> None:
    names = set(arguments(Synthetic()))
    assert {"features", "data_seed", "clients", "partition", "seed"} <= names

    class Fixed(FederatedDataModule):
        """A module that takes none of the arguments of its base class."""

        def __init__(self) -> None:
            super().__init__(clients=3)

        load = Synthetic.load

    assert arguments(Fixed())["clients"] == 3


def test_a_spec_of_numpy_numbers_and_names_is_plain_data() -> None:
    spec = DataSpec((np.int64(3),), np.int64(2), "binary", tuple(np.array(["benign", "malignant"])))
    assert [type(value) for value in (*spec.shape, spec.num_classes)] == [int, int]
    assert [type(name) for name in spec.class_names] == [str, str]
