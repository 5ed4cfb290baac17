"""Epsilon of differential privacy, computed by the accountant of Google's ``dp-accounting``.

A step is one Gaussian mechanism on a random draw of a round's clients, or of a batch's samples.
Steps compose in Renyi differential privacy (Mironov 2017, arXiv:1702.07476), which is then
converted to epsilon at a given delta. Without the draws, the steps are one Gaussian mechanism,
whose epsilon is known exactly (Balle and Wang 2018, arXiv:1805.06530). The smaller bound holds.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flsuite.common.errors import FlsuiteError, require_extra

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_TENTHS = (1 + tenth / 10 for tenth in range(1, 50))
# Dense, because the bound jumps from one order to the next. From 64 on, each takes 10 to 30 ms.
_ORDERS_OF_FIXED_SIZE = (*_TENTHS, *range(6, 40), *range(40, 66, 3), 80, 96, 128)
_TOLERANCE, _LEAST_NOISE, _MOST_NOISE = 1e-4, 0.05, 1e6


class RandomDraw(NamedTuple):
    """How the clients of a round, or the samples of a batch, are drawn.

    Neighboring datasets differ in one client (or sample) that is added or removed, as in McMahan et
    al. 2018. If a fixed number below all is drawn, one client is replaced by another one (Wang et
    al. 2019, arXiv:1808.00087, theorem 27). The sum then moves by up to twice the clipping norm, so
    the two epsilons are not comparable.

    Attributes:
        population: Number of clients.
        expected: Mean number of drawn clients. Under Poisson sampling, it may be fractional.
        is_poisson: Whether each client is drawn independently. Otherwise exactly ``expected``
            clients are drawn without replacement.
    """

    population: int
    expected: float
    is_poisson: bool

    @property
    def replaces(self) -> bool:
        """Return whether neighboring datasets differ by a replacement."""
        return not self.is_poisson and self.expected < self.population

    @property
    def sensitivity(self) -> float:
        """Return how far neighboring datasets move the sum, in multiples of the clipping norm."""
        return 2.0 if self.replaces else 1.0


class Release(NamedTuple):
    """What one client or one round reveals: Gaussian mechanisms on random draws.

    Attributes:
        sampling: How clients or samples are drawn.
        noise_multiplier: Standard deviation of the noise, in multiples of the largest share of one
            client or sample.
        times: Number of releases.
    """

    sampling: RandomDraw
    noise_multiplier: float
    times: int


def default_delta(clients: int) -> float:
    """Return ``clients ** -1.1``, the choice of McMahan et al. 2018, section 4."""
    return float(clients**-1.1)


def require_small_delta(owner: str, delta: float, number: int, whose: str) -> None:
    """Refuse a delta of one over the number of protected clients or samples, or more.

    Revealing one of them entirely, drawn at random, would meet such a guarantee (Dwork and Roth
    2014, section 2.3).

    Args:
        owner: The feature that has the argument.
        delta: The delta of the guarantee.
        number: Number of clients or samples.
        whose: What is counted, for the message.

    Raises:
        FlsuiteError: If it is too large.
    """
    if delta * number >= 1:
        raise FlsuiteError(
            f"{owner}: delta must be below 1 / {number}, one over {whose}, got {delta:g}: "
            f"revealing one of them would count as private; set it to {default_delta(number):.1g}"
        )


def epsilon(sampling: RandomDraw, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return the epsilon spent by the rounds of a federation, or the steps of a fit.

    Args:
        sampling: How clients or samples are drawn.
        noise_multiplier: Standard deviation of the noise on the sum of the changes or gradients, in
            multiples of the clipping norm. Without noise, epsilon is infinite.
        rounds: Completed rounds or steps, including those with missing clients or none at all.
        delta: The delta of the guarantee, in (0, 1).

    Raises:
        FlsuiteError: If ``dp-accounting`` is not installed.
    """
    return epsilon_of([Release(sampling, noise_multiplier, rounds)], delta)


def epsilon_of(releases: Iterable[Release], delta: float) -> float:
    """Return the epsilon of several kinds of releases together.

    Args:
        releases: All with the same kind of neighboring datasets, see :class:`RandomDraw`.
        delta: The delta of the guarantee, in (0, 1).

    Raises:
        FlsuiteError: If ``dp-accounting`` is not installed.
    """
    made = [release for release in releases if release.times]
    if not made:
        return 0.0
    if not all(release.noise_multiplier for release in made):
        return math.inf

    return max(0.0, min(_epsilon_by_order(made, delta, _orders(made[0].sampling)).values()))


