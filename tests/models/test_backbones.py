"""The backbones: sizes, shapes, norms, errors."""

import copy
import pickle
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.errors import FlsuiteError
from flsuite.models.backbones import (
    CNN,
    MLP,
    Backbone,
    LeNet5,
    ResNet18,
    ResNet20,
    make_norm,
)
from flsuite.models.backbones.base import Norm

GREY, COLOUR, LARGE, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 8, 8)
FEDFISHER_CNN = CNN(bias=False, hidden=(512, 128), padding=False)
CONVOLUTIONAL = [LeNet5(), LeNet5(bias=False), CNN(), FEDFISHER_CNN]
RESIDUAL = [kind(norm=norm) for kind in (ResNet20, ResNet18) for norm in get_args(Norm)]
FEDFISHER_RESNET = ResNet18(norm="none", head=(1000, 200), bias=False, kernel=7)
ALL = [*CONVOLUTIONAL, *RESIDUAL, MLP()]


def name(value: object) -> str:
    if not isinstance(value, Backbone):
        return str(value)
    return f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in vars(value).items())})"


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@cache
def _built(backbone: Backbone, shape: tuple[int, ...], outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return backbone.build(shape, outputs)


def built(backbone: Backbone, shape: tuple[int, ...] = GREY, outputs: int = 3) -> nn.Module:
    """Return a copy of a network, because a large one takes long to initialize."""
    return copy.deepcopy(_built(backbone, shape, outputs))


def batch(shape: tuple[int, ...], samples: int = 4) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))


def test_lenet5_parameters() -> None:
    # 6*(25+1) + 16*(6*25+1) + 120*(256+1) + 84*(120+1) + 10*(84+1)
    # = 156 + 2416 + 30840 + 10164 + 850
    assert count(LeNet5().build(GREY, 10)) == 44_426
    # Without its biases: 6 + 16 + 120 + 84 + 10 = 236 fewer.
    assert count(LeNet5(bias=False).build(GREY, 10)) == 44_190


@pytest.mark.parametrize(
    ("side", "flat"), [(28, 256), (32, 400), (16, 16), (17, 16), (64, 16 * 13 * 13)]
)
def test_lenet5_flattens(side: int, flat: int) -> None:
    linear = next(
        m for m in LeNet5().build((1, side, side), 10).modules() if isinstance(m, nn.Linear)
    )
    assert linear.in_features == flat


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


@pytest.mark.parametrize("backbone", [LeNet5(), LeNet5(bias=False), CNN()], ids=name)
def test_default_widths(backbone: LeNet5 | CNN) -> None:
    widths = {LeNet5: ((6, 16), (120, 84)), CNN: ((32, 64), (512,))}[type(backbone)]
    explicit = type(backbone)(bias=backbone.bias, channels=widths[0], hidden=widths[1])
    states = []
    for made in (backbone, explicit):
        torch.manual_seed(0)
        states.append(nn.utils.parameters_to_vector(made.build(GREY, 10).parameters()))
    assert torch.equal(*states)


def test_two_layer_mlp_has_mcmahans_parameters() -> None:
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
    def stem(backbone: ResNet18, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], type]:
        network = backbone.build(shape, 10)
        assert isinstance(network.conv1, nn.Conv2d)
        return network.conv1.in_channels, network.conv1.kernel_size, type(network.maxpool)

    assert stem(ResNet18(), GREY) == (1, (3, 3), nn.Identity)
    assert stem(ResNet18(), LARGE) == (3, (7, 7), nn.MaxPool2d)
    assert stem(ResNet18(), (1, 64, 64)) == (1, (7, 7), nn.MaxPool2d)
    assert stem(ResNet18(small_images=False), COLOUR) == (3, (7, 7), nn.MaxPool2d)
    assert stem(ResNet18(small_images=True), LARGE) == (3, (3, 3), nn.Identity)


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
    assert [key for key in deep.state_dict() if key.startswith("fc")] == [
        "fc.0.weight",
        "fc.0.bias",
        "fc.1.weight",
        "fc.1.bias",
    ]
    for key, value in plain.state_dict().items():
        assert key.startswith("fc") or torch.equal(value, deep.state_dict()[key])
    assert [type(m) for m in deep.fc] == [nn.Linear, nn.Linear], "no activation between"
    single = ResNet18(norm="none", bias=False).build(COLOUR, 5).fc
    assert isinstance(single, nn.Linear) and single.bias is None


