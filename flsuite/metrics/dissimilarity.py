"""Gradient dissimilarity between clients, and its decomposition for a classifier of fused inputs.

Let g_i be the gradient of client i's loss at a shared model, and m the mean over clients:
``Gamma = mean_i ||g_i - m||^2``. Let f_i be a fused model's gradient, o_i the gradient of the same
classifier at the plain input, and r_i = f_i - o_i. Then exactly

    Gamma_fused = Gamma_orig + R + Phi,
    R = mean_i ||r_i - mean r||^2,
    Phi = 2 mean_i <o_i - mean o, r_i - mean r>

Fusion lowers the dissimilarity if ``R + Phi < 0``, the calibration condition of FusedSpaceFed
(Di Cecco et al. 2025). All computations are in float64.
"""

import math

import torch
from torch import Tensor


class RunningDissimilarity:
    """The dissimilarity of gradients that arrive one client at a time.

    It needs the memory of three gradients. Means and co-moments follow Welford (1962), so equal
    gradients give exactly 0. A mean square minus a squared mean would leave a rounding error.
    """

    def __init__(self) -> None:
        self._gradient, self._plain, self._change = _Moments(), _Moments(), _Moments()
        self._cross = 0.0

    def add(self, gradient: Tensor, plain: Tensor | None = None) -> None:
        """Add one client.

        Args:
            gradient: Gradient at the input that the model trains on, ``(d,)``.
            plain: Gradient at the plain input, ``(d,)``, for a fused model. Give it for all clients
                or for none.
        """
        gradient = gradient.double()
        self._gradient.add(gradient)
        if plain is not None:
            plain = plain.double()
            # Welford's co-moment: the product of distances before and after the update of the mean.
            before, _ = self._plain.add(plain)
            _, after = self._change.add(gradient - plain)
            self._cross += float(before @ after)

    def summary(self) -> dict[str, float]:
        """Return ``gamma`` and ``gamma_relative``, and the decomposition for a fused model.

        The decomposition is ``gamma_orig``, ``R``, ``Phi`` and ``calibrated``.

        Raises:
            ZeroDivisionError: If no client was added.
        """
        gamma = self._gradient.spread()
        square = float(self._gradient.mean.square().sum())
        # If the mean is zero, the gradients are all zero, or they cancel.
        undefined = math.inf if gamma > 0 else 0.0
        values = {"gamma": gamma, "gamma_relative": gamma / square if square > 0 else undefined}

        if self._plain.count:
            spread, cross = self._change.spread(), 2 * self._cross / self._plain.count
            values |= {"gamma_orig": self._plain.spread(), "R": spread, "Phi": cross}
            values["calibrated"] = float(spread + cross < 0)

        return values


class _Moments:
    """The mean of vectors, and the sum of their squared distances to it."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(1, dtype=torch.float64)
        self.squares = 0.0

    def add(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add one vector, and return its distances from the mean before and after."""
        self.count += 1
        before = value - self.mean
        self.mean = self.mean + before / self.count
        after = value - self.mean
        self.squares += float(before @ after)
        return before, after

    def spread(self) -> float:
        """Return the mean squared distance to the mean."""
        return self.squares / self.count
