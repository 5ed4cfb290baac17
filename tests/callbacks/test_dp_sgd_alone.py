"""What of DP-SGD needs no Opacus: draws, arguments, and the layout of images."""

import math
import sys

import pytest
import torch
from torch import nn

from flsuite import FlsuiteError
from flsuite.callbacks import DPSGD
from flsuite.callbacks.dp_sgd import _contiguous
from flsuite.data import Digits
from flsuite.data.loader import TrainLoader
from tests.conftest import classifier, digits, trainer


def few(clients: int = 3, samples: int = 120, batch_size: int = 64) -> Digits:
    data = digits(clients, train_samples=samples, val_fraction=0.0)
    data.batch_size = batch_size
    return data


def test_samples_are_drawn_independently() -> None:
    data = few(1, 100, batch_size=20)
    data.use_seed(0)
    data.setup("fit")
    loader = TrainLoader(data.federated, 0, seed=0, round=1, batches=400)
    loader.is_poisson = True
    sizes = [len(y) for _, y in loader]
    assert sizes == loader.drawn and len(sizes) == 400
    assert sum(sizes) / 400 == pytest.approx(20, abs=1)
    variance = sum((size - 20) ** 2 for size in sizes) / 400
    assert variance == pytest.approx(100 * 0.2 * 0.8, rel=0.25)
    again = TrainLoader(data.federated, 0, seed=0, round=1, batches=400)
    again.is_poisson = True
    assert [len(y) for _, y in again] == sizes


@pytest.mark.parametrize(
    "arguments",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.inf},
        {"max_grad_norm": 0.0},
        {"delta": 0.0},
        {"delta": 1.0},
    ],
)
def test_a_bad_argument_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(FlsuiteError, match="must be"):
        DPSGD(**arguments)


def test_without_opacus_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(FlsuiteError, match=r"pip install 'flsuite\[privacy\]'"):
        trainer(rounds=1, callbacks=[DPSGD()]).fit(classifier(), few())


def test_opacus_reads_images_whose_memory_is_in_order() -> None:
    """All stored images have the channels last, which Opacus would read as if they had not."""
    images = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    (given,) = _contiguous(nn.Identity(), (images,))
    assert given.is_contiguous() and torch.equal(given, images)
