"""One round of every one-shot aggregator: engines, kept models, refusals."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import (
    DENSE,
    PFNM,
    Aggregator,
    FedAvg,
    FedFisher,
    FisherMerge,
    LowRank,
    Mean,
    OTFusion,
    PairwiseMasks,
    Quantize,
    RegMean,
    Rule,
)
from flsuite.commands.main import main
from flsuite.data import Digits, Dirichlet
from flsuite.federation import Processes
from flsuite.models import CNN, MLP, Classifier, ResNet20
from flsuite.models.backbones import Backbone
from tests.conftest import mostly_long

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
EVERY: dict[str, Callable[[], Aggregator | Rule]] = {
    "kfac": partial(FedFisher, samples=60),
    "diag": partial(FedFisher, "diag"),
    "merge": FisherMerge,
    "regmean": RegMean,
    "otfusion": OTFusion,
    "pfnm": PFNM,
    "grown": partial(PFNM, grow=True),
    "dense": partial(DENSE, epochs=2, generator_steps=2, batch_size=16, width=0.1),
}


def fitted(aggregator: Aggregator | Rule, **kwargs: Any) -> FederatedTrainer:
    private, ckpt_path = kwargs.pop("private", ()), kwargs.pop("ckpt_path", None)
    server_samples = kwargs.pop("server_samples", 60)
    backbone: Backbone = kwargs.pop("backbone", None) or CNN(channels=(4, 8), hidden=(8,))
    trainer = FederatedTrainer(
        kwargs.pop("rounds", 1),
        aggregator,
        accelerator="cpu",
        enable_progress_bar=False,
        **{"seed": 1, "max_epochs": 1, "enable_checkpointing": False, **kwargs},
    )
    sgd = partial(torch.optim.SGD, lr=0.05)
    data = Digits(
        clients=3,
        partition=Dirichlet(0.5),
        batch_size=32,
        server_samples=server_samples,
        train_samples=100,
    )
    trainer.fit(Classifier(backbone, optimizer=sgd, private=private), data, ckpt_path=ckpt_path)
    return trainer


def assert_equal(a: FederatedTrainer, b: FederatedTrainer) -> None:
    assert all(
        torch.equal(value, b.federation.state[name]) for name, value in a.federation.state.items()
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    """Return a run of FedAvg that has kept the clients' models."""
    folder = str(tmp_path_factory.mktemp("kept"))
    return fitted(FedAvg(), keep_updates=True, enable_checkpointing=True, run_dir=folder)


@pytest.fixture(scope="module", params=EVERY)
def merged(request: pytest.FixtureRequest) -> tuple[str, FederatedTrainer]:
    """Return the name of a method, and its run."""
    return request.param, fitted(EVERY[request.param]())


def test_kept_models_give_the_same_weights_and_no_client_half_changes_the_training(
    merged: tuple[str, FederatedTrainer], kept: FederatedTrainer
) -> None:
    name, made = merged
    losses = [
        [update.metrics["loss"] for update in run.federation.log.updates] for run in (kept, made)
    ]
    assert losses[0] == losses[1]
    assert_equal(made, fitted(EVERY[name](), from_updates=str(kept.run.folder.path)))


@pytest.mark.parametrize(
    "make", mostly_long({k: EVERY[k] for k in ("diag", "otfusion", "dense")}, "diag")
)
def test_workers_give_the_same_weights(make: Callable[[], Aggregator | Rule]) -> None:
    assert_equal(fitted(make()), fitted(make(), engine=Processes(workers=2)))


@pytest.mark.parametrize("name", ["diag", "regmean"])
def test_masked_sums_give_nearly_the_same_weights(name: str) -> None:
    plain = fitted(EVERY[name]())
    masked = fitted(EVERY[name](), secure_sum=PairwiseMasks())
    assert not any(len(update.class_counts) for update in masked.federation.log.updates)
    for entry, value in plain.federation.state.items():
        torch.testing.assert_close(masked.federation.state[entry], value, rtol=0, atol=0.02)


def test_the_bytes_of_extras_are_counted() -> None:
    plain, diag, gram = (
        fitted(aggregator).federation.log.updates[0].bytes_up
        for aggregator in (FedAvg(), FedFisher("diag"), RegMean(alpha=0.5))
    )
    assert diag == 2 * plain
    assert plain < gram


def test_kfac_covers_a_residual_network_without_norms() -> None:
    trainer = fitted(FedFisher(samples=8, select=False), backbone=ResNet20(norm="none", width=2))
    assert trainer.federation.log.server["residual"] < 1.0


def test_a_grown_network_is_scored_and_written(tmp_path: Path) -> None:
    trainer = fitted(PFNM(grow=True), enable_checkpointing=True, run_dir=str(tmp_path / "run"))
    expanded = trainer.federation.server.artifacts["expanded_model"]
    saved = torch.load(tmp_path / "run" / "checkpoints" / "expanded_model.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in expanded.state_dict().items())
    rows = (tmp_path / "run" / "metrics.csv").read_text()
    assert ",test,expanded_model/accuracy," in rows
    assert saved["network.0.weight"].shape[0] >= 8


BATCH_NORM = ["--model.backbone", "ResNet20"]
KFAC = ["--trainer.aggregator", "FedFisher"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*KFAC, *BATCH_NORM], r"K-FAC covers .*\(BatchNorm2d\) is neither"),
        (["--model.pretrained", "nowhere.ckpt"], "nowhere.ckpt"),
    ],
)
def test_wrong_settings_are_one_line_before_training(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(CONFIG), *arguments, "--run_dir", "run"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2
    assert error.startswith("flsuite: error:")
    assert re.search(message, error), error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        (OTFusion(), {"backbone": ResNet20(width=4)}, "OTFusion needs a chain of Conv2d"),
        (RegMean(), {"compression": Quantize()}, "RegMean sends gram, which rounding"),
        (PFNM(grow=True), {"rounds": 2}, "rounds"),
        (FedFisher(), {"compression": Quantize()}, "set trainer.compression to LowRank"),
        (RegMean(), {"server_samples": 0}, "data.server_samples"),
        (Mean(), {"compression": LowRank()}, "set trainer.compression to Quantize"),
        (
            FisherMerge(),
            {"private": ["network"]},
            "FisherMerge needs shared parameters",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    rule: Rule, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        fitted(rule, **arguments)


def test_few_shot_resumes_exactly(tmp_path: Path) -> None:
    folder = {"run_dir": str(tmp_path / "run"), "enable_checkpointing": True}
    settings: dict[str, Any] = {"aggregator": FedFisher(), "backbone": MLP(hidden=(8,))}
    whole = fitted(rounds=2, **settings)
    fitted(rounds=1, **settings, **folder)
    assert_equal(whole, fitted(rounds=2, **settings, **folder, ckpt_path="last"))
