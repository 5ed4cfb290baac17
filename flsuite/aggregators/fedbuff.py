"""FedBuff: Nguyen et al. 2022, algorithm 1.

Federated Learning with Buffered Asynchronous Aggregation, arXiv:2106.06639.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from flsuite.aggregators.changes import MeanChange
from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.aggregators.staleness import (
    Staleness,
    StalenessName,
    require_mixture,
    require_staleness,
    staleness_weight,
)
from flsuite.errors import FlsuiteError, require_at_least, require_one_of
from flsuite.messages import ClientUpdate
from flsuite.state import State

__all__ = ["FedBuff"]

Mode = Literal["delta", "mix"]
Normalize = Literal["buffer", "weights"]


class FedBuff(FedAvg):
    """The server folds in a buffer of updates at a time, each damped by its staleness.

    ``delta`` is the paper's rule, ``w <- w + eta sum q_k s(tau_k) (w_k - base_k)``, where client k
    started from ``base_k``. ``mix`` pulls the global model to the clients' models,
    ``w <- (1 - eta) w + eta sum q_k w_k``, or ``w <- w + eta sum q_k s(tau_k) (w_k - w)`` if a
    staleness is given. The schedule holds the buffer. If all clients started from ``w``, ``delta``
    without damping and with ``eta`` 1 is FedAvg, bit for bit.

    Floating-point buffers follow the same rule, and integer counters take the maximum. In ``delta``
    BatchNorm statistics can overshoot if many clients train at a time: each of them brings the full
    change of the same statistics. ``mix``, or ``trainer.buffers: local``, avoids that.

    The log has the factor of each client's change, or model, as ``weight``.

    Args:
        mode: What an update adds: the client's change (``delta``) or its model (``mix``).
        eta: The server's learning rate, at least 0, and at most 1 in ``mix``. Default: 1 in
            ``delta``, as in FedAvg, and 0.5 in ``mix``.
        staleness: The weight ``s(tau)`` of an update of staleness ``tau``. Default: ``polynomial``
            in ``delta``, as in the paper, and ``constant`` in ``mix``, whose rule has no staleness.
        weighting: Within the buffer, ``uniform`` weights all updates alike, ``q_k = 1 / K``.
            ``samples`` weights them by training samples.
        normalize: With ``buffer``, the ``q_k`` sum to one, as in the paper: a buffer of old updates
            moves the model less. With ``weights``, the ``q_k s(tau_k)`` sum to one: staleness only
            decides how updates share the step.
    """

    accepts_stale: ClassVar[bool] = True

    def __init__(
        self,
        mode: Mode = "delta",
        eta: float | None = None,
        staleness: StalenessName | Staleness | None = None,
        weighting: Weighting = "uniform",
        normalize: Normalize = "buffer",
    ) -> None:
        super().__init__(weighting)
        self.mode = mode
        self.eta = eta
        self.staleness = staleness
        self.normalize = normalize
        self._check_arguments()

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        eta, staleness = self._in_use()
        changes = MeanChange(global_state, self.layout.parameters)
        given: list[tuple[dict[str, float], float]] = []
        for update in updates:
            # A pull to the client's model is a change that is measured from the global state.
            base = update.base if self.mode == "delta" else global_state
            weight, damping = self.weight(update), staleness_weight(staleness, update.staleness)
            changes.add(update.state, base, weight, damping)
            given.append((update.metrics, weight * damping))

        rate = eta * changes.damping if self.normalize == "buffer" else eta
        # After the loop: a share needs the sum over the buffer. It is 0 if no update counts.
        for metrics, weight in given:
            metrics["weight"] = rate * (weight / changes.weight) if changes.weight else 0.0
        return changes.applied(rate)

    def _in_use(self) -> tuple[float, StalenessName | Staleness]:
        """Return eta and the staleness, with the defaults of the mode."""
        is_delta = self.mode == "delta"
        usual: StalenessName = "polynomial" if is_delta else "constant"
        eta = (1.0 if is_delta else 0.5) if self.eta is None else self.eta
        return eta, usual if self.staleness is None else self.staleness

    def _check_arguments(self) -> None:
        require_one_of("FedBuff", get_args(Mode), mode=self.mode)
        require_one_of("FedBuff", get_args(Normalize), normalize=self.normalize)
        require_at_least("FedBuff", 0, eta=self.eta)
        if self.staleness is not None:
            require_staleness("FedBuff", self.staleness)

        # A mixture lies between the old model and the clients' models. A step may be longer.
        if self.mode == "mix":
            eta, staleness = self._in_use()
            if eta > 1:
                raise FlsuiteError(f"FedBuff: eta must be at most 1 in mode 'mix', got {eta}")
            if self.normalize == "buffer":
                require_mixture("FedBuff", staleness, eta=eta)
