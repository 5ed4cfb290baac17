"""The mean of changes that clients made to different versions of the global model."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flsuite.state import RunningMean, State

__all__ = ["MeanChange", "mixed"]


class MeanChange:
    """The weighted mean of the changes ``w_k - base_k``, applied to the global state ``w``.

    Change k has the weight ``n_k s_k``, and ``s_k`` damps an update that is late. Models arrive one
    at a time. The mean is that of the rebased models ``w_k + (w - base_k)``, in float64. If all
    clients started from ``w``, it is the mean of their models, bit for bit.

    Floating-point buffers change like parameters, with two exceptions. A buffer that is positive in
    ``w`` and in ``w_k``, such as a variance, stays positive in the rebased model. A rate above 1,
    which extrapolates, is 1 for buffers.

    Args:
        global_state: The shared state as it is now. It is not changed.
        parameters: Names of the parameters in it. The other entries are buffers.
    """

    def __init__(self, global_state: State, parameters: Iterable[str]) -> None:
        self._global = global_state
        self._parameters = frozenset(parameters)
        self._models = RunningMean()
        self._undamped = 0.0

    @property
    def weight(self) -> float:
        """Return the sum of the weights, ``sum_k n_k s_k``."""
        return self._models.weight

    @property
    def damping(self) -> float:
        """Return ``sum_k n_k s_k / sum_k n_k``, which is exactly 1 if nothing is damped."""
        return self.weight / self._undamped

    def add(self, model: State, base: State, weight: float, damping: float = 1.0) -> None:
        """Add the change of one client.

        Args:
            model: The client's model.
            base: The model that it started from. An empty one stands for the global state.
            weight: The weight ``n_k``.
            damping: The factor ``s_k``.
        """
        is_fresh = not base or base is self._global
        # In float64, because the mean is rounded once, after it is applied.
        rebased = {
            name: _wide(value) if is_fresh else self._rebased(name, value, base[name])
            for name, value in model.items()
        }
        self._models.add(rebased, weight * damping)
        self._undamped += weight

    def mean(self) -> State:
        """Return the mean of the rebased models, in the dtypes of the global state.

        Raises:
            ZeroDivisionError: If nothing with a weight has been added.
        """
        mean = self._models.mean()
        return {name: mean[name].to(value.dtype) for name, value in self._global.items()}

    def applied(self, rate: float) -> State:
        """Return the global state after ``rate`` times the mean change.

        Integer entries take the maximum of the global state and all models.
        """
        # All updates are too old to count.
        if not self.weight:
            return mixed(self._global, self._global, 0.0)

        mean = self._models.mean()
        return {
            name: _mixed(value, mean[name], rate if name in self._parameters else min(rate, 1.0))
            for name, value in self._global.items()
        }

    def _rebased(self, name: str, value: Tensor, base: Tensor) -> Tensor:
        now = self._global[name]
        # The counter of an old model must not set back that of the global one.
        if not value.is_floating_point():
            return torch.maximum(value, now)

        moved = _wide(value) + (_wide(now) - _wide(base))
        if name in self._parameters:
            return moved
        # Several clients that each lower the same variance would else bring it below zero, and a
        # BatchNorm layer would return NaN.
        smaller = torch.minimum(_wide(value), _wide(now))
        return torch.where((smaller > 0) & (moved <= 0), smaller, moved)


def mixed(old: State, new: State, rate: float) -> State:
    """Return ``(1 - rate) old + rate new``, in the dtypes of ``old``.

    With a rate of 0 or 1, floating-point entries are exactly those of one of the two. Integer
    entries, such as ``num_batches_tracked``, take the maximum at every rate.
    """
    return {name: _mixed(value, new[name], rate) for name, value in old.items()}


def _mixed(old: Tensor, new: Tensor, rate: float) -> Tensor:
    if not old.is_floating_point():
        return torch.maximum(old, new)
    # Copied: even the sign of a zero stays, and nothing aliases.
    if rate in (0.0, 1.0):
        return (new if rate else old).to(old.dtype, copy=True)
    return torch.lerp(_wide(old), _wide(new), rate).to(old.dtype)


def _wide(value: Tensor) -> Tensor:
    """Return a floating-point entry in float64, and any other as it is."""
    return value.double() if value.is_floating_point() else value
