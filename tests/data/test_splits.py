"""Tests of the assignment of test rows to clients."""

import numpy as np
import torch

from flsuite.data import IID, Natural, Synthetic
from flsuite.data.splits import split_test_by_owner, split_test_like_train


def test_test_samples_of_a_class_that_nobody_has_go_to_nobody() -> None:
    labels, test_labels = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2, 2])
    parts = split_test_like_train(labels, [np.array([0, 1]), np.array([2])], test_labels, seed=0)
    assert [part.tolist() for part in parts] == [[0, 1], [2]]


def test_only_training_rows_decide_the_class_mix() -> None:
    labels = np.repeat([0, 1], 50)
    rows = [np.arange(0, 30), np.arange(30, 90)]  # rows 90 to 99 belong to no client
    test_labels = np.repeat([0, 1], 10)
    parts = split_test_like_train(labels, rows, test_labels, seed=1)
    counts = [np.bincount(test_labels[part], minlength=2).tolist() for part in parts]
    assert counts == [[6, 0], [4, 10]]


# Owners


def test_test_samples_follow_their_owner_only_where_owners_are_whole() -> None:
    whole = Synthetic(owners=2, clients=2, partition=Natural())
    cut = Synthetic(owners=2, clients=5, partition=IID())
    for module in (whole, cut):
        module.setup()
    ids = whole.federated.test.ids
    assert ids is not None
    assert all(len(ids[whole.federated.test.rows[c]].unique()) == 1 for c in range(2))
    assert min(cut.federated.test.rows.lengths()) > 0
    assert len(cut.federated.test.rows.values) == len(cut.federated.test)


def test_test_rows_follow_an_owner_whose_training_rows_are_all_held_out() -> None:
    data = Synthetic(owners=800, clients=20, partition=Natural(), val_fraction=0.5)
    data.setup()
    federated = data.federated
    assert federated.train.ids is not None and federated.test.ids is not None
    trained = federated.train.ids[federated.train.rows.values]
    assert not torch.isin(federated.test.ids, trained).all(), "some owners only validate"
    for client in range(20):
        parts = (federated.train, federated.val)
        owners = torch.cat([part.ids[part.rows[client]] for part in parts])
        assert torch.isin(federated.test.ids[federated.test.rows[client]], owners).all()
    assert federated.test.rows.values.sort().values.equal(torch.arange(400))


def test_owners_are_whole_only_if_their_rows_are_with_one_client() -> None:
    ids = np.array([5, 5, 7, 7, 9])

    def split(*rows: list[int]) -> list[list[int]] | None:
        parts = split_test_by_owner(ids, [np.array(own) for own in rows], np.array([9, 5, 8]))
        return None if parts is None else [part.tolist() for part in parts]

    assert split([0, 1], [2, 3, 4]) == [[1], [0]]
    assert split([0], [2, 4]) == [[1], [0]], "unused rows do not matter"
    assert split([0, 1], [2, 3]) == [[1], []], "test rows of an unused owner go to nobody"
    assert split([0, 1, 2], [3, 4]) is None
