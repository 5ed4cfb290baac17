"""Every shipped config is complete, starts with its launch line, and runs."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flsuite.aggregators import FedAvg
from flsuite.commands.main import main
from flsuite.data import (
    CIFAR10,
    CIFAR100,
    CINIC10,
    EMNIST,
    FEMNIST,
    GTSRB,
    SVHN,
    DataSpec,
    DataSplit,
    FashionMNIST,
    MedMNIST,
    NBaIoT,
    PublishedSplits,
    TaskSequence,
)
from flsuite.models import ACVAE, Classifier, NFClassifier
from flsuite.trainer import FederatedTrainer
from tests.conftest import mostly_long

ROOT = Path(__file__).parent.parent
# A sweep is not a config of a run. The shipped sweeps are tested in tests/sweeps.
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.yaml") if p.parent.name != "sweeps")
NAMED = {str(path.relative_to(ROOT / "configs")): path for path in CONFIGS}
SHORT = [
    *("--trainer.rounds", "1", "--trainer.max_epochs", "1", "--trainer.engine", "InProcess"),
    *("--trainer.enable_progress_bar", "false"),
]


# One of each family runs in its own precision: bfloat16 is slow on many CPUs.
FIRST = [
    "quickstart.yaml",
    "asynchronous/quickstart.yaml",
    "cmga/breastmnist.yaml",
    "fusedspacefed/breastmnist.yaml",
    "nf_fisher/fashionmnist.yaml",
    "one_shot/fashionmnist.yaml",
    "personal/fashionmnist.yaml",
    "trust/quickstart.yaml",
]

# The stand-ins have fewer images than the server holds for itself.
FEW = ["--data.server_samples", "20", "--data.train_samples", "100"]
FEW_STEPS = ["--trainer.aggregator.steps", "2"]
# K-FAC of 12 million parameters takes minutes on a CPU. Smaller residual networks are tested.
WITHOUT_FISHER = ["--trainer.aggregator", "FedAvg"]
FAST = {
    **dict.fromkeys(("cifar10", "cifar10-classes", "cinic10", "svhn"), FEW_STEPS),
    **dict.fromkeys(("cifar100", "gtsrb"), WITHOUT_FISHER),
    "mnist-writers": ["--data.test_samples", "500"],  # each of a hundred models is scored on them
    "dp_fashion_mnist": ["--data.clients", "20"],  # the stand-in has fewer samples than clients
}


def pixels(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def stand_in(self: MedMNIST) -> PublishedSplits:
    """Return random images of the published shape and task."""
    from medmnist import INFO

    info = INFO[self.name]
    tasks = {"multi-class": "multiclass", "binary-class": "binary", "ordinal-regression": "ordinal"}
    task = tasks.get(info["task"], "multilabel")
    classes, channels = len(info["label"]), info["n_channels"]

    def split(n: int) -> DataSplit:
        y = pixels(n, classes) % 2 if task == "multilabel" else torch.arange(n) % classes
        return DataSplit(pixels(n, self.size, self.size, channels), y)

    return PublishedSplits(
        DataSpec((channels, self.size, self.size), classes, task), split(80), split(20), split(20)
    )  # type: ignore[arg-type]


def stand_in_writers(self: FEMNIST) -> PublishedSplits:
    """Return five random characters of each of a hundred writers."""
    x = pixels(500, 28, 28, 1)
    part = DataSplit(x, torch.arange(500) % 62, torch.arange(500) % 100)
    return PublishedSplits(DataSpec((1, 28, 28), 62), part, part.take(torch.arange(20)))


@cache
def stand_in_images(
    classes: int, side: int = 28, channels: int = 1
) -> Callable[..., PublishedSplits]:
    """Return a loader of twenty random images per class."""
    samples = 20 * classes
    x = pixels(samples, side, side, channels)
    part = DataSplit(x, torch.arange(samples) % classes)
    source = PublishedSplits(
        DataSpec((channels, side, side), classes), part, part.take(torch.arange(4 * classes))
    )
    return lambda self: source


def stand_in_devices(self: NBaIoT) -> PublishedSplits:
    """Return ten rows of each of three kinds of traffic of nine devices."""
    x = torch.rand(270, 115, generator=torch.Generator().manual_seed(0))
    part = DataSplit(x, torch.arange(270) % 3, torch.arange(270) // 30)
    return PublishedSplits(DataSpec((115,), 3), part, part)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the published data: these tests check that configs are complete and run."""
    for dataset, load in (
        (MedMNIST, stand_in),
        (FEMNIST, stand_in_writers),
        (FashionMNIST, stand_in_images(10)),
        (EMNIST, stand_in_images(26)),
        (CIFAR10, stand_in_images(10, 32, 3)),
        (CIFAR100, stand_in_images(100, 32, 3)),
        (CINIC10, stand_in_images(10, 32, 3)),
        (GTSRB, stand_in_images(43, 32, 3)),
        (SVHN, stand_in_images(10, 32, 3)),
        (NBaIoT, stand_in_devices),
    ):
        monkeypatch.setattr(dataset, "load", load)


