"""Every shipped config is complete, starts with its launch line, and runs."""

from pathlib import Path

import pytest
import torch
import yaml

from flsuite.cli import main
from flsuite.data import Arrays, DataSpec, MedMNIST, Source

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
SHORT = [
    "--trainer.rounds",
    "1",
    "--trainer.max_epochs",
    "1",
    "--trainer.engine",
    "InProcess",
    "--trainer.enable_progress_bar",
    "false",
]


def stand_in(self: MedMNIST) -> Source:
    """As many random images as it takes, of the published shape and task."""
    from medmnist import INFO

    info = INFO[self.name]
    tasks = {"multi-class": "multiclass", "binary-class": "binary", "ordinal-regression": "ordinal"}
    task = tasks.get(info["task"], "multilabel")
    classes, channels = len(info["label"]), info["n_channels"]
    generator = torch.Generator().manual_seed(0)

    def split(n: int) -> Arrays:
        x = torch.randint(0, 256, (n, self.size, self.size, channels), dtype=torch.uint8, generator=generator)
        if task == "multilabel":
            return Arrays(x, torch.randint(0, 2, (n, classes), dtype=torch.uint8, generator=generator))
        return Arrays(x, torch.arange(n) % classes)

    return Source(DataSpec((channels, self.size, self.size), classes, task), split(240), split(60), split(60))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_config_starts_with_its_launch_line(path: Path) -> None:
    assert path.read_text().startswith(f"# flsuite fit --config {path.relative_to(ROOT)}\n")
    assert {"seed_everything", "model", "data", "trainer"} <= yaml.safe_load(path.read_text()).keys()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_config_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MedMNIST, "load", stand_in)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(path), *SHORT, "--run_dir", "run"])
    assert exit.value.code == 0
    assert (tmp_path / "run" / "metrics.csv").read_text().count(",test,accuracy,") >= 1
