"""Tests of every partition: the common contract, one oracle each, refused requests."""

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from flsuite.common.errors import FlsuiteError
from flsuite.data.partitions import (
    IID,
    Dirichlet,
    DirichletBalanced,
    DirichletProportions,
    Natural,
    Partition,
    Pathological,
    QuantitySkew,
    SoleOwner,
    partition_labels,
)
from flsuite.data.partitions.base import assign_by_counts, checked_rows

PARTITIONS = [
    IID(),
    Dirichlet(0.05),
    Dirichlet(0.5, min_samples=2),
    Dirichlet(1e-320, max_redraws=0),
    DirichletProportions(0.05),
    DirichletProportions(0.5, min_samples=2),
    DirichletProportions(1e-320, max_redraws=0),
    DirichletBalanced(0.001),
    DirichletBalanced(0.05),
    DirichletBalanced(100.0),
    Pathological(1),
    Pathological(2),
    QuantitySkew(),
    QuantitySkew("lognormal", sigma=1000.0, min_samples=2),
    QuantitySkew("dirichlet", alpha=0.1),
    Natural(),
]
SWEEP = [(546, 2, 10), (200, 7, 1), (300, 5, 30), (1000, 10, 13)]
USES_EVERYTHING = (IID, Dirichlet, DirichletProportions, QuantitySkew, Natural)


def name(partition: Partition) -> str:
    return type(partition).__name__ + "-".join(str(v) for v in vars(partition).values())


def make_labels(n: int, classes: int, seed: int = 0) -> np.ndarray:
    """Draw labels with gaps, of unequal classes that are all present."""
    rng = np.random.default_rng(seed)
    labels = np.minimum(rng.geometric(1.5 / classes, size=n) - 1, classes - 1)
    labels[rng.choice(n, size=classes, replace=False)] = np.arange(classes)
    return 3 * labels.astype(np.int64)


def split(
    partition: Partition, labels: np.ndarray, clients: int, seed: int = 0
) -> list[np.ndarray]:
    ids = np.random.default_rng(9).integers(100, 100 + 2 * clients + 5, size=len(labels))
    ids[: 2 * clients] = 100 + np.arange(2 * clients)
    return partition(labels, clients, np.random.default_rng(seed), ids)


