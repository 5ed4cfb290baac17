"""The normalisation of the residual networks."""

from math import gcd
from typing import Literal, get_args

from torch import nn

from flsuite.errors import require_one_of

__all__ = ["Norm", "make_norm"]

Norm = Literal["batch", "group", "none"]


def make_norm(kind: Norm, channels: int, groups: int = 32) -> nn.Module:
    """Return a normalisation layer for ``(n, channels, height, width)``, with PyTorch's defaults.

    BatchNorm normalises by the statistics of a client's batch, which under label skew differ
    between clients and from those of the global model. GroupNorm has no statistics to average:
    Hsieh et al. 2020, The Non-IID Data Quagmire of Decentralized Machine Learning.

    Args:
        kind: ``batch``, ``group`` or ``none`` (the identity).
        channels: Number of channels.
        groups: Groups of GroupNorm. The default is that of Wu and He 2018. Where it does not divide
            ``channels``, it is their greatest common divisor.

    Raises:
        FlsuiteError: If ``kind`` is none of the three.
    """
    require_one_of("make_norm", get_args(Norm), norm=kind)
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(gcd(groups, channels), channels)
    return nn.Identity()
