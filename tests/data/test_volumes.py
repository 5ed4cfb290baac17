"""Volumes, MedMNIST's in three dimensions: they train like images, or are refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flsuite.aggregators import DENSE, Aggregator, FedProx, PixelBackdoor
from flsuite.common.errors import FlsuiteError
from flsuite.data import CropFlip, Dirichlet, FeatureSkew, MedMNIST
from flsuite.federation import InProcess, Processes, Vectorized
from flsuite.models import Classifier, ResNet3D, ResNet20
from flsuite.models.backbones import Backbone
from tests.conftest import equal_states, state, trainer
from tests.data.test_medmnist import Publisher, arrays_of

NAME = "fracturemnist3d"
SHAPE = (1, 28, 28, 28)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a file of volumes, which are the brighter the higher their class."""
    publisher, arrays = Publisher(tmp_path, monkeypatch), arrays_of(NAME)
    for split in ("train", "val", "test"):
        labels = arrays[f"{split}_labels"]
        labels[:, 0] = np.arange(len(labels)) % 3
        for volume, label in zip(arrays[f"{split}_images"], labels[:, 0], strict=True):
            volume[:] = volume // 4
            volume[: 14 * label] += 190
    publisher.save(arrays, NAME)
    return tmp_path


def fit(folder: Path, backbone: Backbone | None = None, **kwargs: Any) -> Any:
    model = Classifier(
        backbone or ResNet3D(norm="none", width=4),
        lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9),
    )
    names = ("augment", "rgb", "resize", "skew")
    own = {name: kwargs.pop(name) for name in names if name in kwargs}
    data = MedMNIST(
        NAME, root=folder, clients=2, partition=Dirichlet(1.0), batch_size=3, download=False, **own
    )
    made = trainer(**{"rounds": 1, **kwargs})
    made.fit(model, data)
    return made


# Augmented and in three channels: all that a volume meets on its way to the model.
OPTIONS: dict[str, Any] = {"augment": CropFlip(2), "rgb": True, "rounds": 2}


def test_a_stack_of_clients_trains_on_volumes(folder: Path, stacks: list[int]) -> None:
    one = state(fit(folder, engine=InProcess(), **OPTIONS))
    assert not stacks
    stacked = state(fit(folder, engine=Vectorized(), **OPTIONS))
    assert set(stacks) == {2}
    for name, value in one.items():
        assert torch.allclose(stacked[name], value, atol=1e-5), name


@pytest.mark.long
def test_workers_train_on_volumes_alike(folder: Path) -> None:
    one, workers = (
        state(fit(folder, engine=engine, **OPTIONS)) for engine in (InProcess(), Processes(2))
    )
    assert equal_states(one, workers)


def test_a_federation_learns_from_volumes(folder: Path) -> None:
    made = fit(folder, rounds=12, max_epochs=2)
    assert made.test()[0]["accuracy"] == 1.0


def test_scaling_and_shape_of_volumes(folder: Path) -> None:
    data = MedMNIST(NAME, root=folder, clients=2, rgb=True)
    data.setup()
    assert data.spec.shape == (3, *SHAPE[1:])
    stored = data.federated.train.x
    inputs = data.federated.scaling(stored)
    assert inputs.shape == (len(stored), 3, 28, 28, 28)
    assert inputs.mean().abs() < 1e-5 and (inputs.std() - 1).abs() < 1e-3
    assert torch.equal(inputs[:, 0], inputs[:, 2])
    shown = (inputs[0, 0] - inputs[0, 0].min()) / (inputs[0, 0].max() - inputs[0, 0].min())
    raw = stored[0, ..., 0].float()
    assert torch.allclose(shown, (raw - raw.min()) / (raw.max() - raw.min()), atol=1e-5)


def test_a_crop_of_a_volume_is_a_window_of_the_padded_one() -> None:
    x = torch.arange(1.0, 1 + 4 * 5 * 6).view(1, 1, 4, 5, 6).expand(40, -1, -1, -1, -1)
    made = CropFlip(1)(x, torch.Generator().manual_seed(0))
    padded = F.pad(x[0, 0], [1] * 6)
    windows = [
        padded[d : d + 4, h : h + 5, w : w + 6]
        for d in range(3)
        for h in range(3)
        for w in range(3)
    ]
    known = windows + [window.flip(2) for window in windows]
    seen = {next(i for i, w in enumerate(known) if torch.equal(w, one[0])) for one in made}
    assert made.shape == x.shape and len(seen) > 20
    assert {i // 27 for i in seen} == {0, 1} and {i % 27 // 9 for i in seen} == {0, 1, 2}


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"backbone": ResNet20()}, "ResNet20 takes images .*for volumes ResNet3D"),
        ({"resize": 14}, "data.resize is for images, and these samples are volumes; leave it out"),
        ({"skew": FeatureSkew(blur=1.0)}, "FeatureSkew changes images .*leave it out"),
        ({"aggregator": Aggregator(DENSE())}, "DENSE .*the samples are not images"),
        (
            {"attack": PixelBackdoor([0])},
            "PixelBackdoor needs images.*LabelFlip",
        ),
    ],
    ids=["backbone", "resize", "skew", "rule", "attack"],
)
def test_what_is_for_images_refuses_volumes(
    kwargs: dict[str, Any], said: str, folder: Path
) -> None:
    with pytest.raises(FlsuiteError, match=said) as error:
        fit(folder, **kwargs)
    assert "\n" not in str(error.value)


def test_an_algorithm_with_a_term_trains_on_volumes(folder: Path) -> None:
    assert not equal_states(
        state(fit(folder, aggregator=FedProx(10.0), max_epochs=2)), state(fit(folder, max_epochs=2))
    )
