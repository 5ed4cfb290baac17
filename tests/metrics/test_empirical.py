"""The estimators of the Fisher diagonal against a loop over samples and cases worked by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite import FlsuiteError
from flsuite.common.state import State
from flsuite.data import DataSpec
from flsuite.metrics.fisher import fisher_diagonal
from flsuite.models import NFClassifier
from flsuite.models.backbones import MLP


class Densities(nn.Module):
    """A log-likelihood over a convolution, BatchNorm, linear layers and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.inner = nn.Linear(3, 8, bias=False)
        self.twice = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.rows = nn.Linear(4, 4)
        self.last = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = self.inner(F.relu(self.norm(self.conv(x))).mean((2, 3)))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        h = torch.tanh(self.tied(h)) + F.linear(h, self.tied.weight)
        logits = self.last(h) * self.scale
        logits = logits + self.rows(logits[:, None].repeat(1, 3, 1)).sum(1)
        return -F.cross_entropy(logits, y, reduction="none")


def densities(n: int = 12) -> tuple[Densities, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Densities()
    model.norm(torch.randn(9, 3, 4, 4))  # some statistics
    return model.eval(), (torch.randn(n, 1, 6, 6), torch.randint(0, 4, (n,)))


def flow_model(scale: float | None = 0.3) -> NFClassifier:
    torch.manual_seed(0)
    made = NFClassifier(feature_dim=6, couplings=2, flow_width=8, backbone=MLP(hidden=(8,)))
    made.ensure_built(DataSpec((5,), 3))
    for parameter in made.flow.parameters() if scale else ():
        nn.init.normal_(parameter, std=scale)
    return made.eval()


def looped(model: Any, names: list[str], batch: tuple[Tensor, Tensor]) -> State:
    """Return the Fisher diagonal by its definition, one sample at a time."""
    own = dict(model.named_parameters())
    total = {name: torch.zeros_like(own[name]) for name in names}
    for i in range(len(batch[0])):
        value = model.log_likelihood((batch[0][i : i + 1], batch[1][i : i + 1])).sum()
        gradients = torch.autograd.grad(value, [own[name] for name in names], allow_unused=True)
        for name, g in zip(names, gradients, strict=True):
            total[name] += 0 if g is None else g.square()
    return {name: value / len(batch[0]) for name, value in total.items()}


@pytest.mark.parametrize("sizes", [(12,), (5, 5, 2)])
def test_exact_is_a_loop_over_samples(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover every kind of layer, batches of all sizes, and few samples at a time."""
    monkeypatch.setattr("flsuite.metrics.fisher.estimates._NUMBERS_AT_ONCE", 1000)
    table = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    for model, (x, y) in (densities(), (flow_model(), table)):
        prefix = "" if isinstance(model, Densities) else "flow."
        names = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
        batches = zip(x.split(sizes), y.split(sizes), strict=True)
        found = fisher_diagonal(model, names, batches, "exact")
        assert found.keys() == set(names)
        assert {value.dtype for value in found.values()} == {torch.float32}
        for name, expected in looped(model, names, (x, y)).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
            assert found[name].sum() > 0


def test_batch_is_its_formula_and_no_more_than_exact() -> None:
    model, (x, y) = densities()
    names = ["conv.weight", "last.weight", "scale"]
    own = dict(model.named_parameters())
    batches = list(zip(x.split(4), y.split(4), strict=True))
    found, exact = (fisher_diagonal(model, names, batches, kind) for kind in ("batch", "exact"))
    for name in names:
        squares = [
            torch.autograd.grad(model.log_likelihood(b).mean(), own[name])[0].square()
            for b in batches
        ]
        torch.testing.assert_close(found[name], torch.stack(squares).mean(0), rtol=1e-5, atol=1e-9)
        assert (found[name] <= exact[name] + 1e-7).all()


class Normals(nn.Module):
    """N(mean, 1): the gradient of a sample is ``x - mean``, and the Fisher is one."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return -0.5 * (batch[0] - self.mean - self.frozen).square().sum(1)


def test_both_by_hand_and_the_factor_between_them() -> None:
    """Samples 1, 3 | 2, -2: the mean of squares is 4.5. The batch means are 2 and 0, so it is 2."""
    x, y = torch.tensor([[1.0, 0], [3, 0], [2, 0], [-2, 0]]), torch.zeros(4)
    batches = list(zip(x.split(2), y.split(2), strict=True))
    exact = fisher_diagonal(Normals(), ["mean", "frozen"], batches, "exact")
    assert exact["mean"].tolist() == [4.5, 0]
    found = fisher_diagonal(Normals(), ["mean", "frozen"], batches, "batch")
    assert found["mean"].tolist() == [2.0, 0] and found["frozen"].tolist() == [0.0, 0]
    x = torch.randn(6400, 2, generator=torch.Generator().manual_seed(0))
    batches = [(part, part[:, 0]) for part in x.split(32)]
    for kind, expected in (("exact", 1.0), ("batch", 1 / 32)):
        found = fisher_diagonal(Normals(), ["mean"], batches, kind)["mean"]
        torch.testing.assert_close(found, torch.full((2,), expected), rtol=0.25, atol=0)


@pytest.mark.parametrize("estimator", ["exact", "batch"])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda model, x: model.mean.sum(), r"one number per sample, \(3,\), got \(\)"),
        (lambda model, x: x.sum(1), "depend on none of the parameters"),
        (lambda model, x: x.sum(1) + 0 * model.other, "depend on none of the parameters"),
    ],
)
def test_bad_log_likelihoods_are_named(estimator: Any, values: Any, said: str) -> None:
    class Bad(Normals):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.zeros(()))

        def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return values(self, batch[0])

    with pytest.raises(FlsuiteError, match=f"log_likelihood of Bad.*{said}"):
        fisher_diagonal(Bad(), ["mean"], [(torch.ones(3, 2), torch.ones(3))], estimator)


