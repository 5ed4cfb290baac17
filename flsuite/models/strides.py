"""A workaround for CPU convolutions in which oneDNN writes out of bounds.

For a 1x1 convolution with a stride and fewer than 8 input channels, in channels_last, oneDNN's
backward pass for the weight writes past its workspace on a CPU with AVX2 and without AVX-512
(https://github.com/uxlfoundation/oneDNN/issues/6035). The process crashes or hangs, or the gradient
is wrong. Such a convolution reads only every s-th pixel. The workaround selects these pixels first
and convolves them with stride 1.

The layout of the input does not matter: a 1x1 weight keeps the strides of channels_last even
through ``contiguous()``, and then the convolution converts its input.
"""

from torch import Tensor, nn
from torch.nn import functional as F

_BLOCK = 8  # channels that oneDNN processes at once with AVX2; a smaller number is affected


def slice_strides(model: nn.Module) -> None:
    """Make the affected convolutions of a model use the workaround on a CPU.

    Their classes, hooks and state dict entries are unchanged. On other devices, they compute as
    before. A subclass with its own computation is not changed.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and _is_affected(layer):
            layer._conv_forward = _SlicedConvolution(layer)  # type: ignore[method-assign]


def _is_affected(layer: nn.Conv2d) -> bool:
    is_plain = type(layer)._conv_forward is nn.Conv2d._conv_forward
    has_stride = layer.kernel_size == (1, 1) and max(layer.stride) > 1
    return is_plain and has_stride and layer.in_channels < _BLOCK


class _SlicedConvolution:
    """Replaces the method ``_conv_forward`` of one layer.

    It has no reference to the layer, so a copy of the layer uses its own weight.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        self.stride, self.groups = layer.stride, layer.groups
        self.padding = layer._reversed_padding_repeated_twice
        self.padding_mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if any(self.padding):
            input = F.pad(input, self.padding, self.padding_mode)
        if input.device.type != "cpu":
            return F.conv2d(input, weight, bias, self.stride, groups=self.groups)
        vertical, horizontal = self.stride
        return F.conv2d(input[..., ::vertical, ::horizontal], weight, bias, groups=self.groups)
