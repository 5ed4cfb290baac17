"""Federated algorithms: four parts, presets of them, compression, masks and attacks."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.aggregators.adaptive import FedAdagrad, FedAdam, FedAvgM, FedYogi
    from flsuite.aggregators.aggregator import Aggregator
    from flsuite.aggregators.apfl import APFL
    from flsuite.aggregators.asynchronous import FedAsync, FedBuff
    from flsuite.aggregators.attacks.base import Attack, Trial
    from flsuite.aggregators.attacks.batches import LabelFlip, PixelBackdoor
    from flsuite.aggregators.attacks.updates import (
        ALittleIsEnough,
        Collusion,
        FreeRider,
        GaussianNoise,
        InnerProduct,
        ScaledUpdate,
        SignFlip,
        with_attack,
    )
    from flsuite.aggregators.ditto import Ditto
    from flsuite.aggregators.dp_fedavg import DPFedAvg
    from flsuite.aggregators.exchange.pairwise import PairwiseMasks
    from flsuite.aggregators.exchange.secure import Parties, PartyCost, SecureAggregation, SumReport
    from flsuite.aggregators.fedala import FedALA
    from flsuite.aggregators.fedavg import Centralized, FedAvg, FedProx, LocalOnly
    from flsuite.aggregators.feddyn import FedDyn
    from flsuite.aggregators.fedexp import FedExP
    from flsuite.aggregators.fednova import FedNova
    from flsuite.aggregators.fedproto import FedProto
    from flsuite.aggregators.fedrep import FedBABU, FedRep
    from flsuite.aggregators.fedrod import FedRoD
    from flsuite.aggregators.ifca import IFCA
    from flsuite.aggregators.moon import MOON
    from flsuite.aggregators.objectives.base import Objective, Proximal
    from flsuite.aggregators.objectives.feature_term import FeatureTerm
    from flsuite.aggregators.part import Part, Server, Statistic
    from flsuite.aggregators.partial import FedBN, FedPer, LGFedAvg
    from flsuite.aggregators.perfedavg import PerFedAvg
    from flsuite.aggregators.pfedme import PFedMe
    from flsuite.aggregators.qfedavg import QFedAvg
    from flsuite.aggregators.rules.base import CohortRule, LinearRule, Rule
    from flsuite.aggregators.rules.cmga import CMGA
    from flsuite.aggregators.rules.dense import DENSE
    from flsuite.aggregators.rules.fedfisher import FedFisher
    from flsuite.aggregators.rules.fisher import FisherAveraging, FisherMerge
    from flsuite.aggregators.rules.mean import Mean, MixedMean, Mixing
    from flsuite.aggregators.rules.otfusion import OTFusion
    from flsuite.aggregators.rules.pfnm import PFNM
    from flsuite.aggregators.rules.regmean import RegMean
    from flsuite.aggregators.rules.robust.base import Cohort, ParameterRule
    from flsuite.aggregators.rules.robust.centers import (
        CenteredClipping,
        CoordinateMedian,
        GeometricMedian,
        NormClipping,
        TrimmedMean,
    )
    from flsuite.aggregators.rules.robust.chosen import Bucketing, FLTrust, Krum, MultiKrum
    from flsuite.aggregators.scaffold import SCAFFOLD, ControlVariates
    from flsuite.aggregators.server_optimizers import (
        AdaptiveAdagrad,
        AdaptiveAdam,
        AdaptiveYogi,
    )
    from flsuite.aggregators.staleness import Constant, Hinge, Hyperbolic, Polynomial, Staleness
    from flsuite.aggregators.transforms.base import ClipUpdates, FitView, Payload, Transform
    from flsuite.aggregators.transforms.gaussian import GaussianMechanism
    from flsuite.aggregators.transforms.low_rank import LowRank
    from flsuite.aggregators.transforms.quantize import Quantize
    from flsuite.aggregators.transforms.top_k import TopK

__all__ = [
    "APFL",
    "CMGA",
    "DENSE",
    "IFCA",
    "MOON",
    "PFNM",
    "SCAFFOLD",
    "ALittleIsEnough",
    "AdaptiveAdagrad",
    "AdaptiveAdam",
    "AdaptiveYogi",
    "Aggregator",
    "Attack",
    "Bucketing",
    "CenteredClipping",
    "Centralized",
    "ClipUpdates",
    "Cohort",
    "CohortRule",
    "Collusion",
    "Constant",
    "ControlVariates",
    "CoordinateMedian",
    "DPFedAvg",
    "Ditto",
    "FLTrust",
    "FeatureTerm",
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
    "FitView",
    "FreeRider",
    "GaussianMechanism",
    "GaussianNoise",
    "GeometricMedian",
    "Hinge",
    "Hyperbolic",
    "InnerProduct",
    "Krum",
    "LGFedAvg",
    "LabelFlip",
    "LinearRule",
    "LocalOnly",
    "LowRank",
    "Mean",
    "MixedMean",
    "Mixing",
    "MultiKrum",
    "NormClipping",
    "OTFusion",
    "Objective",
    "PFedMe",
    "PairwiseMasks",
    "ParameterRule",
    "Part",
    "Parties",
    "PartyCost",
    "Payload",
    "PerFedAvg",
    "PixelBackdoor",
    "Polynomial",
    "Proximal",
    "QFedAvg",
    "Quantize",
    "RegMean",
    "Rule",
    "ScaledUpdate",
    "SecureAggregation",
    "Server",
    "SignFlip",
    "Staleness",
    "Statistic",
    "SumReport",
    "TopK",
    "Transform",
    "Trial",
    "TrimmedMean",
    "with_attack",
]

__getattr__, __dir__ = on_first_use(__name__)
