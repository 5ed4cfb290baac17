"""DENSE: its losses by hand, its generator, and clients that agree."""

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite import FlsuiteError
from flsuite.aggregators import DENSE, FedAvg
from flsuite.aggregators.part import ServerTools
from flsuite.aggregators.rules.dense import (
    _Ensemble,
    _ImageGenerator,
    _UpConv,
    adversarial_loss,
    batch_norm_distances,
    distillation_loss,
    statistics_distance,
)
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import torch_generator
from flsuite.common.state import State, clone
from tests.aggregators.chains import OUTPUTS, SHAPE, chain_layout, image_batch, random_net
from tests.aggregators.federations import ServerHalf, fold, server_of
from tests.conftest import equal_states

SMALL = {"epochs": 2, "generator_steps": 3, "batch_size": 8, "latent": 4, "width": 0.05}


def update(client: int, state: State, samples: int = 1) -> ClientUpdate:
    return ClientUpdate(client, 1, samples, 1, torch.ones(OUTPUTS), state)


def scaled(images: Tensor) -> Tensor:
    """Return images as the clients of these tests see them."""
    return (images - 0.3) / 0.2


class Seeing(nn.Module):
    """A network that keeps its inputs."""

    def __init__(self, net: nn.Module, seen: list[Tensor]) -> None:
        super().__init__()
        self.net, self.seen = net, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        logits: Tensor = self.net(x)
        return logits


def tools(net: nn.Module, **others: Any) -> ServerTools:
    def module(state: State) -> nn.Module:
        made = copy.deepcopy(net)
        made.load_state_dict(state)
        return made.eval()

    settings = {"to_inputs": scaled, "shape": SHAPE, "outputs": OUTPUTS, "seed": 7}
    return ServerTools(module=module, **{**settings, **others})


def dense(net: nn.Module, given: ServerTools | None = None, **settings: Any) -> ServerHalf:
    rule, given = DENSE(**{**SMALL, **settings}), given or tools(net)
    rule.prepare(server_of({}, chain_layout(net), tools=given))
    return ServerHalf(rule, chain_layout(net), tools=given)


def different(count: int = 3) -> list[ClientUpdate]:
    return [update(i, clone(random_net("conv", seed=i).state_dict()), i + 1) for i in range(count)]


