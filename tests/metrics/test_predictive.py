"""The Fisher of a prediction against its definition, one sample and one column at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from flsuite import FlsuiteError
from flsuite.common.state import Layer, State
from flsuite.data import DataSpec
from flsuite.metrics.fisher import (
    full_fisher,
    gram_matrices,
    kfac_factors,
    predictive_diagonal,
    require_kfac,
)
from flsuite.models import MLP, Classifier

TASKS = ("multiclass", "multilabel", "other")


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
    if task == "other":
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
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (convolutions, torch.contiguous_format),
        (convolutions, torch.channels_last),
        (others, torch.channels_last),
    ],
)
def test_the_diagonal_is_a_loop_over_samples_and_columns(
    make: Any, task: Any, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of several sizes, and a few samples at a time."""
    monkeypatch.setattr("flsuite.metrics.fisher.forms._NUMBERS_AT_ONCE", 600)
    monkeypatch.setattr("flsuite.metrics.fisher.estimates._NUMBERS_AT_ONCE", 1000)
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
    in_batches, at_once = (
        kfac_factors(net, layers_of(net), batches, task=task)
        for batches in ([(part,) for part in x.split(4)], [(x,)])
    )

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
        for factors in (in_batches[layer.name], at_once[layer.name]):
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
    whole = full_fisher(net, names, batches, task=task)
    rows = looped(net, names, x, task)
    torch.testing.assert_close(whole, rows.T @ rows / len(x), rtol=1e-4, atol=1e-6)
    diagonal = predictive_diagonal(net, names, batches, task=task)
    torch.testing.assert_close(whole.diagonal(), flat(diagonal), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("expectation", ["exact", "sampled"])
@pytest.mark.parametrize("task", TASKS)
def test_saturated_predictions_have_finite_fishers(task: Any, expectation: Any) -> None:
    """Logits of hundreds: the softmax has zeros and ones."""
    net, x = convolutions(), images()
    net[-1].weight.data *= 300 * 20
    assert net(x).abs().max() > 300
    names = [name for name, _ in net.named_parameters()]
    settings: Any = {"expectation": expectation, "task": task}
    factors = kfac_factors(net, layers_of(net), [(x,)], **settings)
    assert flat(predictive_diagonal(net, names, [(x,)], **settings)).isfinite().all()
    assert all(value.isfinite().all() for pair in factors.values() for value in pair.values())
    assert full_fisher(net, names, [(x,)], **settings).isfinite().all()


@pytest.mark.parametrize("task", TASKS)
def test_sampled_targets_have_the_exact_expectation(task: Any) -> None:
    """Over many draws: the batch is one sample, repeated."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(2, 3)
    names = [name for name, _ in net.named_parameters()]
    many = [(x.repeat(5000, 1),) for _ in range(4)]
    exact = flat(predictive_diagonal(net, names, [(x,)], task=task))
    factors = kfac_factors(net, layers_of(net), [(x,)], task=task)
    sampled = many, task, "sampled", torch.Generator().manual_seed(0)
    drawn = flat(predictive_diagonal(net, names, *sampled))
    drawn_factors = kfac_factors(net, layers_of(net), *sampled)
    whole = full_fisher(net, names, *sampled)

    scale = exact.max()
    assert (drawn - exact).abs().max() < 0.05 * scale
    assert (whole - full_fisher(net, names, [(x,)], task=task)).abs().max() < 0.05 * scale
    for name, pair in factors.items():
        torch.testing.assert_close(drawn_factors[name]["a"], pair["a"], rtol=1e-4, atol=1e-5)
        error = (drawn_factors[name]["g"] - pair["g"]).abs().max()
        assert error < 0.05 * pair["g"].max()


def test_a_draw_depends_on_its_generator_alone() -> None:
    net, x = convolutions(), images()
    draws = []
    for seed in (1, 1, 2):
        sampled = TASKS[0], "sampled", torch.Generator().manual_seed(seed)
        draws.append(flat(predictive_diagonal(net, ["0.weight"], [(x,)], *sampled)))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("bias", [False, True])
def test_gram_matrices_are_means_over_rows_of_inputs(bias: bool) -> None:
    net, x = convolutions(), images()
    grams = gram_matrices(net, layers_of(net), [(part,) for part in x.split(4)], bias)
    patches = F.unfold(net[:2](x), (2, 3), (2, 1), (1, 2)).transpose(1, 2).flatten(0, 1)
    rows = {"2": patches, "5": net[:5](x), "7": net[:7](x)}
    rows["0"] = F.unfold(x, 3, 1, 1, 2).transpose(1, 2).flatten(0, 1)
    for layer in layers_of(net):
        inputs = rows[layer.name]
        if bias and layer.bias:
            inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], 1)
        expected = inputs.T @ inputs / len(inputs)
        torch.testing.assert_close(grams[layer.name], expected, rtol=1e-4, atol=1e-6)
        assert not grams[layer.name].requires_grad


class Uses(nn.Module):
    """Two linear layers on vectors; each subclass uses them in its own way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)


