"""How updates become the next global model, one algorithm per file."""

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.baselines import Centralized, LocalOnly
from flsuite.aggregators.cmga import CMGA
from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.fedprox import FedProx
from flsuite.aggregators.fisher import FisherAveraging
from flsuite.aggregators.scaffold import SCAFFOLD
from flsuite.aggregators.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = [
    "CMGA",
    "SCAFFOLD",
    "Aggregator",
    "Centralized",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedYogi",
    "FisherAveraging",
    "LocalOnly",
]