def test_resnet18_with_the_large_stem_takes_small_images() -> None:
    for side in (8, 32):
        network = ResNet18(norm="none", small_images=False).build((3, side, side), 5)
        assert network(batch((3, side, side), 2)).shape == (2, 5)


@pytest.mark.parametrize("shape", [GREY, COLOUR, LARGE, (2, 20, 24)], ids=name)
@pytest.mark.parametrize("backbone", [*ALL, FEDFISHER_RESNET], ids=name)
def test_output_shapes(backbone: Backbone, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):  # shapes alone, without values
        network = backbone.build(shape, 7)
        assert network(torch.empty(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("shape", [TINY, (5,), (2, 3)])
def test_mlp_takes_any_shape(shape: tuple[int, ...]) -> None:
    assert MLP().build(shape, 3)(batch(shape)).shape == (4, 3)


@pytest.mark.parametrize("backbone", ALL, ids=name)
def test_one_sample_scores_as_in_a_batch(backbone: Backbone) -> None:
    network = built(backbone).eval()
    x = batch(GREY, 3)
    with torch.inference_mode():
        torch.testing.assert_close(network(x[:1]), network(x)[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backbone", RESIDUAL, ids=name)
def test_norms_are_those_of_the_argument(backbone: ResNet20 | ResNet18) -> None:
    network = backbone.build(COLOUR, 10)
    found = [
        m
        for m in network.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.GroupNorm)
    ]
    layers = {ResNet20: 19, ResNet18: 20}[type(backbone)]
    expected: dict[Norm, set[type]] = {
        "batch": {nn.BatchNorm2d},
        "group": {nn.GroupNorm},
        "none": set(),
    }
    assert len(found) == (0 if backbone.norm == "none" else layers)
    assert {type(m) for m in found} == expected[backbone.norm]
    assert bool(list(network.buffers())) == (backbone.norm == "batch")
    groups = {ResNet20: 8, ResNet18: 32}[type(backbone)]
    assert {m.num_groups for m in found if isinstance(m, nn.GroupNorm)} <= {groups}


def test_make_norm_finds_groups_that_divide() -> None:
    norm = make_norm("group", 24)
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == 8
    assert ResNet20(norm="group", width=3).build(GREY, 2)(batch(GREY)).shape == (4, 2)


@pytest.mark.parametrize(
    "backbone", [LeNet5(bias=False), CNN(bias=False), MLP(bias=False)], ids=name
)
def test_bias_false_leaves_none(backbone: Backbone) -> None:
    assert not [
        key for key, _ in backbone.build(GREY, 10).named_parameters() if key.endswith("bias")
    ]


@pytest.mark.parametrize("backbone", [ResNet20(norm="none"), ResNet18(norm="none")], ids=name)
def test_without_norms_the_blocks_start_as_their_shortcuts(backbone: Backbone) -> None:
    network = backbone.build(COLOUR, 10)
    last = [
        m.weight
        for key, m in network.named_modules()
        if key.endswith("conv2") and isinstance(m, nn.Conv2d)
    ]
    assert len(last) == (9 if isinstance(backbone, ResNet20) else 8)
    assert not any(weight.any() for weight in last)


@pytest.mark.parametrize("backbone", [*ALL, FEDFISHER_RESNET], ids=name)
def test_a_gradient_step_reduces_the_loss(backbone: Backbone) -> None:
    network = built(backbone)
    x, y = batch(GREY, 6), torch.arange(6) % 3
    loss = F.cross_entropy(network(x), y)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=1e-3)
        assert F.cross_entropy(network(x), y) < loss


@pytest.mark.parametrize("backbone", ALL, ids=name)
def test_the_input_is_left_alone(backbone: Backbone) -> None:
    x = batch(GREY)
    built(backbone)(x)
    assert torch.equal(x, batch(GREY))


@pytest.mark.parametrize("backbone", [*ALL, FEDFISHER_RESNET], ids=name)
def test_layers_take_backward_hooks(backbone: Backbone) -> None:
    """K-FAC hooks convolutions and linear layers, whose outputs must not be overwritten."""
    network, fired = built(backbone), []
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer in layers:
        layer.register_full_backward_hook(lambda module, inputs, outputs: fired.append(module))
    x = batch(GREY).requires_grad_()
    torch.autograd.grad(network(x).sum(), [x, *network.parameters()])
    assert len(fired) == len(layers)


@pytest.mark.parametrize("backbone", [b for b in ALL if not isinstance(b, MLP)], ids=name)
def test_channels_last_flows_through(backbone: Backbone) -> None:
    network = built(backbone).eval()
    expected = network(batch(GREY)).detach()
    formats: list[bool] = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.GroupNorm | nn.MaxPool2d):
            module.register_forward_hook(
                lambda _, inputs, out: formats.append(
                    out.is_contiguous(memory_format=torch.channels_last)
                )
            )
    network.to(memory_format=torch.channels_last)
    actual = network(batch(GREY).to(memory_format=torch.channels_last))
    assert all(formats) and formats
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backbone", ALL, ids=name)
def test_building_follows_the_seed(backbone: Backbone) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(nn.utils.parameters_to_vector(backbone.build(GREY, 5).parameters()))
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@pytest.mark.parametrize("backbone", ALL, ids=name)
def test_backbones_and_networks_pickle(backbone: Backbone) -> None:
    again = pickle.loads(pickle.dumps(backbone))
    assert name(again) == name(backbone)
    network = built(backbone).eval()
    with torch.inference_mode():
        for twin in (pickle.loads(pickle.dumps(network)), copy.deepcopy(network)):
            assert torch.equal(twin(batch(GREY, 1)), network(batch(GREY, 1)))


@pytest.mark.parametrize("backbone", [b for b in ALL if not isinstance(b, MLP)], ids=name)
@pytest.mark.parametrize(
    "shape", [(12,), (28, 28), (3, 3, 32, 32), (1, 3, 40), (0, 32, 32)], ids=name
)
def test_shapes_that_do_not_fit(backbone: Backbone, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        FlsuiteError, match=rf"{type(backbone).__name__} takes images.*at least \d+ x \d+.*MLP"
    ):
        backbone.build(shape, 2)


@pytest.mark.parametrize(
    ("backbone", "smallest"),
    [(LeNet5(), 16), (FEDFISHER_CNN, 16), (CNN(), 4), (ResNet20(), 4), (ResNet18(), 8)],
    ids=name,
)
def test_the_smallest_image_fits(backbone: Backbone, smallest: int) -> None:
    shape = (1, smallest, smallest)
    assert backbone.build(shape, 2)(batch(shape)).shape == (4, 2)
    with pytest.raises(FlsuiteError):
        backbone.build((1, smallest, smallest - 1), 2)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="dropout"):
        MLP(dropout=1.0)
    with pytest.raises(FlsuiteError, match="hidden"):
        MLP(hidden=(0,))
    with pytest.raises(FlsuiteError, match="hidden"):
        CNN(hidden=(8, -1))
    with pytest.raises(FlsuiteError, match=r"CNN: channels must be two widths .* got"):
        CNN(channels=(8,))
    with pytest.raises(FlsuiteError, match=r"LeNet5: channels must be two widths"):
        LeNet5(channels=(0, 3))
    with pytest.raises(FlsuiteError, match="hidden"):
        LeNet5(hidden=(0,))
    with pytest.raises(FlsuiteError, match="head"):
        ResNet18(head=(0,))
    with pytest.raises(FlsuiteError, match="ResNet18: kernel must be at least 1"):
        ResNet18(kernel=0)
    with pytest.raises(FlsuiteError, match="at least 11 x 11"):
        ResNet18(kernel=11).build((3, 10, 10), 2)
    with pytest.raises(FlsuiteError, match="width"):
        ResNet20(width=0)
    with pytest.raises(FlsuiteError, match="norm must be one of batch, group, none"):
        make_norm("layer", 16)  # type: ignore[arg-type]
    with pytest.raises(FlsuiteError, match="MLP"):
        MLP().build((0,), 2)


def test_dropout_acts_in_training_only() -> None:
    network = MLP(hidden=(32,), dropout=0.5).build((5,), 3)
    x = batch((5,))
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


def test_mlp_without_hidden_layers_is_linear() -> None:
    assert count(MLP(hidden=()).build((5,), 3)) == 18


def test_network_class_takes_any_channels() -> None:
    network = ResNet20(norm="group", width=8).build((6, 16, 16), 10)
    assert network(batch((6, 16, 16))).shape == (4, 10)