def test_what_cannot_be_vectorized_is_named_and_may_go_by_batches() -> None:
    class InPlace(Normals):
        def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            total = torch.zeros(len(batch[0]))
            total += super().log_likelihood(batch)
            return total

    batches = [(torch.ones(3, 2), torch.ones(3))]
    with pytest.raises(FlsuiteError, match=r"log_likelihood of InPlace cannot be vectorized"):
        fisher_diagonal(InPlace(), ["mean"], batches, "exact")
    assert fisher_diagonal(InPlace(), ["mean"], batches, "batch")["mean"].tolist() == [1.0, 1.0]


class OneLayer(nn.Module):
    """A log-likelihood over linear layers; each subclass uses them in its own way.

    Attributes:
        later: Whether the batch is not the first one.
    """

    later = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.hidden(batch[0]).square().sum(1)

    def hidden(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class TiedBehindZeros(OneLayer):
    """Uses the weight twice; the first batch is of zeros, and so are its gradients."""

    def hidden(self, x: Tensor) -> Tensor:
        scale = x.abs().sum(1, keepdim=True)
        return scale * (F.linear(self.linear(x), self.linear.weight) + self.other(x))


class CalledAgainLater(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        h = self.linear(x) + self.other(x)
        return self.linear(torch.tanh(h)) if self.later else h


class WeightAddedLater(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        h = self.linear(x) + self.other(x)
        return h + self.linear.weight.sum() if self.later else h


class Discarded(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        self.other(x)
        return self.linear(x)


class DiscardedLater(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        h, other = self.linear(x), self.other(x)
        return h if self.later else h + other


class DiscardedAndUsedElsewhere(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        self.linear(x)
        return F.linear(torch.tanh(x), self.linear.weight, self.linear.bias) + self.other(x)


class OutputOverwritten(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh_() + self.other(x)


class InputOverwritten(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        copy = 1.0 * x
        h = self.linear(copy)
        return h + self.other(copy.tanh())


class ByKeyword(OneLayer):
    def hidden(self, x: Tensor) -> Tensor:
        return self.linear(input=x) + self.other(x)


class RowsOfATable(OneLayer):
    """Calls the layer on a table that has, by coincidence, as many rows as a batch."""

    def hidden(self, x: Tensor) -> Tensor:
        table = torch.arange(12.0).reshape(4, 3) / 12
        return x.sum(1, keepdim=True) * self.linear(table).sum(0) + self.other(x)


@pytest.mark.parametrize("kind", OneLayer.__subclasses__(), ids=lambda kind: kind.__name__)
def test_exact_holds_in_every_batch_however_a_layer_is_used(kind: type[OneLayer]) -> None:
    """The first batch proves nothing about the second, and gradients of zero prove nothing."""
    torch.manual_seed(0)
    model = kind()
    parts = [torch.randn(4, 3) for _ in range(3)]
    if kind is TiedBehindZeros:
        parts[0].zero_()
    names = [name for name, _ in model.named_parameters()]
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for number, x in enumerate(parts):
            model.later = number > 0
            yield x, torch.zeros(len(x))
            for name, square in looped(model, names, (x, x)).items():
                expected[name] += square / len(parts)

    found = fisher_diagonal(model, names, batches(), "exact")

    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert found["linear.weight"].sum() > 0


def test_the_flow_never_needs_the_gradient_of_a_single_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers of NFClassifier's flow take the shortcut, also in an untrained flow."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("per-sample gradients")

    monkeypatch.setattr("flsuite.metrics.fisher.products.sample_squares", refuse)
    for model in (flow_model(), flow_model(scale=None)):
        names = [name for name, _ in model.named_parameters() if name.startswith("flow.")]
        batches = [(torch.randn(n, 5), torch.arange(n) % 3) for n in (8, 8, 1)]
        assert fisher_diagonal(model, names, batches, "exact").keys() == set(names)


def test_tied_weights_have_one_fisher_under_each_of_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def log_likelihood(self, batch: tuple[Tensor, ...]) -> Tensor:
            return self.b(self.a(batch[0]).tanh()).square().sum(1)

    torch.manual_seed(0)
    model, batches = Tied(), [(torch.randn(6, 4),) for _ in range(2)]
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    x = torch.cat([batch[0] for batch in batches])
    by_hand = looped(model, ["a.weight"], (x, x))["a.weight"]
    fisher = fisher_diagonal(model, names, batches, "exact")
    assert torch.equal(fisher["a.weight"], fisher["b.weight"])
    torch.testing.assert_close(fisher["a.weight"], by_hand)
