"""What the tests share: small federations, and the real data where it is."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite.data import Digits, Dirichlet
from flsuite.models import MLP, Classifier
from flsuite.trainer import FederatedTrainer


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, no seed left over from another test, no Weights & Biases account."""
    torch.set_num_threads(1)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def published(*files: str) -> Path:
    """The root of the published data sets with these files in it; without them a skip that says why, in CI a failure."""
    root = os.environ.get("FLSUITE_DATA_ROOT")
    lacking = [file for file in files if not root or not (Path(root).expanduser() / file).is_file()]
    if root and not lacking:
        return Path(root).expanduser()
    reason = (
        f"{lacking[0]} is not under FLSUITE_DATA_ROOT"
        if root
        else "needs the published data sets: set FLSUITE_DATA_ROOT"
    )
    if os.environ.get("CI"):
        pytest.fail(f"in CI the published data sets must be there: {reason}")
    pytest.skip(reason)


@pytest.fixture
def real_data() -> Path:
    """The root of the published data sets."""
    return published()


def digits(clients: int = 5, **kwargs: Any) -> Digits:
    return Digits(
        clients=clients, partition=kwargs.pop("partition", Dirichlet(0.5)), batch_size=64, **kwargs
    )


def classifier(lr: float = 0.1, **kwargs: Any) -> Classifier:
    return Classifier(
        MLP(hidden=(16,)), optimizer=lambda params: torch.optim.SGD(params, lr=lr), **kwargs
    )


def trainer(**kwargs: Any) -> FederatedTrainer:
    """A silent one that writes nothing unless it is given a folder."""
    quiet = {
        "enable_progress_bar": False,
        "enable_checkpointing": "run_dir" in kwargs,
        "seed": 3,
        "accelerator": "cpu",
    }
    return FederatedTrainer(**{**quiet, **kwargs})


def equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def run() -> Callable[..., FederatedTrainer]:
    """Fit the small federation with these trainer arguments."""

    def fit(ckpt_path: str | None = None, **kwargs: Any) -> FederatedTrainer:
        made = trainer(**kwargs)
        made.fit(classifier(), digits(), ckpt_path=ckpt_path)
        return made

    return fit