def normed() -> nn.Module:
    """Return a network with BatchNorm whose running statistics match no batch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, OUTPUTS)
        )
        for _ in range(3):
            net(torch.randn(8, *SHAPE))
        return net.eval()


# Clients that agree


def test_equal_clients_keep_the_student() -> None:
    """The teacher is the client, so there is nothing to learn, and weights stay up to rounding."""
    net = random_net("conv")
    start = clone(net.state_dict())
    made = dense(net)
    new = made.aggregate(start, iter([update(i, start, i + 1) for i in range(3)]))
    for name, value in start.items():
        torch.testing.assert_close(new[name], value, rtol=0, atol=1e-6)
    assert made.metrics["generator_adv"] == pytest.approx(0, abs=1e-6)
    assert made.metrics["student_loss"] == pytest.approx(0, abs=1e-6)
    assert made.metrics["generator_bn"] == 0 and made.metrics["server_seconds"] > 0


# The losses


def test_the_teacher_is_the_mean_of_logits_by_samples() -> None:
    nets, x = [random_net("conv", seed=seed) for seed in range(3)], image_batch("conv", 5)
    teacher = _Ensemble(nets, [1.0, 2.0, 5.0])
    expected = (nets[0](x) + 2 * nets[1](x) + 5 * nets[2](x)) / 8
    torch.testing.assert_close(teacher(x), expected)
    assert not any(p.requires_grad for p in teacher.parameters())


def test_the_adversarial_loss_counts_where_the_predictions_differ() -> None:
    """The first sample's classes agree; the second's do not."""
    teacher = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    student = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    p, q = teacher[1].softmax(0), student[1].softmax(0)
    divergence = float((p * (p / q).log()).sum())
    assert adversarial_loss(teacher, student).item() == pytest.approx(-divergence / 2)


def test_the_distillation_loss_by_hand_and_on_saturated_logits() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(4, 3), torch.randn(4, 3)
    p, q = (teacher / 5).softmax(1), (student / 5).softmax(1)
    by_hand = 25 * (p * (p / q).log()).sum() / 4
    assert distillation_loss(teacher, student, 5.0).item() == pytest.approx(
        float(by_hand), rel=1e-4
    )

    student = (300 * student).requires_grad_()
    for loss in (
        distillation_loss(300 * teacher, student, 1.0),
        adversarial_loss(300 * teacher, student),
    ):
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.isfinite() and gradient.isfinite().all()


@torch.no_grad()
def test_batch_norm_distances_are_zero_on_a_batch_with_the_running_statistics() -> None:
    net, x = normed(), torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(1))
    norm = net[1]  # type: ignore[index]
    inputs = net[0](x)  # type: ignore[index]
    norm.running_mean.copy_(inputs.mean((0, 2, 3)))
    norm.running_var.copy_(inputs.var((0, 2, 3), correction=0))
    with batch_norm_distances(net) as distances:
        net(x)
    assert len(distances) == 1 and distances[0].item() == pytest.approx(0, abs=1e-6)

    # Shifted by 2 and 3, in two channels of four.
    norm.running_mean[0] += 2
    norm.running_var[1] += 3
    assert statistics_distance(norm, inputs).item() == pytest.approx(5, abs=1e-5)
    net(x)
    assert len(distances) == 1  # the hooks are gone


def test_every_clients_batch_norm_counts() -> None:
    nets = [normed() for _ in range(3)]
    x = torch.randn(8, *SHAPE)
    teacher = _Ensemble(nets, [1.0] * 3)
    with batch_norm_distances(teacher) as distances:
        teacher(x)
    assert len(distances) == 3

    made, state = dense(normed(), epochs=1), clone(normed().state_dict())
    made.aggregate(state, iter([update(0, state), update(1, state)]))
    assert made.metrics["generator_bn"] > 0
    parts = [made.metrics[f"generator_{part}"] for part in ("ce", "bn", "adv")]
    expected = parts[0] + parts[1] + 0.5 * parts[2]
    assert made.metrics["generator_loss"] == pytest.approx(expected, rel=1e-5)


# The images


def test_teacher_and_student_see_images_scaled_as_the_clients_data() -> None:
    """The networks only see shifted images in [0, 1], after the clients' scaling."""
    seen: list[Tensor] = []
    net = random_net("conv")
    start = clone(net.state_dict())

    def module(state: State) -> nn.Module:
        own = copy.deepcopy(net)
        own.load_state_dict(state)
        watched = copy.copy(own)  # the names of the entries stay
        watched.forward = Seeing(own, seen).forward  # type: ignore[method-assign]
        return watched

    made = dense(net, replace(tools(net), module=module))
    made.aggregate(start, iter([update(0, start), update(1, start)]))
    # Two clients and the student, 3 steps of the generator per epoch, 1 and 2 of the student.
    assert len(seen) == 3 * (2 * 3 + 1 + 2)
    lowest, highest = scaled(torch.tensor([0.0, 1.0]))
    for x in seen:
        assert x.shape == (8, *SHAPE) and lowest - 1e-6 <= x.min() and x.max() <= highest + 1e-6
    # The border of a shifted image is a black pixel, which is not 0 after the scaling.
    assert min(float(x.min()) for x in seen) == pytest.approx(float(lowest))


def test_the_pool_holds_the_images_of_the_lowest_loss_as_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[Tensor] = []

    def distil(*arguments: Any) -> None:
        pools.append(next(one for one in arguments if isinstance(one, Tensor)))

    monkeypatch.setattr(DENSE, "_distil", distil)
    net = random_net("conv")
    dense(net, epochs=3).aggregate(clone(net.state_dict()), iter(different()))
    assert [len(pool) for pool in pools] == [8, 16, 24] and pools[0].dtype == torch.uint8
    assert torch.equal(pools[2][:16], pools[1])  # earlier images stay
    assert not torch.equal(pools[2][:8], pools[2][8:16])


