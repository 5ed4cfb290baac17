"""Arithmetic on state dicts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsuite.common.state import (
    State,
    Sums,
    add,
    cast,
    clone,
    difference,
    divided,
    flatten_tree,
    load_,
    matches,
    mean_of,
    mismatch,
    nbytes,
    nested_like,
    non_finite,
    scaled,
)


def example() -> State:
    return {
        "encoder.weight": torch.ones(2, 3),
        "decoder.weight": torch.full((3,), 2.0),
        "decoder.bn.running_mean": torch.zeros(3),
        "decoder.bn.num_batches_tracked": torch.tensor(4),
    }


@pytest.mark.parametrize(
    ("patterns", "private"),
    [
        ([], set()),
        (["encoder."], {"encoder.weight"}),
        (["*"], set(example())),
        (["*bn*"], {"decoder.bn.running_mean", "decoder.bn.num_batches_tracked"}),
        (["weight"], set()),
        (["?ecoder.weight", "encoder"], {"encoder.weight", "decoder.weight"}),
        (["[de]*.weight"], {"encoder.weight", "decoder.weight"}),
        (["Encoder."], set()),
        (["decoder.bn.running_mean"], {"decoder.bn.running_mean"}),
    ],
)
def test_patterns_match_by_prefix_and_wildcard(patterns: list[str], private: set[str]) -> None:
    assert {name for name in example() if matches(name, patterns)} == private


def test_clone_is_a_snapshot_in_its_memory_format() -> None:
    module = nn.Linear(2, 2)
    snapshot = clone(module.state_dict())
    before = snapshot["weight"].tolist()
    with torch.no_grad():
        module.weight.add_(1.0)
    assert snapshot["weight"].tolist() == before
    assert not snapshot["weight"].requires_grad
    assert snapshot["bias"].data_ptr() != module.bias.data_ptr()
    weight = torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert clone({"weight": weight})["weight"].is_contiguous(memory_format=torch.channels_last)


def test_load_copies_into_the_tensors_that_are_there() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    resident = module.state_dict()
    pointer, source = module.weight.data_ptr(), {"weight": torch.rand(4, 3, 3, 3)}
    bias = module.bias.tolist()
    load_(resident, source)
    assert torch.equal(module.weight, source["weight"])
    assert module.weight.data_ptr() == pointer
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert module.bias.tolist() == bias
    with pytest.raises(KeyError, match="unknown"):
        load_(resident, {"unknown": torch.zeros(1)})


def test_difference_and_add_return_new_tensors() -> None:
    a = {"w": torch.tensor([3.0]), "b": torch.tensor([1.0])}
    b = {"w": torch.tensor([1.0]), "b": torch.tensor([5.0])}
    assert {k: v.item() for k, v in difference(a, b).items()} == {"w": 2.0, "b": -4.0}
    total = add(a, {"w": b["w"]}, -2.0)
    assert {k: v.item() for k, v in total.items()} == {"w": 1.0, "b": 1.0}
    total["b"].zero_()
    total["w"].zero_()
    assert (a["w"].item(), a["b"].item(), b["w"].item()) == (3.0, 1.0, 1.0)


def test_a_mean_is_weighted_and_counters_take_the_maximum() -> None:
    def state(w: list[float], count: int, mask: list[bool]) -> State:
        return {"w": torch.tensor(w), "count": torch.tensor(count), "mask": torch.tensor(mask)}

    one, other = state([1.0, 0.0], 9, [True, False]), state([5.0, 4.0], 2, [False, False])
    average = mean_of([(one, 3.0), (other, 1.0)])
    assert average["w"].tolist() == [2.0, 1.0]
    assert average["count"].item() == 9
    assert average["mask"].tolist() == [True, False]
    dtypes = {name: value.dtype for name, value in average.items()}
    assert dtypes == {"w": torch.float64, "count": torch.int64, "mask": torch.bool}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mean_of_one_is_it_bit_for_bit(dtype: torch.dtype) -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    mean = cast(mean_of([({"w": value}, 37.0)]), {"w": value})
    assert mean["w"].dtype == dtype
    assert torch.equal(mean["w"], value)


def test_sums_do_not_lose_small_terms() -> None:
    """Check a sum of 2^25, which in float32 would lose each 1."""
    ones = [({"w": torch.tensor([1.0])}, 1.0)] * 63
    mean = mean_of([({"w": torch.tensor([2.0**25])}, 1.0), *ones])
    assert mean["w"].item() == pytest.approx((2**25 + 63) / 64, rel=1e-12)


def test_sums_alias_nothing() -> None:
    first = {"w": torch.ones(1, dtype=torch.float64), "count": torch.tensor(1)}
    sums = Sums()
    sums.add(first)
    average = divided(sums.values, 1.0)
    sums.add({"w": torch.full((1,), 3.0, dtype=torch.float64), "count": torch.tensor(5)})
    assert (first["w"].item(), first["count"].item()) == (1.0, 1)
    assert (average["w"].item(), average["count"].item()) == (1.0, 1)
    divided(sums.values, 1.0)["count"].zero_()
    assert sums.values["count"].item() == 5


def test_sums_are_nested_and_merge() -> None:
    one, other = Sums(), Sums()
    one.add({"a": {"w": torch.ones(2), "count": torch.tensor(3)}, "n": 2})
    other.add({"a": {"w": torch.ones(2), "count": torch.tensor(1)}, "n": 0.5}, 2.0)
    one.add(other.values)
    assert one.values["a"]["w"].tolist() == [3.0, 3.0]
    assert (int(one.values["a"]["count"]), one.values["n"]) == (3, 3.0)
    assert one.is_finite
    one.add({"a": {"w": torch.tensor([0.0, math.inf])}})
    assert not one.is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_of_a_stack_is_the_sum_of_its_clients(dtype: torch.dtype) -> None:
    trees: list[Any] = []
    for client in range(5):
        w, large = torch.randn(3, 2).to(dtype), torch.randn(2**15).to(dtype)
        model = {"w": w, "large": large, "count": torch.tensor(client)}
        own = {"model": scaled(scaled(model, 0.5), client + 0.1), "weight": client + 0.1}
        trees.append({**own, "groups": {f"group{client % 2}": scaled({"w": w}, 2.0)}})
    whole, parts = Sums(), Sums()
    whole.add(trees[0])
    whole.add_all(trees[1:])
    for tree in trees:
        parts.add(tree)
    got, expected = flatten_tree(whole.values), flatten_tree(parts.values)
    assert got.keys() == expected.keys() and int(got["model/count"]) == 4
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-14, atol=1e-14)
    whole.add_all([])


def test_scaled_and_flat_trees() -> None:
    tree = {"a": {"w": torch.ones(2), "count": torch.tensor(3)}, "n": 2.0}
    twice = scaled(tree, 2.0)
    assert twice["a"]["w"].dtype == torch.float64 and twice["a"]["w"].tolist() == [2.0, 2.0]
    assert (int(twice["a"]["count"]), twice["n"]) == (3, 4.0)

    flat = flatten_tree(tree)
    assert list(flat) == ["a/w", "a/count", "n"]
    again = nested_like(tree, flat)
    assert again["a"]["w"] is tree["a"]["w"] and again["n"] == 2.0
    assert nested_like(tree, {"n": torch.tensor(5.0)}) == {"a": {}, "n": 5.0}


def test_a_mean_of_nothing() -> None:
    with pytest.raises(ZeroDivisionError, match="no weight"):
        mean_of([])
    with pytest.raises(ZeroDivisionError, match="no weight"):
        mean_of([({"w": torch.ones(1)}, 0.0)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"decoder.weight": None}, "lacks decoder.weight"),
        ({"other": torch.zeros(1)}, "has unknown entries other"),
        ({"decoder.weight": torch.zeros(4)}, "shape (4,); (3,)"),
        ({"decoder.weight": torch.zeros(3).double()}, "dtype torch.float64; torch.float32"),
        ({"decoder.weight": torch.zeros(3).to_sparse()}, "layout torch.sparse_coo; torch.strided"),
    ],
)
def test_mismatch_in_words(change: dict[str, Tensor | None], words: str | None) -> None:
    changed = {k: v for k, v in {**example(), **change}.items() if v is not None}
    if words and ";" in words:
        words = f"decoder.weight has {words} is expected"
    assert mismatch(changed, example()) == words
    assert mismatch({}, {name: torch.zeros(1) for name in "dcba"}) == "lacks a, b, c"


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        (example(), None),
        ({"a": torch.tensor([0.0, math.nan])}, "a"),
        ({"a": {"b": [torch.zeros(1), torch.tensor(-math.inf)]}}, "a.b.1"),
        ({"a": 1, "b": math.inf}, "b"),
        ({"a": (1.0, {"c": math.nan})}, "a.1.c"),
        ({"a": torch.tensor([1, 2]), "b": torch.tensor([True]), "c": "nan", "d": None}, None),
        ({"a": torch.tensor([math.inf], dtype=torch.bfloat16)}, "a"),
        (torch.tensor(math.nan), "value"),
        ({}, None),
    ],
)
def test_non_finite_names_the_first_bad_entry(tree: Any, name: str | None) -> None:
    assert non_finite(tree) == name
    assert non_finite({"fisher": torch.tensor(math.nan)}, "extras") == "extras.fisher"


def test_nbytes_counts_tensors_at_their_own_width() -> None:
    assert nbytes(example()) == 4 * 6 + 4 * 3 + 4 * 3 + 8
    assert nbytes([torch.zeros(5, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.uint8)]) == 17
    assert nbytes({"a": [1, 2.0, (torch.zeros(1),)], "b": "text", "c": None}) == 20
    assert nbytes({}) == 0
