"""Asynchronous algorithms: FedAsync and FedBuff.

FedAsync: Xie, Koyejo, Gupta 2019, algorithm 1. Asynchronous Federated Optimization,
arXiv:1903.03934. FedBuff: Nguyen et al. 2022, algorithm 1. Federated Learning with Buffered
Asynchronous Aggregation, arXiv:2106.06639.
"""

from typing import Any, Literal

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.rules.base import Weighting
from flsuite.aggregators.rules.mean import Mean, MixedMean, Mixing, Normalize
from flsuite.aggregators.staleness import Staleness, StalenessName
from flsuite.common.arguments import Fraction, NonNegativeFloat, check_init
from flsuite.common.errors import FlsuiteError


class FedAsync(Aggregator):
    """The server mixes each client's model into the global one as soon as it arrives.

    Take it if clients differ much in speed, and the server should wait for none.

    This is the rule :class:`~flsuite.aggregators.Mixing`. Add the objective
    :class:`~flsuite.aggregators.Proximal` for the paper's proximal term.

    Args:
        mixing: The mixing rate, in (0, 1]. Multiplied by the weight of a fresh update, it must be
            at most 1.
        staleness: The weight ``s(tau)`` of an update of staleness ``tau``. Default: the paper's
            polynomial with power 0.5.
        weighting: With ``uniform``, all updates count equally. With ``samples``, the rate per
            update is about ``mixing`` divided by the number of clients.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(
        self,
        mixing: Fraction = 0.5,
        staleness: StalenessName | Staleness = "polynomial",
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        self.mixing, self.staleness, self.weighting = mixing, staleness, weighting
        super().__init__(rule=Mixing(mixing, staleness, weighting), **kwargs)


class FedBuff(Aggregator):
    """The server aggregates a buffer of updates at a time, each damped by its staleness.

    Take it if clients differ in speed, and there are many of them.

    The schedule holds the buffer. If all clients started from the same version, ``delta`` without
    damping and with ``eta`` 1 is FedAvg, bit for bit. In ``delta``, BatchNorm statistics can
    overshoot if many clients train at a time, because each of them contributes the full change of
    the same statistics. ``mix`` or ``trainer.batchnorm: local`` avoids that.

    Args:
        mode: ``delta`` is the paper's rule, the :class:`~flsuite.aggregators.Mean` of the clients'
            changes. ``mix`` moves the global model toward their models, like
            :class:`~flsuite.aggregators.MixedMean`.
        eta: The server's learning rate, at least 0, and at most 1 in ``mix``. Default: 1 in
            ``delta``, as in FedAvg, and 0.5 in ``mix``.
        staleness: The weight ``s(tau)`` of an update of staleness ``tau``. Default: ``polynomial``
            in ``delta``, as in the paper, and ``constant`` in ``mix``, whose rule has no staleness.
        weighting: ``uniform`` weights all updates equally. ``samples`` weights them by training
            samples.
        normalize: See :class:`~flsuite.aggregators.Mean`.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(
        self,
        mode: Literal["delta", "mix"] = "delta",
        eta: NonNegativeFloat | None = None,
        staleness: StalenessName | Staleness | None = None,
        weighting: Weighting = "uniform",
        normalize: Normalize = "buffer",
        **kwargs: Any,
    ) -> None:
        self.mode, self.eta, self.staleness = mode, eta, staleness
        self.weighting, self.normalize = weighting, normalize
        check_init(self)  # before the rule, which reports eta as its rate
        if mode == "mix":
            rate = 0.5 if eta is None else eta
            if rate > 1:
                raise FlsuiteError(f"FedBuff: eta must be at most 1 in mode mix, got {eta}")
            rule: Mean = MixedMean(weighting, staleness or "constant", normalize, rate)
        else:
            rate = 1.0 if eta is None else eta
            rule = Mean(weighting, staleness or "polynomial", normalize, rate)
        super().__init__(rule=rule, **kwargs)
