"""Every shipped config is complete, starts with its launch line, and runs."""

from pathlib import Path

import pytest
import torch
import yaml

from flsuite.cli import main
from flsuite.data import FEMNIST, Arrays, DataSpec, MedMNIST, Source

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

    return Source(DataSpec((channels, self.size, self.size), classes, task), split(80), split(20), split(20))  # type: ignore[arg-type]


def stand_in_writers(self: FEMNIST) -> Source:
    """Five random characters of each of a hundred writers."""
    x = torch.randint(0, 256, (500, 28, 28, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    part = Arrays(x, torch.arange(500) % 62, torch.arange(500) % 100)
    return Source(DataSpec((1, 28, 28), 62), part, part.take(torch.arange(20)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_config_starts_with_its_launch_line(path: Path) -> None:
    assert path.read_text().startswith(f"# flsuite fit --config {path.relative_to(ROOT)}\n")
    assert {"seed_everything", "model", "data", "trainer"} <= yaml.safe_load(path.read_text()).keys()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_config_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MedMNIST, "load", stand_in)
    monkeypatch.setattr(FEMNIST, "load", stand_in_writers)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(path), *SHORT, "--run_dir", "run"])
    assert exit.value.code == 0
    assert (tmp_path / "run" / "metrics.csv").read_text().count(",test,accuracy,") >= 1


FUSED = [path for path in CONFIGS if path.parent.name == "fusedspacefed"]


def baseline_lines(path: Path) -> list[list[str]]:
    """The three baselines of a config's head: the first line alone, and with each of the other two behind it."""
    lines = [line[line.index("--") :].split() for line in path.read_text().splitlines() if line.startswith("#   ")]
    return [lines[0], *([*lines[0], *more] for more in lines[1:])]


@pytest.mark.parametrize("method", [0, 1, 2], ids=["fedavg", "fedprox", "scaffold"])
def test_baselines_are_one_line_away(method: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MedMNIST, "load", stand_in)
    (path,) = (path for path in FUSED if path.stem == "retinamnist")
    assert all(baseline_lines(other) == baseline_lines(path) for other in FUSED)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(path), *SHORT, *baseline_lines(path)[method], "--run_dir", "run"])
    assert exit.value.code == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["model"]["class_path"] == "flsuite.models.Classifier"
    assert config["trainer"]["aggregator"]["class_path"].endswith(("FedAvg", "FedProx", "SCAFFOLD")[method])
