"""Sample-level differential privacy of a statistic: clipped and noised means over samples.

The Gaussian mechanism: Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy,
appendix A.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator

from flsuite.common.arguments import PositiveFloat, Settings, SmallProbability
from flsuite.common.state import flatten_tree, nested_like
from flsuite.data.federated import Batch
from flsuite.metrics.privacy import RandomDraw, Release, epsilon_of

_LEAST, _MOST = -40, 40  # powers of two that a tensor's norm is searched among
_ABOVE = 0.1  # fraction of the samples whose tensors are clipped
_NOISE = 5.0  # standard deviations; a bin with fewer samples counts as empty


@dataclass(frozen=True)
class SampleNoise(Settings):
    """Gaussian noise on a client's mean over its samples, which protects each of them.

    Each sample's share of the mean is measured alone. First, a noisy histogram of the shares' norms
    gives each tensor a bound that about a tenth of the samples exceed. Then each sample's tensors
    are clipped to their bounds, summed, and noise is added. Both steps have the same noise, and
    count as one Gaussian mechanism with ``noise_multiplier / sqrt(2)``. A client with too few
    samples to see their norms through the noise answers with almost nothing.

    Each sample is used independently, with the same probability. Neighboring datasets differ in one
    sample that is added or removed. The number of a client's samples is taken as public.

    Args:
        noise_multiplier: Standard deviation of the noise, in multiples of what one sample adds.
        delta: Delta of the guarantee, below one over the mean number of a client's samples. It
            should be well below one over the largest client's.
    """

    noise_multiplier: PositiveFloat = 1.0
    delta: SmallProbability = 1e-5

    def release(self, samples: int, most: int | None) -> Release:
        """Return what a client reveals with each statistic, for the accountant.

        Args:
            samples: The client's samples.
            most: The expected number that is used, if it is lower.
        """
        expected = float(samples if most is None else min(most, samples))
        draw = RandomDraw(samples, expected, is_poisson=True)
        return Release(draw, self.noise_multiplier / math.sqrt(2), 1)

    def epsilon(self, samples: int, most: int | None) -> float:
        """Return the epsilon of one statistic."""
        return epsilon_of([self.release(samples, most)], self.delta)

    def mean(
        self,
        share: Callable[[Batch], Any],
        batches: Callable[[], Iterator[Batch]],
        samples: int,
        most: int | None,
        generator: Generator,
    ) -> Any:
        """Return the noisy mean over a client's samples, in float32.

        Args:
            share: Measures a batch of one sample. It returns nested tensors, or a tensor.
            batches: Returns a pass over all of the client's samples.
            samples: The client's samples.
            most: The expected number that is used, if it is lower.
            generator: Draws the samples and the noise.
        """
        expected = samples if most is None else min(most, samples)
        used = torch.rand(samples, generator=generator, dtype=torch.float64) * samples < expected

        def shares() -> Iterator[Any]:
            one_by_one = (part for batch in batches() for part in _singles(batch))
            drawn = (one for one, is_used in zip(one_by_one, used, strict=True) if is_used)
            return ({"": share(one)} for one in drawn)  # a share may be a single tensor

        like = {"": share(next(_singles(next(batches()))))}  # for names and shapes, drawn or not
        sums = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in flatten_tree(like).items()}
        bounds = self._bounds(shares(), list(sums), expected, generator)
        for one in shares():
            for name, value in flatten_tree(one).items():
                norm = float(value.double().norm())
                sums[name].add_(value, alpha=min(1.0, bounds[name] / max(norm, 1e-300)))

        # One sample moves all tensors at once, each by up to its bound.
        deviation = self.noise_multiplier * math.sqrt(len(sums))
        for name, total in sums.items():
            noise = torch.randn(total.shape, generator=generator, dtype=torch.float64)
            total.add_(noise, alpha=deviation * bounds[name]).div_(expected)
        return nested_like(like, {name: total.float() for name, total in sums.items()})[""]

    def _bounds(
        self, shares: Iterator[Any], names: Sequence[str], expected: float, generator: Generator
    ) -> dict[str, float]:
        """Return a bound on each tensor's norm from a noisy histogram of all samples' norms."""
        counts = {name: torch.zeros(_MOST - _LEAST + 1).double() for name in names}
        for one in shares:
            for name, value in flatten_tree(one).items():
                power = math.ceil(math.log2(max(float(value.double().norm()), 2.0**_LEAST)))
                counts[name][min(max(power, _LEAST), _MOST) - _LEAST] += 1

        deviation = self.noise_multiplier * math.sqrt(len(counts))
        bounds = {}
        for name, histogram in counts.items():
            noise = torch.randn(len(histogram), generator=generator, dtype=torch.float64)
            noisy = histogram + deviation * noise
            # Most bins are empty. Their noise would add up to a bound far above all norms.
            clear = torch.where(noisy < _NOISE * deviation, 0.0, noisy)
            above = clear.flip(0).cumsum(0).flip(0)
            over = (above > _ABOVE * expected).nonzero()
            highest = int(over.max()) if len(over) else int(clear.argmax())
            bounds[name] = 2.0 ** (_LEAST + highest)
        return bounds


def _singles(batch: Batch) -> Iterator[Batch]:
    """Return the samples of a batch as batches of one."""
    x, y = batch
    return zip(x.split(1), y.split(1), strict=True)
