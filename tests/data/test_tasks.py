"""Tests of sequences of tasks: the groups of classes, and the data of each round."""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import POOLED
from flsuite.data import (
    IID,
    Digits,
    Dirichlet,
    FederatedData,
    FederatedDataModule,
    Pathological,
    PublishedSplits,
    Synthetic,
    TaskSequence,
)
from flsuite.data.federated import Stage
from flsuite.data.loader import TrainLoader
from flsuite.data.tasks import Arrangement, Groups, _TaskData
from tests.models.test_classifier import Labels

ARRANGEMENTS: tuple[Arrangement, ...] = ("disjoint", "shuffled", "heterogeneous")
CLASSES, CLIENTS = 8, 4


class Published(Synthetic):
    """Synthetic data with a published validation split."""

    def load(self) -> PublishedSplits:
        source = super().load()
        val, train = torch.arange(len(source.train)).split([100, len(source.train) - 100])
        return PublishedSplits(
            source.spec, source.train.take(train), source.test, source.train.take(val)
        )


def table(kind: type[Synthetic] = Synthetic, **settings: Any) -> Synthetic:
    sizes = {"features": 7, "classes": CLASSES, "samples": 1000, "clients": CLIENTS}
    return kind(**{**sizes, "batch_size": 16, **settings})


def module(
    data: FederatedDataModule | None = None, run_seed: int = 3, **settings: Any
) -> TaskSequence:
    """Set up three tasks of two of the eight classes, two rounds each."""
    made = TaskSequence(data or table(), **{"tasks": 3, "rounds_per_task": 2, **settings})
    made.use_seed(run_seed)
    made.setup()
    return made


def task_data(data: FederatedDataModule | None = None, **settings: Any) -> _TaskData:
    found = module(data, **settings).federated
    assert isinstance(found, _TaskData)
    return found


def both(data: FederatedDataModule, **settings: Any) -> tuple[_TaskData, FederatedData]:
    """Return the data of the tasks, and the wrapped data."""
    made = module(data, **settings)
    assert isinstance(made.federated, _TaskData)
    return made.federated, made.data.federated


def flat(groups: Groups) -> list[int]:
    return [c for group in groups for c in group]


def isin(y: Tensor, classes: Sequence[int]) -> Tensor:
    return torch.isin(y, torch.tensor(sorted(classes)))


def met(data: _TaskData, client: int, task: int) -> list[int]:
    return flat(data.sequences[client][: task + 1])


def met_by_any(data: _TaskData, task: int) -> set[int]:
    return {c for client in range(data.clients) for c in met(data, client, task)}


# Groups


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_client_meets_groups_of_the_given_size_and_no_class_twice(
    arrangement: Arrangement,
) -> None:
    data = task_data(arrangement=arrangement, tasks=2, classes_per_task=3)
    assert len(data.sequences) == CLIENTS and len(data.starts) == 2
    for groups in data.sequences:
        assert [len(group) for group in groups] == [3, 3] and len(set(flat(groups))) == 6
        assert set(flat(groups)) <= set(range(CLASSES))


def test_arrangements_differ_in_the_groups_and_their_order() -> None:
    disjoint, shuffled, heterogeneous = (task_data(arrangement=a).sequences for a in ARRANGEMENTS)
    assert len(set(disjoint)) == 1, "one order for all"
    assert len({*map(frozenset, shuffled)}) == 1 and len(set(shuffled)) > 1, "one pool"
    assert len({*map(frozenset, heterogeneous)}) > 1
    first, *others = heterogeneous
    pairs = [(a, b) for a in first for groups in others for b in groups]
    assert any(len(set(a) & set(b)) == 1 for a, b in pairs), "some in part"


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_seed_is_a_sequence(arrangement: Arrangement) -> None:
    def sequences(run_seed: int, **settings: Any) -> tuple[Groups, ...]:
        return task_data(arrangement=arrangement, run_seed=run_seed, **settings).sequences

    assert sequences(1) == sequences(1) != sequences(2)
    assert sequences(1, seed=5) == sequences(2, seed=5) == sequences(5)


def test_the_seed_of_the_tasks_is_not_that_of_the_partition() -> None:
    one, two = task_data(run_seed=1, seed=5), task_data(run_seed=2, seed=5)
    assert not one.test.rows.values.equal(two.test.rows.values)
    fixed = [task_data(table(seed=5), run_seed=seed, arrangement="disjoint") for seed in (1, 2)]
    assert fixed[0].sequences != fixed[1].sequences


