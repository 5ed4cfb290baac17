"""Federated algorithms: four parts, and presets of them, one per file."""

from flsuite.aggregators.adaptive import FedAdagrad, FedAdam, FedAvgM, FedYogi
from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.baselines import Centralized, LocalOnly
from flsuite.aggregators.dp_fedavg import DPFedAvg
from flsuite.aggregators.fedasync import FedAsync
from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.fedbuff import FedBuff
from flsuite.aggregators.fedprox import FedProx
from flsuite.aggregators.objectives import ControlVariates, Objective, Proximal
from flsuite.aggregators.part import Part, Server, Statistic
from flsuite.aggregators.rules import CohortRule, LinearRule, Mean, MixedMean, Mixing, Rule
from flsuite.aggregators.rules.cmga import CMGA
from flsuite.aggregators.rules.dense import DENSE
from flsuite.aggregators.rules.fedfisher import FedFisher
from flsuite.aggregators.rules.fisher import FisherAveraging, FisherMerge
from flsuite.aggregators.rules.otfusion import OTFusion
from flsuite.aggregators.rules.pfnm import PFNM
from flsuite.aggregators.rules.regmean import RegMean
from flsuite.aggregators.rules.robust import (
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
from flsuite.aggregators.server_optimizers import AdaptiveAdagrad, AdaptiveAdam, AdaptiveYogi
from flsuite.aggregators.staleness import Constant, Hinge, Hyperbolic, Polynomial, Staleness
from flsuite.aggregators.transforms import ClipUpdates, GaussianMechanism, Transform

__all__ = [
    "CMGA",
    "DENSE",
    "PFNM",
    "SCAFFOLD",
    "AdaptiveAdagrad",
    "AdaptiveAdam",
    "AdaptiveYogi",
    "Aggregator",
    "Bucketing",
    "CenteredClipping",
    "Centralized",
    "ClipUpdates",
    "CohortRule",
    "Constant",
    "ControlVariates",
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
    "GaussianMechanism",
    "GeometricMedian",
    "Hinge",
    "Hyperbolic",
    "Krum",
    "LinearRule",
    "LocalOnly",
    "Mean",
    "MixedMean",
    "Mixing",
    "MultiKrum",
    "NormClipping",
    "OTFusion",
    "Objective",
    "Part",
    "Polynomial",
    "Proximal",
    "RegMean",
    "Rule",
    "Server",
    "Staleness",
    "Statistic",
    "Transform",
    "TrimmedMean",
]
