"""An argument that cannot be is refused where it is given, by its name and with what it must be."""

from typing import Any

import pytest

from flsuite import FlsuiteError, aggregators as methods

INF, NAN = float("inf"), float("nan")
THRICE = methods.Hyperbolic(c=3.0)
BAD: dict[Any, list[tuple[dict[str, Any], str]]] = {
    methods.CMGA: [
        ({"beta": 1.0}, "beta must be"),
        ({"lr": 0.0}, "lr must be"),
        ({"delta": -1.0}, "delta must be"),
        ({"sigma_floor": NAN}, "sigma_floor must be"),
    ],
    methods.DENSE: [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 2.0}, r"epochs must be a whole number, got 2\.0"),
        ({"generator_steps": 0}, "generator_steps must be at least 1"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"latent": 0}, "latent must be at least 1"),
        ({"generator_crop": 0.5}, "generator_crop must be a whole number"),
        ({"width": 0.0001}, r"width must be at least 0\.015625"),
        ({"generator_lr": NAN}, "generator_lr must be positive"),
        ({"betas": (0.5, 1.0)}, r"betas must be in \[0, 1\)"),
        ({"adv_weight": -1.0}, "adv_weight must be at least 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"student_crop": -1}, "student_crop must be at least 0"),
        ({"precision": "16-mixed"}, "precision must be one of 32-true, bf16-mixed"),
    ],
    methods.DPFedAvg: [
        ({}, "give either noise_multiplier"),
        ({"noise_multiplier": 1.0, "target_epsilon": 8.0}, "give either"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
        ({"noise_multiplier": 1.0, "clip": 0.0}, "clip must be positive"),
        ({"noise_multiplier": 1.0, "clip": INF}, "an infinite clip does not bound"),
        ({"target_epsilon": 1.0, "clip": INF}, "an infinite clip does not bound"),
        ({"noise_multiplier": 0.0, "clip": INF, "quantile": 0.5}, "an infinite clip"),
        ({"target_epsilon": 0.0}, "target_epsilon must be positive"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta must be above 0 and below 1"),
        ({"noise_multiplier": 1.0, "quantile": 1.5}, "quantile must be above 0 and at most 1"),
        ({"noise_multiplier": 1.0, "clip_lr": 0.0}, "clip_lr must be positive"),
        ({"noise_multiplier": 1.0, "count_noise": -1.0}, "count_noise must be at least 0"),
    ],
    methods.FedAdagrad: [({"tau": -1e-3}, "tau must be"), ({"beta1": -0.5}, "beta1 must be")],
    methods.FedAdam: [({"lr": -1.0}, "lr must be"), ({"beta1": 1.0}, "beta1 must be")],
    methods.FedAsync: [
        ({"mixing": 0.0}, "mixing must be above 0 and at most 1"),
        ({"mixing": 1.5}, "mixing must be above 0 and at most 1"),
        ({"mixing": NAN}, "mixing must be above 0"),
        ({"weighting": "size"}, "weighting must be one of"),
        ({"staleness": THRICE}, r"at most 1, got 0.5 \* 3.0; lower one"),
    ],
    methods.FedAvgM: [({"lr": 0.0}, "lr must be"), ({"momentum": 1.0}, "momentum must be")],
    methods.FedBuff: [
        ({"mode": "average"}, "mode must be one of delta, mix"),
        ({"normalize": "sum"}, "normalize must be one of buffer, weights"),
        ({"weighting": "size"}, "weighting must be one of"),
        ({"eta": -0.1}, "eta must be at least 0"),
        ({"eta": INF}, "eta must be at least 0"),
        ({"mode": "mix", "eta": 1.5}, "eta must be at most 1 in mode mix"),
        ({"mode": "mix", "staleness": THRICE}, r"at most 1, got 0.5 \* 3.0"),
    ],
    methods.FedFisher: [
        ({"fisher": "block"}, "fisher must be"),
        ({"solver": "newton"}, "solver must be"),
        ({"steps": 0}, "steps must be"),
        ({"steps": 10.5}, "steps must be"),
        ({"samples": 99.5}, "samples must be"),
        ({"expectation": "empirical"}, "expectation must be"),
    ],
    methods.FedProx: [({"mu": -0.1}, "mu must be"), ({"mu": NAN}, "mu must be")],
    methods.FedYogi: [({"beta2": 1.0}, "beta2 must be"), ({"tau": 0.0}, "tau must be")],
    methods.FisherAveraging: [
        ({"groups": []}, "groups"),
        ({"groups": "flow"}, "groups"),
        ({"estimator": "loop"}, "estimator"),
        ({"damping": -1.0}, "damping"),
        ({"damping": NAN}, "damping"),
        ({"batches": 1.5}, "batches must be a whole number"),
    ],
    methods.FisherMerge: [
        ({"floor": -1.0}, "floor"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"samples": 9.5}, "samples must be a whole number"),
        ({"expectation": "some"}, "expectation"),
        ({"groups": "flow"}, "groups"),
    ],
    methods.OTFusion: [
        ({"pivot": pivot}, "pivot must be one of largest or ")
        for pivot in ("smallest", -1, True, 1.5)
    ],
    methods.PFNM: [
        ({"sigma": 0.0}, "sigma must be positive"),
        ({"sigma0": INF}, "sigma0 must be positive"),
        ({"gamma": -1.0}, "gamma must be positive"),
        ({"sweeps": -1}, "sweeps must be at least 0"),
        ({"sweeps": 1.5}, "sweeps must be a whole number"),
    ],
    methods.RegMean: [
        *(({"alpha": alpha}, "alpha must be from 0 to 1") for alpha in (-0.1, 1.1, NAN)),
        ({"samples": 0}, "samples must be at least 1"),
        ({"samples": 99.5}, r"samples must be a whole number, got 99\.5"),
    ],
    methods.SCAFFOLD: [
        ({"lr": 0.0}, "lr must be"),
        ({"lr": NAN}, "lr must be"),
        ({"control": "option_one"}, "control must be"),
    ],
}


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
def test_a_bad_argument_is_named(kind: Any) -> None:
    for settings, said in BAD[kind]:
        with pytest.raises(FlsuiteError, match=rf"^\w+: .*{said}"):
            kind(**settings)
