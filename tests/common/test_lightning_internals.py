"""Private attributes of Lightning: this says which of them is gone."""

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch.amp import GradScaler

from flsuite.callbacks import FederationCallback
from flsuite.common.lightning_internals import HOOKS, hooks_with
from tests.plain import plain_trainer

PACKAGE = Path(__file__).parents[2] / "flsuite"
INTERNALS = {
    "GradScaler": "_found_inf_per_device",
    "Trainer": (
        "_run_stage _detect_anomaly _signal_connector.register_signal_handlers "
        "_signal_connector.teardown _checkpoint_connector._restore_modules_and_callbacks "
        "_checkpoint_connector._select_ckpt_path _checkpoint_connector.restore_training_state "
        "_checkpoint_connector.resume_end "
        "fit_loop._data_source.instance fit_loop._combined_loader "
        "fit_loop.epoch_loop._batches_that_stepped "
        "fit_loop.epoch_loop.batch_progress.is_last_batch"
    ),
    "LightningModule": "_current_fx_name _metric_attributes _trainer",
    "LightningCLI": "_get _parse_ckpt_path _parser _run_subcommand _set_seed",
    "WandbLogger": "_experiment _id _log_model _offline _project _wandb_init",
    "CSVLogger": "_version",
    "TensorBoardLogger": "_default_hp_metric _kwargs _version",
    "MLFlowLogger": "_experiment_name _run_id _run_name",
}


@cache
def owner_of(name: str, folder: Path) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "GradScaler": lambda: GradScaler,
        "Trainer": plain_trainer,
        "LightningModule": LightningModule,
        "LightningCLI": lambda: LightningCLI,
        "WandbLogger": lambda: WandbLogger(offline=True, save_dir=folder),
        "CSVLogger": lambda: CSVLogger(folder),
        "TensorBoardLogger": lambda: TensorBoardLogger(folder),
        "MLFlowLogger": lambda: MLFlowLogger(tracking_uri="http://127.0.0.1:1"),
    }
    return makers[name]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loggers")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name.startswith("MLFlow") else [])
        for owner, paths in INTERNALS.items()
        for name in (f"{owner}.{path}" for path in paths.split())
    ],
)
def test_it_is_there(name: str, folder: Path) -> None:
    owner, *path = name.split(".")
    if owner == "MLFlowLogger":
        pytest.importorskip("mlflow", reason="needs MLflow: pip install 'flsuite[mlflow]'")
    value = owner_of(owner, folder)
    for attribute in path:
        if value is LightningCLI and attribute == "_parser":
            assert "_parser" in inspect.getsource(LightningCLI), f"{name} is gone"
            return
        assert hasattr(value, attribute), f"{name} is gone from Lightning"
        value = getattr(value, attribute)


def test_every_hook_is_one_of_lightning_or_of_the_run() -> None:
    def owners(name: str) -> set[type]:
        return {kind for kind in (Callback, LightningModule) if hasattr(kind, name)}

    assert not [n for n, meaning in HOOKS.items() if (meaning == "run") == bool(owners(n))]
    assert {*hooks_with("run")} <= {*vars(FederationCallback)}
    assert not [name for name in hooks_with("stack") if Callback not in owners(name)]


def test_no_other_file_uses_one() -> None:
    """All private names of foreign objects, outside the files that override or need them."""
    allowed = {"commands/fit.py", "federation/client/trainer.py", "common/lightning_internals.py"}
    allowed |= {"callbacks/logger_links.py", "callbacks/wandb_link.py"}
    foreign = re.compile(
        r"\b(?:trainer|pl_module|module|model|logger|fit_loop|loop|strategy)\._[a-z]\w*"
    )
    used = {}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name not in allowed and (names := foreign.findall(path.read_text("utf-8"))):
            used[name] = names
    assert used == {}


def test_the_version_is_bounded() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text("utf-8")
    assert re.search(r'"lightning>=2\.6,<2\.\d+"', text)
