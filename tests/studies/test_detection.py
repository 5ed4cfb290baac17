"""Anomaly detection: the scores by hand, and classes that nobody trains on."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from flsuite.aggregators import CMGA, LocalOnly
from flsuite.common.errors import FlsuiteError
from flsuite.models import ACVAE
from flsuite.studies.detection import (
    Detection,
    MNISTAnomalies,
    SklearnTable,
    detection_scores,
    without,
)
from tests.conftest import classifier, digits, trainer


def test_scores_by_hand() -> None:
    """Of 100 known samples one may raise an alarm; two anomalies of four lie above it."""
    known = torch.arange(100.0)
    anomalies = torch.tensor([98.5, 50.5, 99.5, 200.0])
    unknown = torch.tensor([False] * 100 + [True] * 4)
    scores = detection_scores(torch.cat([known, anomalies]), unknown, known[:51])
    below = (99 + 51 + 100 + 100) / 400
    assert scores["auroc"] == pytest.approx(below)
    assert scores["recall"] == 0.5
    # The threshold is 49.5: 50 known samples and all four anomalies raise an alarm.
    assert scores["f1"] == pytest.approx(2 * 4 / (2 * 4 + 50))


def test_scores_of_any_size_give_the_same_area() -> None:
    """Energies in nats reach thousands, where a sigmoid would not tell them apart."""
    unknown = torch.tensor([False, False, True, True])
    scores = detection_scores(torch.tensor([1e4, 3e4, 2e4, 4e4]), unknown, torch.tensor([1e4]))
    assert scores["auroc"] == 0.75


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "digits"])
def test_nobody_trains_on_anomalies_and_all_are_tested(name: Any) -> None:
    data = SklearnTable(name, anomalies=[0], clients=3)
    data.setup()
    federated = data.federated
    assert 0 not in federated.train.y and 0 in federated.test.y
    x = federated.train.x
    assert float(x.min()) == 0.0 and float(x.max()) == 1.0 and federated.spec.shape == (x.shape[1],)


@pytest.mark.parametrize("classes", [[0, 1], [7]])
def test_classes_that_cannot_be_left_out_are_refused(classes: list[int]) -> None:
    with pytest.raises(FlsuiteError, match="anomalies must be some of the classes"):
        SklearnTable("breast_cancer", anomalies=classes).setup()


@pytest.mark.parametrize(("aggregator", "rounds"), [(CMGA, 2), (LocalOnly, 1)])
def test_a_federation_finds_what_it_has_not_seen(aggregator: Any, rounds: int) -> None:
    model = ACVAE(latent_dim=8, optimizer=partial(AdamW, lr=3e-3))
    made = trainer(
        rounds=rounds,
        max_epochs=4 - rounds,
        aggregator=aggregator(),
        callbacks=[Detection()],
        gradient_clip_val=0.5,
        evaluate_every=2,
    )
    made.fit(model, SklearnTable("breast_cancer", clients=3, batch_size=16))
    rows = {row.metric: row.value for row in made.run.folder.table.rows if row.split == "test"}
    assert rows["detection/auroc"] > 0.85 and rows["forest/auroc"] > 0.85
    for name in ("detection/f1", "detection/recall", "forest/f1", "forest/recall"):
        assert 0.0 <= rows[name] <= 1.0


def test_what_it_cannot_score_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="densities of classes"):
        trainer(rounds=1, callbacks=[Detection()]).fit(classifier(), digits())
    with pytest.raises(FlsuiteError, match=r"set data\.anomalies"):
        trainer(rounds=1, callbacks=[Detection()]).fit(ACVAE(), digits(standardize=False))


def test_mnist_without_a_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flsuite.data.datasets.vision.MNIST.load", lambda self: digits().load())
    data = MNISTAnomalies(anomalies=[3, 4])
    splits = data.load()
    assert not {3, 4} & {*splits.train.y.tolist()} and {3, 4} <= {*splits.test.y.tolist()}
    assert len(without(splits.train, [0])) < len(splits.train)
