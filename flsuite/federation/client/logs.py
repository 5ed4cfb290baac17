"""What a model logs in its training steps, as Lightning's ``self.log`` would report it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class OtherMeanError(RuntimeError):
    """Raised for a value whose mean over an epoch only Lightning's own loop computes."""


class Logged(NamedTuple):
    """One value that a step logs.

    Attributes:
        name: Its name in the report.
        value: A float32 scalar.
        is_of_step: Whether the last value counts, instead of the mean over the last epoch.
    """

    name: str
    value: Tensor
    is_of_step: bool


def logged_values(
    size: int,
    name: str,
    value: Any,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    batch_size: int | None = None,
    **kwargs: Any,
) -> list[Logged]:
    """Return the values that one call of ``self.log`` in a ``training_step`` reports.

    Args:
        size: Number of samples in the batch.
        name: See :meth:`lightning.pytorch.LightningModule.log`, also for the other arguments.

    Raises:
        OtherMeanError: If the value is no number, or its mean over an epoch is another one.
    """
    is_mean = reduce_fx in ("mean", torch.mean) and batch_size in (None, size)
    if on_epoch and not is_mean:
        raise OtherMeanError(f"a step logs {name} with a reduce_fx or batch_size of its own")
    if logger is False:
        return []
    try:
        number = torch.as_tensor(value).detach().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OtherMeanError(f"a step logs {name}, which is a {type(value).__name__}") from error
    if number.numel() != 1:  # Lightning says so in words
        raise OtherMeanError(f"a step logs {name}, which has several numbers")
    of_step, of_epoch = on_step is not False, bool(on_epoch)
    values = []
    if of_step:
        values.append(Logged(f"{name}_step" if of_epoch else name, number, True))
    if of_epoch:
        values.append(Logged(f"{name}_epoch" if of_step else name, number, False))
    return values


class LoggedNumbers:
    """The numbers that one client's model logs in its fit."""

    def __init__(self) -> None:
        self._last: dict[str, Tensor | float] = {}
        self._sums: dict[str, tuple[Tensor | float, int]] = {}

    def begin_epoch(self) -> None:
        """Begin an epoch. Means are over the last one."""
        self._sums = {}

    def add(self, name: str, value: Tensor | float, size: int, is_of_step: bool) -> None:
        """Add a value of a step on a batch of so many samples, see :class:`Logged`."""
        if is_of_step:
            self._last[name] = value
        else:
            total, seen = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value * size, seen + size

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name."""
        means = {name: float(total) / seen for name, (total, seen) in self._sums.items()}
        return {**{name: float(value) for name, value in self._last.items()}, **means}