def test_upsampling_and_convolution_are_one_transposed_convolution() -> None:
    torch.manual_seed(0)
    layer, x = _UpConv(3, 5).double(), torch.randn(2, 3, 4, 6).double()
    with torch.no_grad():
        layer.weight.normal_()
    expected = F.conv2d(F.interpolate(x, scale_factor=2.0), layer.weight, padding=1)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 9, 14)])
def test_the_generator_makes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    made = _ImageGenerator(5, shape, 0.05)
    made.reset(torch_generator(0, "dense"))
    images = made(torch.randn(4, 5))
    assert images.shape == (4, *shape) and images.min() >= 0 and images.max() <= 1


def test_the_generator_has_the_papers_layers_and_weights() -> None:
    made = _ImageGenerator(256, (1, 28, 28))
    shapes = [tuple(p.shape) for p in made.parameters() if p.ndim > 1]
    expected = [(128 * 49, 256), (128, 128, 3, 3), (64, 128, 3, 3), (1, 64, 3, 3)]
    assert shapes == expected
    made.reset(torch_generator(0, "dense"))
    assert made.start.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert made.body[0].weight.mean().item() == pytest.approx(1, abs=0.01)
    assert made.body[0].weight.std().item() == pytest.approx(0.02, rel=0.3)


# The run


def test_the_student_learns_the_teacher_on_the_invented_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[Tensor] = []
    invent = DENSE._invent

    def kept(self: DENSE, *arguments: Any) -> Tensor:
        pools.append(invent(self, *arguments))
        return pools[-1]

    monkeypatch.setattr(DENSE, "_invent", kept)
    net, updates = random_net("conv"), different()
    start, given = fold(FedAvg(), updates[0].state, updates), tools(net)
    made = dense(net, epochs=8, batch_size=32, student_lr=0.1)
    new = made.aggregate(start, iter(updates))

    assert given.module is not None
    teacher = _Ensemble([given.module(u.state) for u in updates], [u.samples for u in updates])
    x = scaled(torch.cat(pools) / 255)
    before, after = (
        distillation_loss(teacher(x), given.module(state)(x), 20.0).item() for state in (start, new)
    )
    assert after < 0.2 * before


def test_the_best_epoch_is_kept_and_the_last_one_without_a_score() -> None:
    net, updates = random_net("conv"), different()
    seen: list[State] = []
    marks = iter([0.2, 0.6, 0.6, 0.1])

    def score(state: State) -> float:
        seen.append(state)
        return next(marks)

    made = dense(net, tools(net, score=score, score_module=lambda module: 0.9), epochs=4)
    new = made.aggregate(updates[0].state, updates)
    assert equal_states(new, seen[1]) and made.metrics["kept_epoch"] == 2
    assert made.metrics["ensemble_accuracy"] == 0.9

    unscored = dense(net, epochs=4)
    assert equal_states(unscored.aggregate(updates[0].state, updates), seen[3])
    assert unscored.metrics["kept_epoch"] == 4 and "ensemble_accuracy" not in unscored.metrics


def test_bfloat16_is_for_the_generator_alone() -> None:
    net, updates = random_net("conv"), different()
    new = dense(net, precision="bf16-mixed").aggregate(updates[0].state, updates)
    full = dense(net).aggregate(updates[0].state, updates)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in new.values())
    assert not equal_states(new, full)


# Refusals


def test_a_missing_tool_is_named_before_the_first_round(caplog: pytest.LogCaptureFixture) -> None:
    net = random_net("conv")
    complete = tools(net)
    for name, reason in [("module", "the head stays"), ("to_inputs", "the samples are not images")]:
        lacking = replace(complete, **{name: None}, missing={name: reason})
        with pytest.raises(FlsuiteError, match=f"DENSE .*, and {reason}"):
            DENSE().prepare(server_of({}, chain_layout(net), tools=lacking))

    with caplog.at_level(logging.INFO, "flsuite"):
        dense(net, replace(complete, missing={"score": "set data.server_samples"}))
    assert "keeps the student of its last epoch, and set" in caplog.text