class Twice(Uses):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(torch.tanh(self.linear(x))))


class Shared(Uses):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(torch.tanh(self.linear(x)), self.linear.weight))


class Ignored(Uses):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


class Pair(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Mixed(Uses):
    """Its layers see rows that depend on all samples of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        table = self.linear(torch.arange(28.0).reshape(7, 4)[: len(x)] / 28)
        return self.last(x * table.mean(0))


class Tokens(Uses):
    """Has several positions per sample."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.square(), x.sin()], 1)
        return self.last(torch.tanh(self.linear(tokens)).mean(1))


@pytest.mark.parametrize("kind", [Twice, Shared, Mixed, Tokens])
def test_the_diagonal_holds_however_a_layer_is_used(kind: type[Uses]) -> None:
    net, x = kind(), torch.randn(7, 4)
    names = [name for name, _ in net.named_parameters()]
    found = predictive_diagonal(net, names, [(x,)], task="multiclass")
    if kind is Mixed:
        # The samples of a batch have no gradients of their own: only that nothing is assumed.
        assert flat(found).isfinite().all()
        return
    expected = looped(net, names, x, "multiclass").square().mean(0) * 3
    torch.testing.assert_close(flat(found), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Twice, "it is called 2 times in a forward pass"),
        (Shared, "its weight is also used elsewhere"),
        (Mixed, "its rows depend on several samples"),
    ],
)
def test_kfac_refuses_layers_that_are_not_one_product(kind: type[Uses], why: str) -> None:
    net = kind()
    with pytest.raises(FlsuiteError, match=f"'linear' is not covered: {why}"):
        kfac_factors(net, layers_of(net), [(torch.randn(7, 4),)], task="multiclass")


@pytest.mark.parametrize("kind", [Twice, Shared])
def test_one_sample_of_zeros_shows_how_layers_are_used(kind: type[Uses]) -> None:
    net, zeros = kind(), torch.zeros(1, 4)
    require_kfac(net, layers_of(net))
    with pytest.raises(FlsuiteError, match="layer 'linear' is not covered: it"):
        require_kfac(net, layers_of(net), zeros)
    net = Tokens()
    require_kfac(net, layers_of(net), zeros)
    assert all(p.grad is None for p in net.parameters())
    net.requires_grad_(False)
    require_kfac(net, layers_of(net), zeros)


def test_kfac_counts_the_positions_of_a_linear_layer() -> None:
    net, x = Tokens(), torch.randn(7, 4)
    factors = kfac_factors(net, layers_of(net), [(x,)], task="multiclass")["linear"]
    tokens = torch.cat([torch.stack([x, x.square(), x.sin()], 1), torch.ones(7, 3, 1)], 2)
    torch.testing.assert_close(factors["a"], torch.einsum("nti,ntj->ij", tokens, tokens) / 7)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Conv2d(2, 2, 3, groups=2), "its Conv2d has 2 groups"),
        (nn.Conv2d(2, 2, 3, padding="same"), "its Conv2d pads by 'same' instead of a number"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "its Conv2d pads by 'reflect'"),
        (nn.BatchNorm2d(2), "BatchNorm2d is neither Linear nor Conv2d"),
    ],
)
def test_kfac_refuses_layers_without_its_formula(layer: nn.Module, why: str) -> None:
    net = nn.Sequential(layer)
    with pytest.raises(FlsuiteError, match=f"'0' is not covered: {why}"):
        require_kfac(net, [Layer("0", "conv2d", True)])


