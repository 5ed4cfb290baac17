"""The protocols that each model implements."""

import pytest

from flsuite.models import ACVAE, Classifier, FusedSpaceFed, NFClassifier
from flsuite.models.protocols import (
    FlowModel,
    FusedModel,
    LatentModel,
    LikelihoodModel,
    PriorModel,
)

PROTOCOLS = (FlowModel, FusedModel, LatentModel, LikelihoodModel, PriorModel)


@pytest.mark.parametrize(
    ("model", "offered"),
    [
        (ACVAE, {LatentModel, PriorModel}),
        (Classifier, set()),
        (FusedSpaceFed, {FusedModel}),
        (NFClassifier, {FlowModel, LikelihoodModel}),
    ],
)
def test_each_model_offers_its_protocols_and_no_other(model: type, offered: set[type]) -> None:
    assert {protocol for protocol in PROTOCOLS if isinstance(model(), protocol)} == offered
