"""DP-FedAvg: McMahan et al. 2018, algorithm 1, with the clipping of Andrew et al. 2021.

Learning Differentially Private Recurrent Language Models, arXiv:1710.06963. Differentially Private
Learning with Adaptive Clipping, arXiv:1905.03871.
"""

from typing import Any

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.rules.mean import Mean
from flsuite.aggregators.transforms.base import Transform
from flsuite.aggregators.transforms.gaussian import GaussianMechanism
from flsuite.common.arguments import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    Radius,
    SmallProbability,
)


class DPFedAvg(Aggregator):
    """FedAvg with uniform weights and a :class:`~flsuite.aggregators.GaussianMechanism`.

    Take it to hide from all who see the models whether a client took part.

    Args:
        clip: Largest L2 norm of a client's change. With ``quantile``, it is the initial value.
        noise_multiplier: Standard deviation of the noise, in multiples of ``clip``. With 0 there is
            no privacy, and a warning says so.
        target_epsilon: Epsilon after ``trainer.rounds``. It determines the noise multiplier.
        delta: Delta of the guarantee, below one over the number of clients. Default: ``clients **
            -1.1``.
        quantile: Target fraction of clients whose change is not clipped. Default: ``clip`` is
            fixed.
        clip_lr: Learning rate of the adaptive clip.
        count_noise: Standard deviation of the noise on the number of unclipped changes.
        secure_rng: Draw the noise from the operating system. Such a run cannot be reproduced.
        transforms: Transforms of a change before it is clipped.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(
        self,
        clip: Radius = 1.0,
        noise_multiplier: NonNegativeFloat | None = None,
        target_epsilon: PositiveFloat | None = None,
        delta: SmallProbability | None = None,
        quantile: Fraction | None = None,
        clip_lr: PositiveFloat = 0.2,
        count_noise: NonNegativeFloat | None = None,
        secure_rng: bool = False,
        transforms: list[Transform] | None = None,
        **kwargs: Any,
    ) -> None:
        noise = noise_multiplier, target_epsilon, delta
        mechanism = GaussianMechanism(clip, *noise, quantile, clip_lr, count_noise, secure_rng)
        vars(self).update(vars(mechanism), _transforms=transforms or [])
        super().__init__(
            rule=Mean("uniform"), transforms=[*(transforms or ()), mechanism], **kwargs
        )