def table(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """Return the samples per client and class, ``(clients, classes)``."""
    classes = np.unique(labels, return_inverse=True)[1]
    return np.stack([np.bincount(classes[part], minlength=classes.max() + 1) for part in parts])


def draw(partition: Partition, labels: np.ndarray, clients: int, seed: int = 0) -> list[np.ndarray]:
    return partition(labels, clients, np.random.default_rng(seed))


@pytest.mark.parametrize("partition", PARTITIONS, ids=name)
def test_the_common_contract(partition: Partition) -> None:
    for seed, (n, classes, clients) in product([0, 1], SWEEP):
        labels = make_labels(n, classes, seed)
        before = labels.copy()
        parts = split(partition, labels, clients, seed)
        together = np.concatenate(parts)

        assert len(parts) == clients
        for part in parts:
            assert (
                np.asarray(part).dtype == np.int64 and len(part) > 0 and (np.diff(part) > 0).all()
            )
        assert len(np.unique(together)) == len(together)
        assert together.min() >= 0 and together.max() < n
        assert (labels == before).all()
        if isinstance(partition, USES_EVERYTHING):
            assert len(together) == n
        if isinstance(partition, DirichletBalanced):
            assert {*map(len, parts)} == {n // clients}
        assert all(map(np.array_equal, parts, split(partition, labels, clients, seed)))
        if clients > 1:
            assert not all(map(np.array_equal, parts, split(partition, labels, clients, seed + 1)))


@pytest.mark.parametrize(
    "partition", [p for p in PARTITIONS if getattr(p, "min_samples", 1) == 1], ids=name
)
def test_one_sample_per_client(partition: Partition) -> None:
    labels = np.arange(7) % getattr(partition, "classes_per_client", 1) + 4
    parts = partition(labels, 7, np.random.default_rng(0), np.arange(7))
    assert sorted(int(i) for part in parts for i in part) == list(range(7))


def test_iid_sizes_and_mix() -> None:
    labels = make_labels(20_003, 4)
    parts = draw(IID(), labels, 10)
    assert sorted(map(len, parts)) == [2000] * 7 + [2001] * 3
    mix = table(labels, parts) / np.array([[len(part)] for part in parts])
    assert np.abs(mix - np.bincount(labels // 3) / len(labels)).max() < 0.05


@pytest.mark.parametrize("kind", [Dirichlet, DirichletProportions])
def test_no_client_is_favoured_in_rare_classes(kind: Any) -> None:
    labels = np.repeat(np.arange(400), 5)
    sizes = table(labels, draw(kind(1e9), labels, 10)).sum(axis=1)
    assert np.abs(sizes - 200).max() < 40


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    alpha, clients = 0.5, 10
    labels = np.repeat(np.arange(500), 200)
    share = table(labels, draw(Dirichlet(alpha), labels, clients)) / 200
    variance = (1 / clients) * (1 - 1 / clients) / (alpha * clients + 1)
    assert share.var() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("kind", [Dirichlet, DirichletProportions])
@pytest.mark.parametrize("min_samples", [1, 20, 54])
def test_what_redraws_cannot_is_levelled(kind: Any, min_samples: int) -> None:
    labels = np.repeat([0, 1], [147, 399])
    for max_redraws, seed in product([0, 3], range(4)):
        parts = draw(kind(0.02, min_samples, max_redraws), labels, 10, seed)
        sizes = [len(part) for part in parts]
        assert min(sizes) >= min_samples and sum(sizes) == 546


def test_dirichlet_redraws_before_it_levels() -> None:
    labels = np.repeat(np.arange(10), 20)
    first, patient = (draw(Dirichlet(0.2, 8, redraws), labels, 10, 1) for redraws in (0, 1000))
    assert min(map(len, first)) == 8
    assert min(map(len, patient)) >= 8
    assert not all(map(np.array_equal, first, patient))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 1e9])
def test_dirichlet_proportions_spread_each_class_by_the_clients_mixes(alpha: float) -> None:
    sizes = np.array([900, 400, 50, 1, 700])
    labels = np.repeat(np.arange(5), sizes)
    mixes = np.random.default_rng(4).dirichlet(np.full(5, alpha), size=6)
    counts = table(labels, draw(DirichletProportions(alpha, 1, 0), labels, 6, 4))
    assert np.abs(counts - mixes / mixes.sum(axis=0) * sizes).max() <= 1


def test_dirichlet_proportions_give_a_class_that_no_mix_has_to_one_client() -> None:
    labels = np.repeat(np.arange(6), 100)
    for seed in range(10):
        parts = draw(DirichletProportions(1e-320, max_redraws=0), labels, 3, seed)
        wanted = np.random.default_rng(seed).dirichlet(np.full(6, 1e-320), size=3).sum(axis=0) > 0
        assert not wanted.all()
        # At least 99, because a client without any sample gets one.
        assert ((table(labels, parts)[:, ~wanted] >= 99).sum(axis=0) == 1).all()


def test_dirichlet_balanced_keeps_the_drawn_mix_where_data_is_abundant() -> None:
    clients, classes, size, seed = 5, 4, 20_000, 3
    mix = np.random.default_rng(seed).dirichlet(np.full(classes, 0.5), size=clients)
    # As many of each class as the clients will draw.
    supply = np.ceil(mix.sum(axis=0) * size).astype(np.int64)
    labels = np.repeat(np.arange(classes), supply)
    counts = table(labels, draw(DirichletBalanced(0.5), labels, clients, seed))
    assert (counts.sum(axis=1) == len(labels) // clients).all()
    assert np.abs(counts / counts.sum(axis=1, keepdims=True) - mix).max() < 0.02


@pytest.mark.parametrize(
    ("classes", "clients", "each"), [(10, 10, 2), (10, 7, 3), (7, 10, 5), (9, 9, 9), (10, 2, 3)]
)
def test_pathological_holdings(classes: int, clients: int, each: int) -> None:
    for seed in range(3):
        labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 103))
        counts = table(labels, draw(Pathological(each), labels, clients, seed))
        assert ((counts > 0).sum(axis=1) == each).all()
        holders = (counts > 0).sum(axis=0)
        assert np.ptp(holders) <= 1
        # A class that some client has is used up.
        assert (counts.sum(axis=0) == np.where(holders > 0, 103, 0)).all()
        for column in counts.T:
            assert not column.any() or np.ptp(column[column > 0]) <= 1


def test_pathological_rare_class_reaches_only_some_holders() -> None:
    labels = np.repeat([0, 1, 2], [100, 100, 1])
    counts = table(labels, draw(Pathological(2), labels, 6))
    assert (counts.sum(axis=1) > 0).all() and counts[:, 2].sum() == 1


def test_quantity_skew_lognormal_has_its_sigma() -> None:
    parts = draw(QuantitySkew(sigma=0.7), np.zeros(10**5, np.int64), 500)
    assert np.log([len(part) for part in parts]).std() == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize(
    "partition", [QuantitySkew(sigma=0.0), QuantitySkew("dirichlet", alpha=1e12)], ids=name
)
def test_quantity_skew_without_skew(partition: QuantitySkew) -> None:
    for n, clients in ((100, 10), (103, 10), (107, 49)):
        sizes = [len(part) for part in draw(partition, np.zeros(n, np.int64), clients)]
        assert np.ptp(sizes) <= 1 and sum(sizes) == n


def test_quantity_skew_min_samples() -> None:
    parts = draw(QuantitySkew(sigma=5.0, min_samples=9), np.zeros(100, np.int64), 10)
    sizes = [len(part) for part in parts]
    assert min(sizes) == 9 and max(sizes) > 15


def test_the_owner_has_its_class_alone() -> None:
    labels = np.arange(1000) % 10
    parts = draw(SoleOwner(label=3, share=0.1), labels, 5)

    assert sorted(np.concatenate(parts)) == list(range(1000))
    assert (labels[parts[0]] == 3).sum() == 100
    assert [len(part) for part in parts] == [190, 203, 203, 202, 202]
    assert not any((labels[part] == 3).any() for part in parts[1:])


def test_natural_one_client_per_owner() -> None:
    ids = np.array([7, -2, 7, 30, -2, 7])
    parts = Natural()(np.zeros(6, np.int64), 3, np.random.default_rng(0), ids)
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5], [3]]


