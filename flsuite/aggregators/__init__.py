"""How updates become the next global model, one algorithm per file."""

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.baselines import Centralized, LocalOnly
from flsuite.aggregators.cmga import CMGA
from flsuite.aggregators.dense import DENSE
from flsuite.aggregators.dp_fedavg import DPFedAvg
from flsuite.aggregators.fedasync import FedAsync
from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.fedbuff import FedBuff
from flsuite.aggregators.fedfisher import FedFisher
from flsuite.aggregators.fedprox import FedProx
from flsuite.aggregators.fisher import FisherAveraging
from flsuite.aggregators.fisher_merge import FisherMerge
from flsuite.aggregators.otfusion import OTFusion
from flsuite.aggregators.pfnm import PFNM
from flsuite.aggregators.regmean import RegMean
from flsuite.aggregators.robust import (
    Bucketing,
    CenteredClipping,
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
    TrimmedMean,
)
from flsuite.aggregators.scaffold import SCAFFOLD
from flsuite.aggregators.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from flsuite.aggregators.staleness import Constant, Hinge, Hyperbolic, Polynomial, Staleness

__all__ = [
    "CMGA",
    "DENSE",
    "PFNM",
    "SCAFFOLD",
    "Aggregator",
    "Bucketing",
    "CenteredClipping",
    "Centralized",
    "Constant",
    "CoordinateMedian",
    "DPFedAvg",
    "FLTrust",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedFisher",
    "FedProx",
    "FedYogi",
    "FisherAveraging",
    "FisherMerge",
    "GeometricMedian",
    "Hinge",
    "Hyperbolic",
    "Krum",
    "LocalOnly",
    "MultiKrum",
    "NormClipping",
    "OTFusion",
    "Polynomial",
    "RegMean",
    "Staleness",
    "TrimmedMean",
]
