"""Federated algorithms: four parts, and presets of them, one per file."""

from flsuite.aggregators.adaptive import FedAdagrad, FedAdam, FedAvgM, FedYogi
from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.apfl import APFL
from flsuite.aggregators.baselines import Centralized, LocalOnly
from flsuite.aggregators.ditto import Ditto
from flsuite.aggregators.dp_fedavg import DPFedAvg
from flsuite.aggregators.fedala import FedALA
from flsuite.aggregators.fedasync import FedAsync
from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.fedbuff import FedBuff
from flsuite.aggregators.feddyn import FedDyn
from flsuite.aggregators.fedexp import FedExP
from flsuite.aggregators.fednova import FedNova
from flsuite.aggregators.fedproto import FedProto
from flsuite.aggregators.fedprox import FedProx
from flsuite.aggregators.fedrep import FedBABU, FedRep
from flsuite.aggregators.fedrod import FedRoD
from flsuite.aggregators.ifca import IFCA
from flsuite.aggregators.moon import MOON
from flsuite.aggregators.objectives import ControlVariates, Objective, Proximal
from flsuite.aggregators.part import Part, Server, Statistic
from flsuite.aggregators.partial import FedBN, FedPer, LGFedAvg
from flsuite.aggregators.perfedavg import PerFedAvg
from flsuite.aggregators.pfedme import PFedMe
from flsuite.aggregators.qfedavg import QFedAvg
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
    "APFL",
    "CMGA",
    "DENSE",
    "IFCA",
    "MOON",
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
    "Ditto",
    "FLTrust",
    "FedALA",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedBuff",
    "FedDyn",
    "FedExP",
    "FedFisher",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedYogi",
    "FisherAveraging",
    "FisherMerge",
    "GaussianMechanism",
    "GeometricMedian",
    "Hinge",
    "Hyperbolic",
    "Krum",
    "LGFedAvg",
    "LinearRule",
    "LocalOnly",
    "Mean",
    "MixedMean",
    "Mixing",
    "MultiKrum",
    "NormClipping",
    "OTFusion",
    "Objective",
    "PFedMe",
    "Part",
    "PerFedAvg",
    "Polynomial",
    "Proximal",
    "QFedAvg",
    "RegMean",
    "Rule",
    "Server",
    "Staleness",
    "Statistic",
    "Transform",
    "TrimmedMean",
]
