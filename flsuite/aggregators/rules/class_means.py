"""Arithmetic on class centres, for :mod:`~flsuite.aggregators.rules.cmga`."""

import math

import torch
from torch import Tensor

__all__ = ["directions", "holder_mean", "smallest_distance"]


def holder_mean(total: Tensor, weight: Tensor, otherwise: Tensor) -> Tensor:
    """Return the mean of each class's row over the clients that hold the class.

    Args:
        total: The weighted sum of the clients' rows, float64 ``(classes, latent)``.
        weight: The sum of the clients' weights per class, float64 ``(classes,)``.
        otherwise: The rows of classes that no client holds. It gives the dtype.
    """
    # The clamp avoids 0 / 0 in rows that are replaced.
    mean = total / weight.clamp(min=1e-30)[:, None]
    return torch.where((weight > 0)[:, None], mean.to(otherwise.dtype), otherwise)


def directions(centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit vectors from each centre j to each centre i, and their distances.

    Args:
        centres: ``(classes, latent)``.

    Returns:
        Directions ``(i, j, latent)``, zero from a centre to itself, and distances ``(i, j)``,
        infinite to itself.
    """
    classes, latent = centres.shape
    gap = centres[:, None] - centres[None]
    distance = gap.norm(dim=-1)
    itself = torch.eye(classes, dtype=torch.bool, device=centres.device)

    # Two centres in one place have no direction: each pair gets an axis, and its ends opposite
    # signs.
    index = torch.arange(classes, device=centres.device)
    low, high = torch.minimum(index[:, None], index), torch.maximum(index[:, None], index)
    axes = torch.nn.functional.one_hot((low * classes + high) % latent, latent).to(gap.dtype)
    sign = torch.where(index[:, None] < index, 1.0, -1.0).to(gap.dtype)

    unit = gap / distance[..., None].clamp(min=1e-30)
    direction = torch.where(distance[..., None] > 0, unit, axes * sign[..., None])
    return direction.masked_fill(itself[..., None], 0.0), distance.masked_fill(itself, math.inf)


def smallest_distance(centres: Tensor) -> float:
    """Return the smallest distance between two centres.

    It is infinite for a single centre.
    """
    return float(torch.pdist(centres.float()).min()) if len(centres) > 1 else math.inf