def test_grams_leave_out_layers_that_are_called_twice_or_have_no_formula() -> None:
    net = Twice()
    assert gram_matrices(net, layers_of(net), [(torch.randn(7, 4),)]).keys() == {"last"}
    net = others()
    assert gram_matrices(net, layers_of(net), [(images(),)]).keys() == {"7"}


def test_a_frozen_parameter_has_no_fisher_and_changes_no_other() -> None:
    net, x = convolutions(), images()
    names = [name for name, _ in net.named_parameters()]
    before = predictive_diagonal(net, names, [(x,)], task="multiclass")
    net[5].requires_grad_(False)
    after = predictive_diagonal(net, names, [(x,)], task="multiclass")
    for name in names:
        expected = torch.zeros_like(after[name]) if name.startswith("5.") else before[name]
        torch.testing.assert_close(after[name], expected)
    factors = kfac_factors(net, layers_of(net), [(x,)], task="multiclass")
    assert not any(value.any() for value in factors["5"].values())
    assert all(value.any() for name in "027" for value in factors[name].values())
    net[5].bias.requires_grad_(True)
    with pytest.raises(FlsuiteError, match="'5' is not covered: only a part"):
        kfac_factors(net, layers_of(net), [(x,)], task="multiclass")

    net.requires_grad_(False)
    assert not flat(predictive_diagonal(net, names, [(x,)], task="multiclass")).any()


def test_tied_weights_have_one_fisher_under_both_names() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    names = ["0.weight", "2.weight", "2.bias"]
    found = predictive_diagonal(net, names, [(torch.randn(7, 4),)], task="multiclass")
    assert torch.equal(found["0.weight"], found["2.weight"]) and found["2.weight"].any()


def test_a_pass_leaves_the_model_as_it_is() -> None:
    """Weights, their memory format, gradients and hooks."""
    net = convolutions().to(memory_format=torch.channels_last)
    before = {name: (p.data_ptr(), p.stride()) for name, p in net.named_parameters()}
    names = list(before)
    predictive_diagonal(net, names, [(images(),)], task="multiclass")
    kfac_factors(net, layers_of(net), [(images(),)], task="multiclass")
    assert before == {name: (p.data_ptr(), p.stride()) for name, p in net.named_parameters()}
    assert all(p.grad is None for p in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())


def test_ordinal_and_binary_predictions_are_of_classes() -> None:
    """One sample is enough, and one class too few counts as any other."""
    for task, logits in (("multilabel", 3), ("ordinal", 3), ("binary", 2)):
        model = Classifier(MLP(hidden=(4,)))
        model.ensure_built(DataSpec((5,), logits, task))
        names = [name for name, _ in model.named_parameters()]
        x = torch.randn(1, 5)
        found = predictive_diagonal(model, names, [(x, torch.zeros(1))], task)
        expected = looped(model, names, x, task).square().sum(0)
        torch.testing.assert_close(flat(found), expected, rtol=1e-4, atol=1e-8)
    with pytest.raises(FlsuiteError, match=r"task must be one of multiclass"):
        predictive_diagonal(convolutions(), ["0.weight"], [(images(),)], task="ranking")  # type: ignore[arg-type]


def test_bad_models_are_named() -> None:
    x = images()
    ones = torch.ones(2, 4)
    for net, name, given, words in (
        (nn.Conv2d(2, 2, 3), "weight", x, "logits of Conv2d must have one row per sample"),
        (Pair(), "weight", ones, "one row per sample, .*, got tuple"),
        (Ignored(), "linear.weight", ones, "logits of Ignored depend on none"),
    ):
        with pytest.raises(FlsuiteError, match=words):
            predictive_diagonal(net, [name], [(given,)], task="multiclass")


def test_no_samples_have_no_fisher() -> None:
    net = convolutions()
    diagonal = predictive_diagonal(net, ["0.weight"], [], task="multiclass")
    factors = kfac_factors(net, layers_of(net), [], task="multiclass")
    assert not flat(diagonal).any() and not factors["0"]["a"].any()
