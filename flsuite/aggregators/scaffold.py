"""SCAFFOLD: Karimireddy et al. 2020, algorithm 1.

Stochastic Controlled Averaging for Federated Learning, arXiv:1910.06378.
"""

from functools import partial
from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch.optim import SGD

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.control_variates import Control, ControlVariates
from flsuite.aggregators.rules.base import Weighting
from flsuite.common.arguments import PositiveFloat
from flsuite.common.errors import FlsuiteError


class SCAFFOLD(FedAvg):
    """FedAvg with :class:`~flsuite.aggregators.ControlVariates`.

    The server moves to ``x + lr mean(y_i - x)`` (line 16). Buffers are averaged.

    Args:
        lr: The server's learning rate, ``eta_g``.
        weighting: ``uniform`` is the paper's mean. ``samples`` weights both means by training
            samples. ``c`` is then the weighted mean of the ``c_i`` if all clients take part, and
            close to it otherwise.
        control: See :class:`~flsuite.aggregators.ControlVariates`.
        server_optimizer: Another server step instead of ``lr``.
        kwargs: See FedAvg.
    """

    _weighting = "uniform"

    def __init__(
        self,
        lr: PositiveFloat = 1.0,
        weighting: Weighting = "uniform",
        control: Control = "displacement",
        server_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        self.lr, self.control = lr, control
        if server_optimizer is not None and lr != 1.0:
            raise FlsuiteError("SCAFFOLD: server_optimizer has a learning rate; leave out lr")
        step = None if lr == 1.0 else partial(SGD, lr=lr)
        super().__init__(
            weighting=weighting,
            objective=ControlVariates(control),
            server_optimizer=server_optimizer or step,
            **kwargs,
        )
