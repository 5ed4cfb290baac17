"""Gradient dissimilarity between clients, and its exact decomposition for a classifier of fused inputs.

With g_i the gradient of client i's loss at a model that all clients share, and m the mean over clients,
``Gamma = mean_i ||g_i - m||^2``. Let a fused model's gradient be f_i, that of the same classifier at the plain input o_i,
and r_i = f_i - o_i. Then exactly

    Gamma_fused = Gamma_orig + R + Phi,  R = mean_i ||r_i - mean r||^2,  Phi = 2 mean_i <o_i - mean o, r_i - mean r>

and fusion lowers the dissimilarity when ``R + Phi < 0``, the calibration condition of FusedSpaceFed (Di Cecco et al.
2025). Everything here is done in float64.
"""

import torch
from torch import Tensor

from flsuite.models.protocols import FusedModel

__all__ = [
    "FusedModel",
    "RunningDissimilarity",
    "decompose",
    "gradient_dissimilarity",
    "relative_dissimilarity",
]


def gradient_dissimilarity(gradients: Tensor) -> float:
    """``Gamma`` of stacked gradients ``(clients, d)``."""
    return float(_centred(gradients).square().sum(1).mean())


def relative_dissimilarity(gradients: Tensor) -> float:
    """``Gamma / ||m||^2``, which does not change with the scale of the loss; gradients ``(clients, d)``."""
    return _relative(
        gradient_dissimilarity(gradients), float(gradients.double().mean(0).square().sum())
    )


def decompose(original: Tensor, fused: Tensor) -> dict[str, float]:
    """The decomposition for gradients at the plain and at the fused inputs, both ``(clients, d)``.

    Returns:
        ``gamma_orig``, ``R``, ``Phi``, ``gamma_fused``, each from its own definition, and ``calibrated``: 1 if
        ``R + Phi < 0``, else 0.
    """
    plain, change = _centred(original), _centred(fused.double() - original.double())
    spread, cross = float(change.square().sum(1).mean()), 2 * float((plain * change).sum(1).mean())
    return {
        "gamma_orig": gradient_dissimilarity(original),
        "R": spread,
        "Phi": cross,
        "gamma_fused": gradient_dissimilarity(fused),
        "calibrated": float(spread + cross < 0),
    }


class RunningDissimilarity:
    """The same from gradients that arrive one client at a time: it holds three vectors, whatever the number of clients.

    Means and co-moments are updated by Welford's rule (1962): equal gradients give exactly 0, where the difference of
    a mean square and a squared mean would leave a rounding error.
    """

    def __init__(self) -> None:
        self._gradient, self._plain, self._change = _Moments(), _Moments(), _Moments()
        self._cross = 0.0

    def add(self, gradient: Tensor, plain: Tensor | None = None) -> None:
        """One client.

        Args:
            gradient: ``(d,)``, at the input that the model trains on.
            plain: ``(d,)``, at the plain input, for a fused model: from all clients or from none.
        """
        gradient = gradient.double()
        self._gradient.add(gradient)
        if plain is not None:
            plain = plain.double()
            before, _ = self._plain.add(plain)
            _, after = self._change.add(gradient - plain)
            self._cross += float(before @ after)

    def summary(self) -> dict[str, float]:
        """``gamma`` and ``gamma_relative``; for a fused model also ``gamma_orig``, ``R``, ``Phi`` and ``calibrated``.

        Raises:
            ZeroDivisionError: If no client was added.
        """
        gamma = self._gradient.spread()
        found = {
            "gamma": gamma,
            "gamma_relative": _relative(gamma, float(self._gradient.mean.square().sum())),
        }
        if self._plain.count:
            spread, cross = self._change.spread(), 2 * self._cross / self._plain.count
            found |= {"gamma_orig": self._plain.spread(), "R": spread, "Phi": cross}
            found["calibrated"] = float(spread + cross < 0)
        return found


class _Moments:
    """Mean vector, and sum of squared distances to it."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(1, dtype=torch.float64)
        self.squares = 0.0

    def add(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take in one vector; its distances from the mean before and after."""
        self.count += 1
        before = value - self.mean
        self.mean = self.mean + before / self.count
        after = value - self.mean
        self.squares += float(before @ after)
        return before, after

    def spread(self) -> float:
        return self.squares / self.count


def _centred(gradients: Tensor) -> Tensor:
    gradients = gradients.double()
    return gradients - gradients.mean(0)


def _relative(gamma: float, square: float) -> float:
    if square > 0:
        return gamma / square
    return float("inf") if gamma > 0 else 0.0