def test_natural_groups_whole_owners_into_near_equal_clients() -> None:
    ids = np.random.default_rng(0).geometric(0.02, size=5000)
    parts = Natural()(np.zeros(5000, np.int64), 8, np.random.default_rng(0), ids)
    owners = [set(ids[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(np.unique(ids))
    assert np.ptp([len(part) for part in parts]) <= 2


def test_assign_by_counts_leaves_the_rest_unused() -> None:
    client_of = assign_by_counts(
        np.array([0, 0, 0, 1, 1]), np.array([[1, 1], [0, 1]]), np.random.default_rng(0)
    )
    assert np.bincount(client_of).tolist() == [1, 2, 2]  # the last are the unused samples
    assert sorted(client_of[:3]) == [0, 1, 2] and sorted(client_of[3:]) == [1, 2]


def test_multilabel_targets_get_one_class_each() -> None:
    targets = np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0]], np.uint8)
    assert partition_labels(targets).tolist() == [1, 3, 0]


NOT_POSITIVE = [0.0, -1.0, float("nan"), float("inf")]


@pytest.mark.parametrize(
    ("kind", "argument", "values"),
    [
        (Dirichlet, "alpha", NOT_POSITIVE),
        (DirichletBalanced, "alpha", NOT_POSITIVE),
        (DirichletProportions, "alpha", NOT_POSITIVE),
        (partial(QuantitySkew, "dirichlet"), "alpha", NOT_POSITIVE),
        (QuantitySkew, "sigma", NOT_POSITIVE[1:]),
        (partial(Dirichlet, 1.0), "min_samples", [0]),
        (partial(Dirichlet, 1.0), "max_redraws", [-1]),
        (partial(DirichletProportions, 1.0), "min_samples", [0]),
        (partial(DirichletProportions, 1.0), "max_redraws", [-1]),
        (QuantitySkew, "min_samples", [0]),
        (QuantitySkew, "distribution", ["zipf"]),
        (Pathological, "classes_per_client", [0]),
    ],
)
def test_parameters_out_of_range(kind: Any, argument: str, values: list[Any]) -> None:
    name = getattr(kind, "func", kind).__name__
    for value in values:
        with pytest.raises(FlsuiteError, match=f"{name}: {argument} must be"):
            kind(**{argument: value})