def test_a_config_starts_with_its_launch_line() -> None:
    for path in CONFIGS:
        text = path.read_text()
        assert text.startswith(f"# flsuite fit --config {path.relative_to(ROOT)}\n")
        assert {"seed_everything", "model", "data", "trainer"} <= yaml.safe_load(text).keys(), path


def _fast(path: Path) -> list[str]:
    """Return the arguments that make a config of these folders fast."""
    folders = "fusedspacefed", "one_shot", "trust"
    return FAST.get(path.stem, []) if path.parent.name in folders else []


def fit(path: Path, *more: str) -> None:
    few = [*(FEW if path.parent.name == "one_shot" else []), *_fast(path)]
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(path), *SHORT, *few, *more, "--run_dir", "run"])
    assert exit.value.code == 0


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[type]]:
    """Build all that the first round of a fit needs, in place of the fit.

    Returns:
        The classes of each fit's model, data and aggregator.
    """
    classes: list[list[type]] = []

    def prepare(self: FederatedTrainer, *args: Any, **kwargs: Any) -> None:
        self.prepare(*args, **kwargs)
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        classes.append([*map(type, given), type(self.federation.aggregator)])

    monkeypatch.setattr(FederatedTrainer, "fit", prepare)
    monkeypatch.chdir(tmp_path)
    return classes


@pytest.mark.parametrize("path", mostly_long(NAMED, "trust/quickstart.yaml"))
def test_a_config_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    is_first = str(path.relative_to(ROOT / "configs")) in FIRST
    few = ["--data.clients", "3"] if "MedMNIST" in path.read_text() else []
    fit(path, *(few if is_first else ["--trainer.precision", "32-true"]))
    assert (tmp_path / "run" / "metrics.csv").read_text().count(",test,accuracy,") >= 1


FUSED = [path for path in CONFIGS if path.parent.name == "fusedspacefed"]


def overrides(path: Path) -> list[list[str]]:
    """Return the arguments that the head of a config names, line by line."""
    return [
        line[line.index("--") :].split()
        for line in path.read_text().splitlines()
        if line.startswith("#   ")
    ]


def baseline_lines(path: Path) -> list[list[str]]:
    """Return the three baselines of a config's head.

    They are the first line alone, and the first line followed by each of the others.
    """
    lines = overrides(path)
    return [lines[0], *([*lines[0], *more] for more in lines[1:])]


METHODS = {"fedavg": (0, "FedAvg"), "fedprox": (1, "FedProx"), "scaffold": (2, "SCAFFOLD")}


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_baselines_are_one_line_away(
    method: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place, name = method
    (path,) = (path for path in FUSED if path.stem == "retinamnist")
    for other in FUSED:
        lines = baseline_lines(other)
        model = yaml.safe_load(other.read_text())["model"]["init_args"]
        assert lines[0][3] == model.get("backbone", {"class_path": "ResNet20"})["class_path"]
        assert [line[8:] for line in lines] == [line[8:] for line in baseline_lines(path)]
    fit(path, *baseline_lines(path)[place], "--trainer.precision", "32-true")
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["model"]["class_path"] == "flsuite.models.Classifier"
    assert config["trainer"]["aggregator"]["class_path"].endswith(name)


def test_fedavg_is_one_line_from_cmga(prepared: list[list[type]]) -> None:
    family = [path for path in CONFIGS if path.parent.name == "cmga"]
    (path,) = (path for path in family if path.stem == "fashionmnist-two-classes")
    assert all(overrides(other) == overrides(path) for other in family)
    fit(path, *overrides(path)[0])
    assert prepared == [[ACVAE, FashionMNIST, FedAvg]]


@pytest.mark.parametrize("which", [0, 1], ids=["nf-fedavg", "plain-fedavg"])
def test_baselines_are_one_line_from_fisher_weights(which: int, prepared: list[list[type]]) -> None:
    family = [path for path in CONFIGS if path.parent.name == "nf_fisher"]
    (path,) = (path for path in family if path.stem == "fashionmnist")
    assert all(
        [line[:2] for line in overrides(other)] == [line[:2] for line in overrides(path)]
        for other in family
    )
    fit(path, *overrides(path)[which])
    assert prepared == [[(NFClassifier, Classifier)[which], TaskSequence, FedAvg]]


@pytest.mark.long
@pytest.mark.draws
@pytest.mark.parametrize(
    ("name", "picture"),
    [
        ("cmga/fashionmnist-two-classes", "latent/round-0001.png"),
        ("nf_fisher/fashionmnist", "tasks.png"),
    ],
)
def test_the_baseline_of_a_config_runs(
    name: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "configs" / f"{name}.yaml"
    fit(path, *overrides(path)[0])
    assert Path("run", picture).is_file()
