"""The backbones: sizes, shapes, norms, errors."""

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.common.errors import FlsuiteError
from flsuite.models.backbones import (
    CNN,
    MLP,
    Backbone,
    LeNet5,
    ResNet3D,
    ResNet18,
    ResNet20,
    make_norm,
)
from flsuite.models.backbones.base import Norm

GREY, COLOUR, LARGE, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 8, 8)
VOLUME = (1, 28, 28, 28)
SMALL = (1, 16, 16)
FEDFISHER_CNN = CNN(bias=False, hidden=(512, 128), padding=False)
CONVOLUTIONAL = [LeNet5(), LeNet5(bias=False), CNN(), FEDFISHER_CNN]
RESIDUAL = [kind(norm=norm) for kind in (ResNet20, ResNet18) for norm in get_args(Norm)]
FEDFISHER_RESNET = ResNet18(norm="none", head=(1000, 200), bias=False, kernel=7)
ALL = [*CONVOLUTIONAL, *RESIDUAL, MLP()]
# A ResNet18 has eleven million weights, which take long to draw and to copy.
QUICK = [b for b in ALL if not isinstance(b, ResNet18)]
COMPUTED = [*QUICK, ResNet18()]


def name(value: object) -> str:
    if not isinstance(value, Backbone):
        return str(value)
    return f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in vars(value).items())})"


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def drawn(backbone: Backbone, seed: int) -> Tensor:
    """Return the first weights of a network."""
    torch.manual_seed(seed)
    return nn.utils.parameters_to_vector(backbone.build(SMALL, 5).parameters())


def batch(shape: tuple[int, ...], samples: int = 4) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))


def test_lenet5_parameters() -> None:
    # 6*(25+1) + 16*(6*25+1) + 120*(256+1) + 84*(120+1) + 10*(84+1)
    # = 156 + 2416 + 30840 + 10164 + 850
    assert count(LeNet5().build(GREY, 10)) == 44_426
    # Without its biases: 6 + 16 + 120 + 84 + 10 = 236 fewer.
    assert count(LeNet5(bias=False).build(GREY, 10)) == 44_190


def test_cnn_parameters_are_those_of_mcmahan() -> None:
    # 32*(25+1) + 64*(32*25+1) + 512*(64*7*7+1) + 10*(512+1) = 832 + 51264 + 1606144 + 5130
    assert count(CNN().build(GREY, 10)) == 1_663_370


def test_cnn_expresses_fedfishers() -> None:
    network = FEDFISHER_CNN.build(COLOUR, 10)
    linears = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert [m.in_features for m in linears] + [linears[-1].out_features] == [1600, 512, 128, 10]


@pytest.mark.parametrize(
    ("plain", "wide", "parameters"),
    [
        # 7*25 + 20*7*25 + 20*16*130 + 130*90 + 90*10
        (LeNet5(bias=False), LeNet5(False, (7, 20), (130, 90)), 175 + 3500 + 41600 + 11700 + 900),
        # 33*26 + 70*(33*25+1) + 600*(70*49+1) + 10*601
        (CNN(), CNN(channels=(33, 70), hidden=(600,)), 858 + 57820 + 2058600 + 6010),
    ],
    ids=name,
)
def test_chains_take_a_width_per_layer(plain: Backbone, wide: Backbone, parameters: int) -> None:
    network, wider = plain.build(GREY, 10), wide.build(GREY, 10)
    assert count(wider) == parameters
    assert wider.state_dict().keys() == network.state_dict().keys()
    assert wider(batch(GREY)).shape == (4, 10)


def test_a_norm_follows_each_convolution_of_the_cnn() -> None:
    network = CNN(channels=(4, 6), hidden=(8,), norm="batch").build(GREY, 10)
    kinds = [type(layer).__name__ for layer in network]
    assert kinds[:4] == kinds[4:8] == ["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU"]
    assert [layer.num_features for layer in network if hasattr(layer, "num_features")] == [4, 6]


def test_two_layer_mlp_has_mcmahans_parameters() -> None:
    assert count(MLP(hidden=()).build((5,), 3)) == 18, "without hidden layers it is linear"
    assert count(MLP(hidden=(200, 200)).build(GREY, 10)) == 199_210


