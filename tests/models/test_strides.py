"""Strided 1x1 convolutions of few channels, which crash a CPU with AVX2 alone."""

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.federation import Processes
from flsuite.models import Classifier, ResNet20
from flsuite.models.autoencoders import slice_strides
from tests.conftest import digits, trainer

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}


class Narrow(LightningModule):
    """A plain module with its own memory format."""

    def __init__(self) -> None:
        super().__init__()
        stem, short = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 1, 2)
        self.net = nn.Sequential(stem, nn.ReLU(), short, nn.Flatten(), nn.Linear(8 * 16, 10))
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.logits(x), y)

    def logits(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_own_module() -> None:
    """Train a user's module, which chooses its own memory format."""
    trainer(rounds=1, channels_last=False).fit(Narrow(), digits(clients=2))


def fit_in_workers() -> None:
    """Train a narrow network of flsuite in separate processes."""
    trainer(rounds=1, engine=Processes(workers=1)).fit(
        Classifier(ResNet20(width=4)), digits(clients=2)
    )


def compare_gradients() -> None:
    """Compare the gradients of layers in channels_last with those in float64."""
    torch.manual_seed(0)
    for channels in range(1, 18):
        layer = nn.Conv2d(channels, 8, 1, 2)
        slice_strides(layer)
        wide = copy.deepcopy(layer).double()
        x = torch.randn(32, channels, 16, 16)
        layer.to(memory_format=torch.channels_last)
        layer(x.to(memory_format=torch.channels_last)).square().mean().backward()
        wide(x.double()).square().mean().backward()
        for actual, expected in zip(layer.parameters(), wide.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_narrow_networks_train_on_a_cpu_without_avx512() -> None:
    # The variables are read once, when torch is loaded.
    code = """if True:
        from tests.models.test_strides import compare_gradients, fit_in_workers, fit_own_module
        for run in (fit_in_workers, fit_own_module, compare_gradients):
            print(run.__name__, flush=True)
            run()
        print("done")
    """
    settings: Any = {"env": {**os.environ, **AVX2}, "capture_output": True, "text": True}
    child = subprocess.run([sys.executable, "-c", code], timeout=600, **settings)
    assert child.returncode == 0, (child.returncode, child.stdout, child.stderr[-2000:])
    assert child.stdout.endswith("done\n")


def test_every_model_of_a_run_takes_the_safe_path() -> None:
    for model in (Narrow(), Classifier(ResNet20(width=4))):
        run = trainer(rounds=1, channels_last=False).prepare(model, digits(clients=2))
        layers = [layer for layer in run.evaluator.model.modules() if isinstance(layer, nn.Conv2d)]
        strided = [m for m in layers if m.stride != (1, 1) and m.kernel_size == (1, 1)]
        assert any("_conv_forward" in vars(layer) for layer in strided)


STRIDED = {
    "plain": nn.Conv2d(4, 6, 1, 2),
    "unequal strides": nn.Conv2d(3, 6, 1, (1, 3), bias=False),
    "padding": nn.Conv2d(4, 6, 1, 2, padding=(1, 2)),
    "padding by a word": nn.Conv2d(4, 6, 1, 2, padding="valid"),
    "circular padding": nn.Conv2d(4, 6, 1, 2, padding=1, padding_mode="circular"),
    "groups": nn.Conv2d(4, 6, 1, 2, groups=2),
    "dilation": nn.Conv2d(4, 6, 1, 2, dilation=3),
}


@pytest.mark.parametrize("layer", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("shape", [(4, 7, 9), (2, 3, 7, 9)], ids=["one image", "batch"])
def test_the_safe_path_computes_the_same(layer: nn.Conv2d, shape: tuple[int, ...]) -> None:
    plain = copy.deepcopy(layer).double()
    sliced = copy.deepcopy(plain)
    slice_strides(sliced)
    x = torch.randn(*shape[:-3], layer.in_channels, *shape[-2:], dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    actual, expected = sliced(ours), plain(theirs)
    torch.testing.assert_close(actual, expected)

    for output in (actual, expected):
        output.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for one, other in zip(sliced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_copy_of_a_layer_uses_its_own_weight() -> None:
    layer = nn.Conv2d(4, 6, 1, 2, bias=False)
    names, shown = list(layer.state_dict()), repr(layer)
    slice_strides(layer)
    assert type(layer) is nn.Conv2d
    assert list(layer.state_dict()) == names and repr(layer) == shown
    x = torch.randn(2, 4, 8, 8)
    expected = layer(x)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert "_conv_forward" in vars(again)
        assert torch.equal(again(x), expected)
        nn.init.zeros_(again.weight)
        assert not again(x).any()
    assert torch.equal(layer(x), expected)


class Scaled(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, 2 * weight, bias)


def test_other_layers_stay_as_they_are() -> None:
    wide, unstrided = nn.Conv2d(8, 16, 1, 2), nn.Conv2d(4, 8, 1)
    larger = nn.Conv2d(4, 8, 3, 2), nn.Conv2d(4, 8, (1, 3), 2)
    for layer in (wide, unstrided, *larger, Scaled(4, 8, 1, 2)):
        slice_strides(layer)
        assert "_conv_forward" not in vars(layer), layer


def test_another_device_keeps_the_stride() -> None:
    layer = nn.Conv2d(4, 6, 1, 2, device="meta")
    slice_strides(layer)
    x = torch.empty(2, 4, 7, 9, device="meta")
    assert layer(x).shape == (2, 6, 4, 5)
