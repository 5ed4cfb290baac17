"""A start from other classes, and the distances between clients' models."""

import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import FedAvg
from flsuite.data import CIFAR10, DataSpec, DataSplit, Digits, PublishedSplits
from flsuite.studies.transfer import CIFAR10Classes, LocalDistances, distances, of_classes
from tests.conftest import classifier, table, trainer


def split(labels: list[int]) -> DataSplit:
    x = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 16, 16, 3)
    return DataSplit(x.contiguous(), torch.tensor(labels))


@pytest.fixture(autouse=True)
def _ten_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the published data by two images per class."""
    names = tuple(f"class {c}" for c in range(10))
    part = split([*range(10), *range(10)])
    published = PublishedSplits(DataSpec((3, 16, 16), 10, class_names=names), part, part)
    monkeypatch.setattr(CIFAR10, "load", lambda self: published)


def test_labels_count_from_zero_in_the_order_of_the_classes() -> None:
    part = of_classes(split([7, 3, 5, 7, 9]), [7, 9, 3], renumber=True)
    assert part.y.tolist() == [0, 2, 0, 1]
    assert part.x[:, 0, 0, 0].tolist() == [0, 1, 3, 4]
    part = of_classes(split([7, 3, 5, 7, 9]), [7, 9, 3], renumber=False)
    assert part.y.tolist() == [7, 3, 7, 9]


def test_the_start_has_another_output_layer_than_the_federation() -> None:
    start = CIFAR10Classes(classes=[0, 1], renumber=False).load()
    assert start.spec.num_classes == 10 and {*start.train.y.tolist()} == {0, 1}
    federated = CIFAR10Classes(classes=[8, 9]).load()
    assert federated.spec.class_names == ("class 8", "class 9")
    assert {*federated.train.y.tolist()} == {*federated.test.y.tolist()} == {0, 1}


@pytest.mark.parametrize("classes", [[], [1, 1], [0, 10]])
def test_other_classes_are_refused(classes: list[int]) -> None:
    with pytest.raises(FlsuiteError, match=r"data\.classes must be different numbers from 0 to 9"):
        CIFAR10Classes(classes=classes).load()


def test_distances_by_hand() -> None:
    start = torch.tensor([3.0, 4.0])
    models = [start + torch.tensor([0.0, 5.0]), start + torch.tensor([10.0, 5.0])]
    found = distances(models, start)
    assert found["pair"] == pytest.approx(10 / 5)
    assert found["start"] == pytest.approx((5 + 125**0.5) / 2 / 5)


def test_each_round_has_its_own_distances_from_its_own_start() -> None:
    def fit(rounds: int):
        made = trainer(rounds=rounds, aggregator=FedAvg(), callbacks=[LocalDistances()])
        made.fit(classifier(), Digits(clients=3, train_samples=120, batch_size=16))
        return table(made)

    one, two = fit(1), fit(2)
    for name in ("distance/start", "distance/pair"):
        assert two[1, "global", "train", name] == one[1, "global", "train", name] > 0
        assert two[2, "global", "train", name] != two[1, "global", "train", name]