def test_resnet20_parameters() -> None:
    # stem                 3*16*9                                                    =     432
    # stage 1, each block  2*(16*16*9) + two norms 2*2*16 = 4672;               x 3  =  14 016
    # stage 2, first       16*32*9 + 32*32*9 + shortcut 16*32 + norms 2*16 + 2*32    =  14 432
    #          the others  2*(32*32*9) + 2*2*32 = 18 560;                       x 2  =  37 120
    # stage 3, first       32*64*9 + 64*64*9 + shortcut 32*64 + norms 2*32 + 2*64    =  57 536
    #          the others  2*(64*64*9) + 2*2*64 = 73 984;                       x 2  = 147 968
    # last norm 2*64 = 128, linear 64*10 + 10 = 650                                  =     778
    assert count(ResNet20().build(COLOUR, 10)) == 272_282
    assert count(ResNet20(norm="group").build(COLOUR, 10)) == 272_282
    # The norms hold 2*(6*16 + 16 + 5*32 + 32 + 5*64 + 64) = 1376 of them.
    assert count(ResNet20(norm="none").build(COLOUR, 10)) == 272_282 - 1376


def test_resnet3d_parameters() -> None:
    # stem 16*27 = 432; stage 1: 2*(16*16*27) + norms 4*16 = 13 888
    # stage 2: 16*32*27 + 32*32*27 + shortcut 16*32 + norms 2*16 + 2*32               =  42 080
    # stage 3: 32*64*27 + 64*64*27 + shortcut 32*64 + norms 2*32 + 2*64              = 168 128
    # last norm 128, linear 64*10 + 10                                               =     778
    assert count(ResNet3D().build(VOLUME, 10)) == 432 + 13_888 + 42_080 + 168_128 + 778
    # Each further block of a stage has two convolutions and two norms of its width.
    more = sum(2 * (c * c * 27) + 4 * c for c in (16, 32, 64))
    assert count(ResNet3D(blocks=2).build(VOLUME, 10)) == 225_306 + more


@pytest.mark.parametrize("norm", get_args(Norm))
def test_resnet3d_takes_volumes_of_any_sides(norm: Norm) -> None:
    for shape in (VOLUME, (3, 8, 9, 10)):
        network = ResNet3D(norm, width=2).build(shape, 5)
        assert network(batch(shape)).shape == (4, 5)
        assert copy.deepcopy(network).eval()(batch(shape, 1)).shape == (1, 5)
    for shape in (GREY, (1, 8, 8, 7), (5,)):
        with pytest.raises(FlsuiteError, match=r"ResNet3D takes volumes .*choose ResNet20"):
            ResNet3D().build(shape, 5)


def test_resnet18_is_torchvisions_on_large_images() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    ours = ResNet18().build(LARGE, 10)
    torch.manual_seed(0)
    theirs = resnet18(num_classes=10)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(ours.eval()(batch(LARGE)), theirs.eval()(batch(LARGE)))
    plain = ResNet18(norm="none").build(LARGE, 10)
    assert plain.state_dict().keys() == {
        key for key in theirs.state_dict() if "bn" not in key and "downsample.1" not in key
    }


def test_resnet18_chooses_its_stem() -> None:
    for backbone, shape, kernel, pool in (
        (ResNet18(), GREY, (3, 3), nn.Identity),
        (ResNet18(), LARGE, (7, 7), nn.MaxPool2d),
        (ResNet18(), (1, 64, 64), (7, 7), nn.MaxPool2d),
        (ResNet18(small_images=False), COLOUR, (7, 7), nn.MaxPool2d),
        (ResNet18(small_images=True), LARGE, (3, 3), nn.Identity),
    ):
        with torch.device("meta"):
            network = backbone.build(shape, 10)
        stem = network.conv1
        assert (stem.in_channels, stem.kernel_size) == (shape[0], kernel)
        assert type(network.maxpool) is pool


