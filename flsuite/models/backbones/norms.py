"""The normalisation of the residual networks."""

from math import gcd
from typing import Literal

from torch import nn

from flsuite.errors import FlsuiteError

__all__ = ["Norm", "make_norm"]

Norm = Literal["batch", "group", "none"]


def make_norm(kind: Norm, channels: int, groups: int = 32) -> nn.Module:
    """A normalisation layer for ``(n, channels, height, width)``, with PyTorch's defaults for epsilon and momentum.

    BatchNorm normalises with the statistics of a client's own batch, which under label skew differ between clients and
    from those of the global model; GroupNorm has no such statistics and nothing to average (Hsieh et al. 2020, The
    Non-IID Data Quagmire of Decentralized Machine Learning).

    Args:
        kind: ``batch``, ``group`` or ``none`` (the identity).
        channels: Number of channels.
        groups: Number of groups of GroupNorm; 32 is the default of Wu & He (2018). Where it does not divide
            ``channels``, their greatest common divisor is taken.

    Raises:
        FlsuiteError: If ``kind`` is none of the three.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(gcd(groups, channels), channels)
    if kind == "none":
        return nn.Identity()
    raise FlsuiteError(f"norm={kind!r} is unknown; choose 'batch', 'group' or 'none'")
