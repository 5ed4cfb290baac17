"""The protocols that each model implements, and the arguments that it refuses."""

import math
from typing import Any

import pytest

from flsuite.common.errors import FlsuiteError
from flsuite.models import ACVAE, Classifier, FusedSpaceFed, NFClassifier
from flsuite.models.abilities import FlowModel, FusedModel, LatentModel, LikelihoodModel, PriorModel

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


REFUSED: dict[type, dict[str, Any]] = {
    ACVAE: {"reconstruction": "l1", "latent_dim": 0, "kl_weight": -1.0, "log_variance_limit": 0.0},
    FusedSpaceFed: {
        "autoencoder": "vae",
        "fusion": "product",
        "fusion_scale": -0.5,
        "norm": "layer",
        "latent_dim": 0,
        "warmup_epochs": -1,
        "lambda_rec": -1.0,
        "lambda_sp": math.nan,
        "lr": 0.0,
        "autoencoder_lr": -0.1,
        "momentum": -0.1,
        "weight_decay": -1.0,
    },
    NFClassifier: {
        "feature_dim": 1,
        "couplings": 0,
        "theta": 1.5,
        "k_replay": -0.1,
        "k_global": math.nan,
        "clip": -1.0,
        "lr": 0.0,
        "flow_lr": math.inf,
    },
}


@pytest.mark.parametrize(
    ("model", "name"), [(kind, name) for kind in REFUSED for name in REFUSED[kind]]
)
def test_bad_arguments_are_named(model: type, name: str) -> None:
    with pytest.raises(FlsuiteError, match=f"^{model.__name__}: {name} must be"):
        model(**{name: REFUSED[model][name]})