def test_resnet18_expresses_fedfishers() -> None:
    network = FEDFISHER_RESNET.build(COLOUR, 43)
    assert not [key for key, _ in network.named_parameters() if key.endswith("bias")]
    assert not list(network.buffers())
    # stem 3*64*49; blocks 2*(2*64*64*9), 64*128*9 + 3*128*128*9, 128*256*9 + 3*256*256*9,
    # 256*512*9 + 3*512*512*9; shortcuts 64*128 + 128*256 + 256*512; 512*1000 + 1000*200 + 200*43
    blocks = 147_456 + 516_096 + 2_064_384 + 8_257_536
    assert count(network) == 9408 + blocks + 172_032 + 720_600
    features: list[Tensor] = []
    network.conv1.register_forward_hook(lambda module, inputs, output: features.append(output))
    assert network(batch(COLOUR, 2)).shape == (2, 43)
    assert features[0].shape == (2, 64, 28, 28)


def test_resnet18_adds_linear_layers_and_changes_nothing_else() -> None:
    networks = []
    for backbone in (ResNet18(norm="none"), ResNet18(norm="none", head=(30,))):
        torch.manual_seed(0)
        networks.append(backbone.build(COLOUR, 5))
    plain, deep = networks
    parts = [key for key in deep.state_dict() if key.startswith("fc")]
    assert parts == [f"fc.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias")]
    for key, value in plain.state_dict().items():
        assert key.startswith("fc") or torch.equal(value, deep.state_dict()[key])
    assert [type(m) for m in deep.fc] == [nn.Linear, nn.Linear], "no activation between"
    with torch.device("meta"):
        single = ResNet18(norm="none", bias=False).build(COLOUR, 5).fc
    assert isinstance(single, nn.Linear) and single.bias is None


def test_output_shapes() -> None:
    large_stem = ResNet18(norm="none", small_images=False)
    cases = [*product([*ALL, FEDFISHER_RESNET], (LARGE, (2, 20, 24))), (large_stem, (3, 8, 8))]
    cases += [(ResNet20(norm="group", width=8), (6, 16, 16))]
    cases += [(MLP(), shape) for shape in (TINY, (5,), (2, 3))]
    for backbone, shape in cases:
        with torch.device("meta"):  # shapes alone, without values
            network = backbone.build(shape, 7)
            assert network(torch.empty(2, *shape)).shape == (2, 7), (name(backbone), shape)


@pytest.mark.parametrize("backbone", RESIDUAL, ids=name)
def test_norms_are_those_of_the_argument(backbone: ResNet20 | ResNet18) -> None:
    with torch.device("meta"):
        network = backbone.build(COLOUR, 10)
    norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
    found = [m for m in network.modules() if isinstance(m, norms)]
    layers, groups = {ResNet20: (19, 8), ResNet18: (20, 32)}[type(backbone)]
    kinds = {"batch": {nn.BatchNorm2d}, "group": {nn.GroupNorm}, "none": set()}
    assert len(found) == (0 if backbone.norm == "none" else layers)
    assert {type(m) for m in found} == kinds[backbone.norm]
    assert bool(list(network.buffers())) == (backbone.norm == "batch")
    assert {m.num_groups for m in found if isinstance(m, nn.GroupNorm)} <= {groups}


def test_make_norm_finds_groups_that_divide() -> None:
    norm = make_norm("group", 24)
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 8
    assert ResNet20(norm="group", width=3).build(GREY, 2)(batch(GREY)).shape == (4, 2)


def test_bias_false_leaves_none() -> None:
    for backbone in (LeNet5(bias=False), CNN(bias=False), MLP(bias=False)):
        names = [key for key, _ in backbone.build(GREY, 10).named_parameters()]
        assert names and not [key for key in names if key.endswith("bias")]


def test_without_norms_the_blocks_start_as_their_shortcuts() -> None:
    for backbone, blocks in ((ResNet20(norm="none"), 9), (ResNet18(norm="none"), 8)):
        parts = backbone.build(COLOUR, 10).named_modules()
        last = [m for key, m in parts if key.endswith("conv2") and isinstance(m, nn.Conv2d)]
        assert len(last) == blocks and not any(m.weight.any() for m in last)