@pytest.mark.parametrize("seed", [None, 5])
def test_another_run_with_the_module_splits_again(seed: int | None) -> None:
    made = module(run_seed=1, seed=seed)
    before = made.federated
    made.use_seed(1)
    made.setup()
    assert made.federated is before
    made.use_seed(2)
    made.setup()
    fresh = task_data(run_seed=2, seed=seed)
    assert made.federated.train.rows.values.equal(fresh.train.rows.values)
    assert not made.federated.train.rows.values.equal(before.train.rows.values)


def test_a_task_lasts_its_rounds_and_the_last_one_all_others() -> None:
    same, own = task_data(rounds_per_task=2), task_data(rounds_per_task=[1, 3, 2])
    assert same.starts == (1, 3, 5) and own.starts == (1, 2, 5)
    assert [same.task(round) for round in range(1, 9)] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [own.task(round) for round in range(1, 9)] == [0, 1, 1, 1, 2, 2, 2, 2]
    assert same.task(0) == 0 and same.task(10**6) == 2
    assert same.at(10**6).train.rows.values.equal(same.at(5).train.rows.values)


# A round's view


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_client_trains_on_its_own_samples_of_the_group(arrangement: Arrangement) -> None:
    data, whole = both(table(partition=Dirichlet(5.0)), arrangement=arrangement)
    for round in range(1, 7):
        view = data.at(round)
        assert view.train.x is whole.train.x
        for client in range(CLIENTS):
            own = whole.train.rows[client]
            group = data.sequences[client][(round - 1) // 2]
            expected = own[isin(whole.train.y[own], group)]
            assert len(expected) and view.train.rows[client].equal(expected)
            assert view.samples(client) == len(expected)
            assert view.class_counts(client).nonzero().flatten().tolist() == list(group)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_the_test_split_is_of_the_classes_seen_and_a_clients_part_of_those_it_has_met(
    arrangement: Arrangement,
) -> None:
    data, whole = both(table(partition=Dirichlet(5.0)), arrangement=arrangement)
    sizes = []
    for task in range(3):
        view = data.at(2 * task + 1)
        kept = isin(whole.test.y, list(met_by_any(data, task)))
        assert view.test.x.equal(whole.test.x[kept]) and view.test.y.equal(whole.test.y[kept])
        sizes.append(len(view.test))
        for client in range(CLIENTS):
            own = whole.test.rows[client]
            own = own[isin(whole.test.y[own], met(data, client, task))]
            mine = view.test.rows[client]
            assert len(own) and view.test.x[mine].equal(whole.test.x[own])
            assert view.test.y[mine].equal(whole.test.y[own])
    assert sizes[0] < len(whole.test) and sizes == sorted(sizes)


def test_held_out_samples_are_of_the_classes_that_their_client_has_met() -> None:
    data, whole = both(table(val_fraction=0.3))
    for task in range(3):
        view = data.at(2 * task + 2)
        expected = []
        for client in range(CLIENTS):
            own = whole.val.take(whole.val.rows[client])
            expected.append(own.x[isin(own.y, met(data, client, task))])
            mine = view.val.x[view.val.rows[client]]
            assert len(mine) and mine.equal(expected[-1])
        assert view.val.x.equal(torch.cat(expected))


def test_a_publishers_validation_split_is_cut_to_the_classes_seen() -> None:
    data, whole = both(table(Published), arrangement="disjoint")
    assert data.val is whole.val, "the whole split is kept"
    for task in range(3):
        validation = data.at(2 * task + 1).val
        kept = isin(whole.val.y, list(met_by_any(data, task)))
        assert validation.x.equal(whole.val.x[kept]) and 0 < kept.sum() < len(kept)
        assert not len(validation.rows.values)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_view_says_where_the_federation_is(arrangement: Arrangement) -> None:
    data = task_data(arrangement=arrangement)
    assert data.stage is None
    known = [(), *(tuple(sorted(met_by_any(data, task))) for task in range(3))]
    stages = [data.at(2 * task + 1).stage for task in range(3)]
    assert stages == [Stage(task, known[task + 1], known[task]) for task in range(3)]


def test_the_whole_is_all_that_clients_will_meet() -> None:
    data, whole = both(table(val_fraction=0.3))
    for client in range(CLIENTS):
        for name in ("train", "val", "test"):
            split, kept = getattr(whole, name), getattr(data, name)
            own = split.take(split.rows[client])
            met_by_it = own.x[isin(own.y, met(data, client, 2))]
            assert kept.x[kept.rows[client]].equal(met_by_it) and len(met_by_it) < len(own)
        each = [data.at(round).train.rows[client] for round in (1, 3, 5)]
        assert torch.cat(each).sort().values.equal(data.train.rows[client]), (
            "a sample is met in one task"
        )


def test_the_view_of_a_task_is_made_once() -> None:
    data = task_data()
    first = data.at(1)
    assert data.at(2) is first and data.at(3) is not first
    again = data.at(2)
    assert again is not first, "the view of a past task is not kept"
    same(again, first)


def test_a_pickle_leaves_the_view_behind() -> None:
    data = task_data(table(val_fraction=0.2), rounds_per_task=[1, 3, 2])
    view = data.at(3)
    found, moved = pickle.loads(pickle.dumps(data)), data.to(torch.device("meta"))
    assert data.at(3) is view and data._views
    for copy in (found, moved):
        assert (copy.sequences, copy.starts) == (data.sequences, data.starts) and not copy._views
    same(found, data)
    same(found.at(3), view)
    assert moved.train.x.is_meta


def same(a: FederatedData, b: FederatedData) -> None:
    """Check that two rounds have the same data, tensor by tensor."""
    for name in ("train", "val", "test"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert ours.rows.values.equal(theirs.rows.values), name
        assert ours.rows.offsets.equal(theirs.rows.offsets), name
        assert ours.x.equal(theirs.x) and ours.y.equal(theirs.y), name
    assert (a.spec, a.batch_size) == (b.spec, b.batch_size)


# One task


def test_one_task_of_all_classes_is_the_wrapped_data() -> None:
    made = module(table(partition=Dirichlet(0.3)), tasks=1, classes_per_task=CLASSES)
    view, whole = made.federated.at(4), made.data.federated
    same(view, whole)
    for client in (0, 3, POOLED):
        pairs = zip(TrainLoader(view, client, 1, 2), TrainLoader(whole, client, 1, 2), strict=True)
        assert all(x.equal(u) and y.equal(v) for (x, y), (u, v) in pairs)


# Refused requests


def test_too_few_classes_are_refused() -> None:
    task_data(tasks=4)
    with pytest.raises(FlsuiteError, match="3 tasks of 3 classes need 9 classes"):
        task_data(classes_per_task=3)


@pytest.mark.parametrize("partition", [Pathological(2), Dirichlet(0.02)])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_client_without_a_sample_of_a_group_is_refused(
    arrangement: Arrangement, partition: Any
) -> None:
    said = r"client \d has no sample of task \d, classes"
    wrapped = table(partition=partition)
    with pytest.raises(FlsuiteError, match=said) as error:
        task_data(wrapped, arrangement=arrangement)
    client, classes = int(str(error.value).split()[2]), str(error.value).split("[")[1].split("]")[0]
    counts = wrapped.federated.class_counts(client)
    assert not counts[[int(c) for c in classes.split(",")]].any()


def test_a_client_needs_one_class_of_a_group_only() -> None:
    """Each client has five of eight classes, so at least one of any four."""
    kwargs = {"tasks": 2, "classes_per_task": 4, "arrangement": "disjoint"}
    views = [task_data(table(partition=Pathological(5)), **kwargs).at(round) for round in (1, 3)]
    assert min(view.samples(client) for view in views for client in range(CLIENTS)) > 0


def test_several_labels_per_sample_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="TaskSequence needs one class per sample"):
        task_data(Labels(clients=2, partition=IID()), tasks=1, classes_per_task=2)


def test_clients_outside_the_federation_have_tasks_too() -> None:
    data = Digits(clients=5, unseen_clients=0.4)
    module = TaskSequence(data, tasks=2, classes_per_task=5, rounds_per_task=1)
    module.setup()
    view = module.federated.at(1)
    assert view.clients == 3 and view.unseen == 2
    assert all(len(view.train.rows[client]) for client in range(5))
