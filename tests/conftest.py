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


@pytest.fixture
def real_data() -> Path:
    """The root of the published data sets."""
    root = os.environ.get("FLSUITE_DATA_ROOT")
    if not root:
        if os.environ.get("CI"):
            pytest.fail("in CI the published data sets must be there: set FLSUITE_DATA_ROOT")
        pytest.skip("needs the published data sets: set FLSUITE_DATA_ROOT to a folder that holds them")
    return Path(root)


def digits(clients: int = 5, **kwargs: Any) -> Digits:
    return Digits(clients=clients, partition=kwargs.pop("partition", Dirichlet(0.5)), batch_size=64, **kwargs)


def classifier(lr: float = 0.1, **kwargs: Any) -> Classifier:
    return Classifier(MLP(hidden=(16,)), optimizer=lambda params: torch.optim.SGD(params, lr=lr), **kwargs)


def trainer(**kwargs: Any) -> FederatedTrainer:
    """A silent one that writes nothing unless it is given a folder."""
    quiet = {"enable_progress_bar": False, "enable_checkpointing": "run_dir" in kwargs, "seed": 3, "accelerator": "cpu"}
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
