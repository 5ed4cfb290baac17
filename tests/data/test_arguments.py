"""Tests of arguments as plain numbers, and of their snapshots."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from flsuite.common.arguments import arguments
from flsuite.common.errors import FlsuiteError
from flsuite.data import (
    CINIC10,
    GTSRB,
    IID,
    CropFlip,
    DataSpec,
    Digits,
    Dirichlet,
    FeatureSkew,
    FederatedDataModule,
    NBaIoT,
    Pathological,
    QuantitySkew,
    Synthetic,
    Table,
    TaskSequence,
)
from flsuite.data.arguments import plain, snapshot

table, series = partial(Table, "t.csv", "kind"), partial(TaskSequence, Digits(), tasks=3)

# NumPy scalars


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (Digits, {"clients": np.int64(5), "val_fraction": np.float64(0.1), "rgb": np.bool_(True)}),
        (Digits, {"train_samples": np.uint16(300), "batch_size": np.int32(8)}),
        (Dirichlet, {"alpha": np.float64(0.5), "min_samples": np.int64(2)}),
        (QuantitySkew, {"distribution": np.str_("dirichlet"), "alpha": np.float32(0.5)}),
        (CropFlip, {"padding": np.int64(2), "flip": np.bool_(False)}),
        (Synthetic, {"features": np.int64(4), "separation": np.float32(2.0)}),
        (NBaIoT, {"device": np.int64(3), "rows_per_file": np.int64(9)}),
        (table, {"test_fraction": np.float64(0.3)}),
    ],
)
def test_numpy_scalars_are_kept_as_python_numbers(made: Any, given: dict[str, Any]) -> None:
    obj = made(**given)
    values = {name: getattr(obj, name) for name in given}
    assert values == {name: value.item() for name, value in given.items()}
    assert {type(value) for value in values.values()} <= {bool, int, float, str}
    assert yaml.safe_load(yaml.safe_dump(values)) == values


def test_a_list_without_numpy_scalars_stays_the_same_object() -> None:
    names = ["a", "b"]
    assert plain(names) is names and plain([np.int64(1), 2]) == [1, 2]
    assert Table("t.csv", "y", features=names).features is names


# Arguments that are refused


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        (CINIC10, {"valid": "test"}, "CINIC10: valid must be one of validation"),
        (CropFlip, {"padding": -1}, "CropFlip: padding must be at least 0, got -1"),
        *(
            (Digits, {"val_fraction": value}, r"Digits: val_fraction must be in \[0, 1\)")
            for value in (-0.1, 1.0, float("nan"))
        ),
        *(
            (Digits, {name: 0}, f"Digits: {name} must be at least 1, got 0")
            for name in ("clients", "batch_size", "resize", "train_samples", "test_samples")
        ),
        (Digits, {"server_samples": -1}, "Digits: server_samples must be at least 0"),
        (Digits, {"server_samples": None}, "server_samples must be a whole number"),
        *(
            (Digits, {"train_part": part}, "Digits: train_part must be a start and an end")
            for part in [(0.5, 0.5), (0.6, 0.4), (-0.1, 0.5), (0.5, 1.1), (0.5,)]
        ),
        (FeatureSkew, {}, "changes nothing; set one of rotation"),
        (GTSRB, {"size": 0}, "GTSRB: size must be at least 1, got 0"),
        (NBaIoT, {"classes": "all"}, "binary, family, attack"),
        (NBaIoT, {"device": 10}, "from 1 to 9"),
        (NBaIoT, {"rows_per_file": 4}, "at least 5"),
        (Synthetic, {"classes": 1}, "Synthetic: classes must be at least 2, got 1"),
        (Synthetic, {"classes": 5, "features": 3}, "5 equidistant means need 4 dimensions"),
        (Synthetic, {"samples": 5}, "Synthetic: samples must be at least twice"),
        (Synthetic, {"separation": -1.0}, "Synthetic: separation must be at least 0"),
        (Synthetic, {"separation": float("nan")}, "Synthetic: separation must be at least 0"),
        (Synthetic, {"owners": -1}, "Synthetic: owners must be at least 0, got -1"),
        (Synthetic, {"owners": 81, "samples": 100}, "owners must be at most the 80 training"),
        (Synthetic, {"owners": 2, "owner_shift": float("inf")}, "owner_shift must be at least 0"),
        (table, {"test_fraction": 0.0}, "Table: test_fraction must be above 0"),
        (table, {"scale": "robust"}, "Table: scale must be one of minmax, standard"),
        (table, {"features": []}, "Table: features must be at least one column"),
        (table, {"features": ["a", "a"]}, "none twice"),
        (table, {"features": ["kind"]}, "must not include the label 'kind'"),
        (series, {"tasks": 0}, "TaskSequence: tasks must be at least 1, got 0"),
        (series, {"classes_per_task": 0}, "TaskSequence: classes_per_task must be"),
        (series, {"rounds_per_task": 0}, "TaskSequence: rounds_per_task must be"),
        (series, {"rounds_per_task": [2, 0, 2]}, "TaskSequence: rounds_per_task must be"),
        (series, {"rounds_per_task": [2, 2]}, "rounds_per_task has 2 numbers for 3 tasks"),
        (series, {"arrangement": "random"}, "arrangement must be one of disjoint, shuffled"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        make(**kwargs)


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
        (partial(print, [1]), lambda v: v.args[0].append(2)),
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
    names = set(arguments(Synthetic(), inherited=True))
    assert {"features", "data_seed", "clients", "partition", "seed"} <= names

    class Fixed(FederatedDataModule):
        """A module that takes none of the arguments of its base class."""

        def __init__(self) -> None:
            super().__init__(clients=3)

        load = Synthetic.load

    assert arguments(Fixed(), inherited=True)["clients"] == 3


def test_a_spec_of_numpy_numbers_and_names_is_plain_data() -> None:
    spec = DataSpec((np.int64(3),), np.int64(2), "binary", tuple(np.array(["benign", "malignant"])))
    assert [type(value) for value in (*spec.shape, spec.num_classes)] == [int, int]
    assert [type(name) for name in spec.class_names] == [str, str]
