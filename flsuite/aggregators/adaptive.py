"""FedAvgM and FedOpt: a server optimizer with the mean change as pseudo-gradient.

FedAvgM: Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification, arXiv:1909.06335, section 4.3. FedAdagrad, FedYogi, FedAdam: Reddi et al.
2021, Adaptive Federated Optimization, arXiv:2003.00295, algorithm 2.

Under an asynchronous schedule, late changes act like momentum: with long delays, lower the momentum
or ``beta1``. The adaptive methods divide by the size of recent changes, so damping that is common
to all changes cancels out of the step: with long delays, lower ``lr``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch.optim import SGD, Optimizer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.server_optimizers import AdaptiveAdagrad, AdaptiveAdam, AdaptiveYogi
from flsuite.common.arguments import BelowOne, PositiveFloat


class FedAvgM(FedAvg):
    """Server momentum, ``v <- momentum * v + D``, ``w <- w + lr * v``.

    Take it if cohorts are small and the curve of FedAvg is noisy.

    Args:
        lr: The server's learning rate. With 1 and momentum 0 this is FedAvg.
        momentum: In [0, 1).
        kwargs: See FedAvg.
    """

    def __init__(self, lr: PositiveFloat = 1.0, momentum: BelowOne = 0.9, **kwargs: Any) -> None:
        self.lr, self.momentum = lr, momentum
        super().__init__(server_optimizer=partial(SGD, lr=lr, momentum=momentum), **kwargs)


class _FedOpt(FedAvg):
    """FedAvg with an adaptive optimizer on the server.

    Args:
        lr: The server's learning rate, eta.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Adaptivity, above 0. A larger value is closer to plain momentum.
        kwargs: See FedAvg.
    """

    _step: ClassVar[Callable[..., Optimizer]]

    def __init__(
        self,
        lr: PositiveFloat = 0.1,
        beta1: BelowOne = 0.9,
        beta2: BelowOne = 0.99,
        tau: PositiveFloat = 1e-3,
        **kwargs: Any,
    ) -> None:
        self.lr, self.beta1, self.beta2, self.tau = lr, beta1, beta2, tau
        step = partial(type(self)._step, lr=lr, beta1=beta1, beta2=beta2, tau=tau)
        super().__init__(server_optimizer=step, **kwargs)


class FedAdam(_FedOpt):
    """:class:`~flsuite.aggregators.AdaptiveAdam` on the server, with a decaying mean of ``D^2``.

    Take it if parameters need different rates on the server, as in models of text.
    """

    _step = AdaptiveAdam


class FedYogi(_FedOpt):
    """:class:`~flsuite.aggregators.AdaptiveYogi` on the server.

    Take it if the effective rate of FedAdam grows too fast.
    """

    _step = AdaptiveYogi


class FedAdagrad(FedAvg):
    """:class:`~flsuite.aggregators.AdaptiveAdagrad` on the server, ``v <- v + D^2``.

    Take it if changes are sparse, as with embeddings.

    Args:
        lr: The server's learning rate, eta.
        beta1: Decay of the first moment, in [0, 1).
        tau: Adaptivity, above 0. A larger value is closer to plain momentum.
        kwargs: See FedAvg.
    """

    def __init__(
        self,
        lr: PositiveFloat = 0.1,
        beta1: BelowOne = 0.0,
        tau: PositiveFloat = 1e-3,
        **kwargs: Any,
    ) -> None:
        self.lr, self.beta1, self.tau = lr, beta1, tau
        step = partial(AdaptiveAdagrad, lr=lr, beta1=beta1, tau=tau)
        super().__init__(server_optimizer=step, **kwargs)