@pytest.mark.parametrize("backbone", [*COMPUTED, FEDFISHER_RESNET], ids=name)
def test_a_gradient_step_reduces_the_loss_and_leaves_the_input_alone(backbone: Backbone) -> None:
    """K-FAC hooks convolutions and linear layers, whose outputs must not be overwritten."""
    torch.manual_seed(0)
    network, fired = backbone.build(SMALL, 3), []
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [
        layer.register_full_backward_hook(lambda module, inputs, outputs: fired.append(module))
        for layer in layers
    ]
    x, y = batch(SMALL, 6).requires_grad_(), torch.arange(6) % 3
    loss = F.cross_entropy(network(x), y)
    assert torch.equal(x, batch(SMALL, 6))
    _, *gradients = torch.autograd.grad(loss, [x, *network.parameters()])
    assert len(fired) == len(layers)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=1e-3)
        assert F.cross_entropy(network(x), y) < loss


@pytest.mark.parametrize("backbone", COMPUTED, ids=name)
def test_scores_of_one_sample_and_of_channels_last_are_the_same(backbone: Backbone) -> None:
    torch.manual_seed(0)
    network = backbone.build(SMALL, 3).eval().requires_grad_(False)
    expected = network(batch(SMALL))
    torch.testing.assert_close(network(batch(SMALL)[:1]), expected[:1], rtol=1e-4, atol=1e-5)
    formats: list[bool] = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.GroupNorm | nn.MaxPool2d):
            module.register_forward_hook(
                lambda _, inputs, out: formats.append(
                    out.is_contiguous(memory_format=torch.channels_last)
                )
            )
    network.to(memory_format=torch.channels_last)
    actual = network(batch(SMALL).to(memory_format=torch.channels_last))
    assert all(formats) and bool(formats) != isinstance(backbone, MLP)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backbone", QUICK, ids=name)
def test_building_follows_the_seed_and_networks_pickle(backbone: Backbone) -> None:
    first = drawn(backbone, 1)
    assert torch.equal(first, drawn(backbone, 1)) and not torch.equal(first, drawn(backbone, 2))
    network = backbone.build(SMALL, 3).eval().requires_grad_(False)
    for twin in (pickle.loads(pickle.dumps(network)), copy.deepcopy(network)):
        assert torch.equal(twin(batch(SMALL, 1)), network(batch(SMALL, 1)))


def test_backbones_pickle() -> None:
    for backbone in ALL:
        assert name(pickle.loads(pickle.dumps(backbone))) == name(backbone)


def test_shapes_that_do_not_fit() -> None:
    shapes = ((12,), (28, 28), (3, 3, 32, 32), (1, 3, 40), (0, 32, 32))
    for backbone, shape in product((LeNet5(), CNN(), ResNet20(), ResNet18()), shapes):
        with pytest.raises(
            FlsuiteError, match=rf"{type(backbone).__name__} takes images.*at least \d+ x \d+.*MLP"
        ):
            backbone.build(shape, 2)


def test_the_smallest_image_fits() -> None:
    for backbone, smallest in (
        (LeNet5(), 16),
        (FEDFISHER_CNN, 16),
        (CNN(), 4),
        (ResNet20(), 4),
        (ResNet18(), 8),
    ):
        with torch.device("meta"):
            network = backbone.build((1, smallest, smallest), 2)
            assert network(torch.empty(4, 1, smallest, smallest)).shape == (4, 2)
        with pytest.raises(FlsuiteError):
            backbone.build((1, smallest, smallest - 1), 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MLP(dropout=1.0), "dropout"),
        (lambda: MLP(hidden=(0,)), "hidden"),
        (lambda: CNN(hidden=(8, -1)), "hidden"),
        (lambda: CNN(channels=(8,)), "CNN: channels must be two widths .* got"),
        (lambda: LeNet5(channels=(0, 3)), "LeNet5: channels must be two widths"),
        (lambda: LeNet5(hidden=(0,)), "hidden"),
        (lambda: ResNet18(head=(0,)), "head"),
        (lambda: ResNet18(kernel=0), "ResNet18: kernel must be at least 1"),
        (lambda: ResNet18(kernel=11).build((3, 10, 10), 2), "at least 11 x 11"),
        (lambda: ResNet20(width=0), "width"),
        (lambda: make_norm("layer", 16), "norm must be one of batch, group, none"),  # type: ignore[arg-type]
        (lambda: MLP().build((0,), 2), "MLP"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(FlsuiteError, match=words):
        make()


def test_dropout_acts_in_training_only() -> None:
    network = MLP(hidden=(32,), dropout=0.5).build((5,), 3)
    x = batch((5,))
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))