@pytest.mark.parametrize("partition", PARTITIONS, ids=name)
def test_more_clients_than_samples_or_none(partition: Partition) -> None:
    labels = np.arange(6) % 2
    with pytest.raises(FlsuiteError, match=r"lower data\.clients"):
        partition(labels, 7, np.random.default_rng(0), np.arange(6))
    with pytest.raises(FlsuiteError, match="clients must be at least 1"):
        partition(labels, 0, np.random.default_rng(0), np.arange(6))


EVEN = np.arange(8) % 2


@pytest.mark.parametrize(
    ("partition", "labels", "ids", "message"),
    [
        (Dirichlet(1.0, min_samples=3), EVEN, None, "lower Dirichlet.min_samples or data.clients"),
        (DirichletProportions(1, 3), EVEN, None, "lower DirichletProportions.min_samples"),
        (QuantitySkew(min_samples=3), EVEN, None, "lower QuantitySkew.min_samples"),
        (
            DirichletBalanced(1.0, QuantitySkew(min_samples=3)),
            EVEN,
            None,
            r"lower QuantitySkew.min_samples or data.clients",
        ),
        (Pathological(3), EVEN, None, "Pathological.classes_per_client is 3"),
        (Pathological(1), np.arange(100) // 99, None, "would have no sample.*raise Pathological"),
        (Natural(), EVEN, None, "no natural owners"),
        (Natural(), EVEN, EVEN, "2 natural owners cannot make 4 clients"),
        (SoleOwner(label=11), EVEN, None, "SoleOwner"),
    ],
)
def test_infeasible(
    partition: Partition, labels: np.ndarray, ids: np.ndarray | None, message: str
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        partition(labels, 4, np.random.default_rng(0), ids)


def test_a_sole_owner_has_others() -> None:
    with pytest.raises(FlsuiteError, match="SoleOwner"):
        draw(SoleOwner(label=1), EVEN, 1)


class Own(Partition):
    """A partition of a user."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def rows(*clients: list[int]) -> list[np.ndarray]:
    return [np.array(own, dtype=np.int64) for own in clients]


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        (rows([0, 1], [2], [3]), "returned 3 arrays for 2 clients"),
        (rows([0, 1], []), "left client 1 without samples"),
        (rows([0], [2, 9]), "returned row 9, and there are 9"),
        (rows([0], [-1]), "returned row -1, and there are 9"),
        (rows([0, 1], [1, 2]), "returned some rows twice"),
        (None, "returned a NoneType"),
        ({0: [1], 1: [2]}, "returned a dict"),
        ([1, 2], r"returned int64 of shape \(\) for client 0"),
        (rows([1], np.argwhere(np.arange(3))), r"returned int64 of shape \(2, 1\) for client 1"),
        ([[0.5, 1.5], [2.0]], r"returned float64 of shape \(2,\) for client 0"),
        ([np.arange(9) < 4, np.arange(9) > 4], r"returned bool of shape \(9,\) for client 0"),
        ([[[1], [2, 3]], [4]], r"returned object of shape \(2,\) for client 0"),
    ],
)
def test_a_split_that_is_none_is_refused(split: Any, reason: str) -> None:
    with pytest.raises(
        FlsuiteError, match=f"data.partition: Own {reason}; return one array of rows"
    ):
        checked_rows(Own(), split, samples=9, clients=2)


def test_rows_may_be_objects_and_in_any_sized_collection() -> None:
    made = [np.array([0, 1], dtype=object), range(2, 4)]
    for split in (made, tuple(made), dict(enumerate(made)).values()):
        stored = checked_rows(Own(), split, samples=4, clients=2)  # type: ignore[arg-type]
        assert stored.values.tolist() == [0, 1, 2, 3]


def test_rows_in_another_order_are_the_same_split() -> None:
    stored = checked_rows(Own(), rows([7, 4], [0, 8, 1], [5]), samples=9, clients=3)
    assert [part.tolist() for part in stored] == [[4, 7], [0, 1, 8], [5]]