def _epsilon_by_order(
    releases: Sequence[Release], delta: float, orders: Sequence[float]
) -> dict[float, float]:
    """Return the bound on epsilon of each order. Infinity stands for the bound without draws."""
    with kept_logging():
        from dp_accounting import get_epsilon_gaussian
        from dp_accounting.rdp import compute_epsilon

    finite = tuple(order for order in orders if order != math.inf)
    total = sum(r.times * _rdp_of_a_round(r.sampling, r.noise_multiplier, finite) for r in releases)
    bounds: dict[float, float] = {}
    with kept_logging():
        for order, rdp in zip(finite, np.atleast_1d(total), strict=True):
            bounds[order] = float(compute_epsilon([order], [rdp], delta)[0])
    squares = (r.times * (r.sampling.sensitivity / r.noise_multiplier) ** 2 for r in releases)
    with np.errstate(divide="ignore"):
        bounds[math.inf] = float(get_epsilon_gaussian(sum(squares) ** -0.5, delta))
    return bounds


def calibrated_noise(sampling: RandomDraw, target: float, rounds: int, delta: float) -> float:
    """Return the smallest noise multiplier, to 1e-4, whose epsilon does not exceed the target.

    It is never below 0.05, whatever the target.

    Args:
        sampling: How cohorts are drawn.
        target: The epsilon after the last round.
        rounds: Rounds of the run.
        delta: The delta of the guarantee.

    Raises:
        FlsuiteError: If no noise reaches the target, or ``dp-accounting`` is not installed.
    """

    def sufficient(noise_multiplier: float, orders: Sequence[float]) -> list[float]:
        bounds = _epsilon_by_order([Release(sampling, noise_multiplier, rounds)], delta, orders)
        return [order for order, bound in bounds.items() if bound <= target]

    # Below the lower end, the accountant's sums overflow, and epsilon is in the thousands.
    lower, upper, orders = _LEAST_NOISE, 1.0, _orders(sampling)
    while not (met := sufficient(upper, orders)):
        lower, upper = upper, 2 * upper
        if upper > _MOST_NOISE:
            raise FlsuiteError(
                f"target_epsilon {target} at delta {delta:g} over {rounds} rounds is met by no "
                f"noise multiplier up to {_MOST_NOISE:g}; raise target_epsilon"
            )

    while upper - lower > _TOLERANCE:
        # Less noise raises the bound of an order: what fails above fails here as well. Under
        # Poisson sampling, the accountant skips some orders, others for each noise.
        if sampling.replaces:
            orders = tuple(met)
        middle = (lower + upper) / 2
        if enough := sufficient(middle, orders):
            upper, met = middle, enough
        else:
            lower = middle
    return upper


def noise_beside_count(noise_multiplier: float, count_noise: float) -> float:
    """Return the multiplier of the noise on the changes if a noisy count is also published.

    It is ``z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)`` of Andrew et al. 2021, theorem 1: both
    together are then equivalent to one Gaussian mechanism of multiplier ``z``. A count of ``b -
    1/2`` with ``b`` 0 or 1 moves by 1/2 per client, hence the factor 2.

    Args:
        noise_multiplier: The multiplier ``z`` for the accountant.
        count_noise: The standard deviation ``sigma_b`` of the noise on the count, above ``z / 2``.
    """
    if not noise_multiplier:
        return 0.0
    return float((noise_multiplier**-2 - (2 * count_noise) ** -2) ** -0.5)


def _orders(sampling: RandomDraw) -> tuple[float, ...]:
    """Return the orders to try."""
    require_extra("differential privacy", ("dp_accounting",), "privacy")
    if sampling.replaces:
        return _ORDERS_OF_FIXED_SIZE
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    return tuple(DEFAULT_RDP_ORDERS)


@lru_cache(maxsize=64)
def _rdp_of_a_round(
    sampling: RandomDraw, noise_multiplier: float, orders: tuple[float, ...]
) -> np.ndarray:
    """Return the Renyi divergence of one round at each order."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    neighbors = NeighboringRelation.ADD_OR_REMOVE_ONE
    if sampling.replaces:
        neighbors = NeighboringRelation.REPLACE_ONE
    accountant = RdpAccountant(orders, neighbors)
    with kept_logging():
        accountant.compose(_event(sampling, noise_multiplier))

    # For large samples of fixed size, the bound exceeds the one without sampling.
    of_all = accountant.orders * sampling.sensitivity**2 / (2 * noise_multiplier**2)
    return np.minimum(accountant.rdp, of_all)


def _event(sampling: RandomDraw, noise_multiplier: float) -> "DpEvent":
    """Return one round as an event of ``dp-accounting``."""
    from dp_accounting import (
        GaussianDpEvent,
        PoissonSampledDpEvent,
        SampledWithoutReplacementDpEvent,
    )

    if sampling.replaces:
        noise = GaussianDpEvent(noise_multiplier / sampling.sensitivity)
        return SampledWithoutReplacementDpEvent(sampling.population, int(sampling.expected), noise)
    rate = sampling.expected / sampling.population
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier))


@contextmanager
def kept_logging() -> Iterator[None]:
    """Keep the root logger's handlers, and silence warnings of the accountant.

    Libraries for differential privacy add a handler to the root logger on import or with their
    first message. It would duplicate every log line of the federation. The accountant also warns
    about orders that it skips, which is not an error.
    """
    logger, handlers = logging.getLogger("absl"), list(logging.root.handlers)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
        logging.root.handlers[:] = handlers
