"""Encoders that are re-aligned to the decoder of the last aggregation."""

import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import FedAvg
from flsuite.data import Digits
from flsuite.data.loader import TrainLoader
from flsuite.models import CNN, FusedSpaceFed
from flsuite.models.fusedspacefed import reconstruction_error
from flsuite.studies.realignment import Realignment, _warm_up
from flsuite.trainer import FederatedTrainer
from tests.aggregators.federations import assert_equal
from tests.conftest import classifier, state, table, trainer


def fit(*epochs: int) -> FederatedTrainer:
    backbone = CNN(channels=(2, 4), hidden=(8,))
    model = FusedSpaceFed(latent_dim=4, norm="group", backbone=backbone, lr=0.05)
    data = Digits(clients=2, train_samples=80, test_samples=50, batch_size=32, resize=16)
    callbacks = [Realignment(epochs)] if epochs else []
    made = trainer(rounds=2, aggregator=FedAvg(), callbacks=callbacks)
    made.fit(model, data)
    return made


@pytest.fixture(scope="module")
def plain() -> FederatedTrainer:
    return fit()


def test_without_an_epoch_it_is_the_runs_own_score_and_nothing_changes(
    plain: FederatedTrainer,
) -> None:
    made = fit(0, 2)
    rows = table(made)
    assert rows[2, "global", "test", "realigned_0/accuracy"] == pytest.approx(
        rows[2, "global", "test", "accuracy"], abs=1e-6
    )
    assert (2, "global", "test", "realigned_2/accuracy") in rows
    assert_equal(state(made), state(plain))


def test_a_warm_up_lowers_the_reconstruction_error(plain: FederatedTrainer) -> None:
    model, data = plain.run.evaluator.model, plain.federation.data.at(2)
    plain.run.evaluator.load(plain.federation.client_state(0))

    def error() -> float:
        with torch.no_grad():
            x, _ = next(iter(data.batches_of(data.train, [data.train_rows(0)])))
            return float(reconstruction_error(model.reconstruct(x), x).mean())

    before = error()
    decoder = {name: value.clone() for name, value in model.decoder.state_dict().items()}
    _warm_up(model, TrainLoader(data, 0, 3, 3), epochs=5)
    assert error() < before
    assert_equal(decoder, model.decoder.state_dict())


def test_another_model_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="has none; use a model such as FusedSpaceFed"):
        trainer(rounds=1, callbacks=[Realignment()]).fit(classifier(), Digits(clients=2))
