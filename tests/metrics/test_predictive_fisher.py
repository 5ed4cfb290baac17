"""The Fisher of a prediction against its definition, one sample and one column at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from flsuite.metrics.fisher import (
    diagonal_and_kfac,
    full_fisher,
    jacobian,
    kfac_factors,
    predictive_diagonal,
)
from flsuite.state import Layer, State

TASKS = ("multiclass", "multilabel", "regression")


def convolutions() -> nn.Sequential:
    """Return a net of convolutions with every kind of setting that has a formula."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=True),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, (2, 3), dilation=(2, 1), padding=(1, 2), bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 6),
        nn.ReLU(),
        nn.Linear(6, 3, bias=False),
    )


def images(n: int = 7) -> Tensor:
    return torch.randn(n, 2, 8, 8, generator=torch.Generator().manual_seed(1))


def others() -> nn.Sequential:
    """Return a net whose layers but the last have no formula."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(72),
        nn.Linear(72, 3),
    )
    net(torch.randn(20, 2, 8, 8))
    return net.eval()


def layers_of(net: nn.Module) -> list[Layer]:
    return [
        Layer(name, "linear" if isinstance(m, nn.Linear) else "conv2d", m.bias is not None)
        for name, m in net.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv2d))
    ]


def scalars(z: Tensor, task: str) -> Tensor:
    """Return the scalars of one sample whose gradients are the columns."""
    if task == "regression":
        return z
    if task == "multilabel":
        p = z.detach().sigmoid()
        return (p * (1 - p)).sqrt() * z
    return z.detach().softmax(0).sqrt() * z.log_softmax(0)


def looped(net: nn.Module, names: Sequence[str], x: Tensor, task: str) -> Tensor:
    """Return the Jacobian ``(n * columns, d)`` by its definition."""
    parameters = [net.get_parameter(name) for name in names]
    rows = []
    for sample in x:
        for scalar in scalars(net(sample[None])[0], task):
            found = torch.autograd.grad(
                scalar, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def flat(state: State) -> Tensor:
    return torch.cat([value.flatten() for value in state.values()])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("make", [convolutions, others])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_diagonal_is_a_loop_over_samples_and_columns(
    make: Any, task: Any, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of several sizes, and a few samples at a time."""
    monkeypatch.setattr("flsuite.metrics.fisher.predictive._NUMBERS_AT_ONCE", 600)
    monkeypatch.setattr("flsuite.metrics.fisher.per_sample._NUMBERS_AT_ONCE", 1000)
    net, x = make().to(memory_format=layout), images()
    names = [name for name, _ in net.named_parameters()]
    batches = [(part.to(memory_format=layout),) for part in x.split(4)]
    found = predictive_diagonal(net, names, batches, task=task)

    expected = looped(net, names, x, task).square().sum(0) / len(x)
    assert list(found) == names and flat(found).dtype == torch.float32
    torch.testing.assert_close(flat(found), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_factors_are_a_loop_over_samples_columns_and_positions(task: Any, layout: Any) -> None:
    net, x = convolutions().to(memory_format=layout), images()
    found, both = (
        kfac_factors(net, layers_of(net), [(part,) for part in x.split(4)], task=task),
        diagonal_and_kfac(net, ["0.bias"], layers_of(net), [(x,)], task=task),
    )
    assert both[0].keys() == {"0.bias"}

    for layer in layers_of(net):
        module, seen = net.get_submodule(layer.name), []
        # The edge, because the ReLU overwrites the output.
        handle = module.register_forward_hook(
            lambda m, a, o, seen=seen: seen.append((a[0], get_gradient_edge(o)))
        )
        inputs, gradients = [], []
        for sample in x:
            z = net(sample[None])[0]
            given, output = seen.pop()
            patches = F.unfold(given, module.kernel_size, module.dilation, module.padding,
                module.stride)[0].T if layer.kind == "conv2d" else given  # fmt: skip
            ones = patches.new_ones(len(patches), int(layer.bias))
            inputs.append(torch.cat([patches, ones], 1).detach())
            for scalar in scalars(z, task):
                (g,) = torch.autograd.grad(scalar, output, retain_graph=True)
                gradients.append(g[0].flatten(1).T if layer.kind == "conv2d" else g)
        handle.remove()
        a = sum(rows.T @ rows for rows in inputs) / len(x)
        g = sum(rows.T @ rows / len(rows) for rows in gradients) / len(x)
        for factors in (found[layer.name], both[1][layer.name]):
            torch.testing.assert_close(factors["a"], a, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(factors["g"], g, rtol=1e-4, atol=1e-7)


def test_of_one_sample_and_one_layer_the_factors_are_the_whole_fisher() -> None:
    """It is (diag p - p p^T) x [a; 1][a; 1]^T."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(1, 4)
    factors = kfac_factors(net, layers_of(net), [(x,)], task="multiclass")["0"]
    p, a = net(x)[0].softmax(0), torch.cat([x[0], torch.ones(1)])
    torch.testing.assert_close(factors["g"], torch.diag(p) - torch.outer(p, p))
    torch.testing.assert_close(factors["a"], torch.outer(a, a))
    whole = full_fisher(net, ["0.weight", "0.bias"], [(x,)], task="multiclass")
    # The bias comes last in the matrix and is the last column of the weight in the factors.
    order = torch.cat([torch.arange(12).view(3, 4), torch.arange(12, 15)[:, None]], 1).flatten()
    kronecker = torch.kron(factors["g"], factors["a"])
    torch.testing.assert_close(whole[order][:, order], kronecker)


@pytest.mark.parametrize("task", TASKS)
def test_full_is_jacobian_squared_and_has_the_diagonal(task: Any) -> None:
    net, x = convolutions(), images()
    names = [name for name, _ in net.named_parameters()]
    batches = [(part,) for part in x.split(4)]
    rows = jacobian(net, names, batches, task=task)
    whole = full_fisher(net, names, batches, task=task)
    torch.testing.assert_close(rows, looped(net, names, x, task), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(whole, rows.T @ rows / len(x), rtol=1e-4, atol=1e-6)
    diagonal = predictive_diagonal(net, names, batches, task=task)
    torch.testing.assert_close(whole.diagonal(), flat(diagonal), rtol=1e-4, atol=1e-6)
