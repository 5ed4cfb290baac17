"""Federated algorithms: four parts, presets of them, compression, masks and attacks."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.aggregators.adaptive import (
        FedAdagrad as FedAdagrad,
        FedAdam as FedAdam,
        FedAvgM as FedAvgM,
        FedYogi as FedYogi,
    )
    from flsuite.aggregators.aggregator import Aggregator as Aggregator
    from flsuite.aggregators.apfl import APFL as APFL
    from flsuite.aggregators.asynchronous import FedAsync as FedAsync, FedBuff as FedBuff
    from flsuite.aggregators.attacks.base import Attack as Attack, Trial as Trial
    from flsuite.aggregators.attacks.batches import (
        LabelFlip as LabelFlip,
        PixelBackdoor as PixelBackdoor,
    )
    from flsuite.aggregators.attacks.updates import (
        ALittleIsEnough as ALittleIsEnough,
        Collusion as Collusion,
        FreeRider as FreeRider,
        GaussianNoise as GaussianNoise,
        InnerProduct as InnerProduct,
        ScaledUpdate as ScaledUpdate,
        SignFlip as SignFlip,
        with_attack as with_attack,
    )
    from flsuite.aggregators.ditto import Ditto as Ditto
    from flsuite.aggregators.dp_fedavg import DPFedAvg as DPFedAvg
    from flsuite.aggregators.exchange.pairwise import PairwiseMasks as PairwiseMasks
    from flsuite.aggregators.exchange.secure import (
        Parties as Parties,
        PartyCost as PartyCost,
        SecureAggregation as SecureAggregation,
        SumReport as SumReport,
    )
    from flsuite.aggregators.fedala import FedALA as FedALA
    from flsuite.aggregators.fedavg import (
        Centralized as Centralized,
        FedAvg as FedAvg,
        FedProx as FedProx,
        LocalOnly as LocalOnly,
    )
    from flsuite.aggregators.feddyn import FedDyn as FedDyn
    from flsuite.aggregators.fedexp import FedExP as FedExP
    from flsuite.aggregators.fednova import FedNova as FedNova
    from flsuite.aggregators.fedproto import FedProto as FedProto
    from flsuite.aggregators.fedrep import FedBABU as FedBABU, FedRep as FedRep
    from flsuite.aggregators.fedrod import FedRoD as FedRoD
    from flsuite.aggregators.ifca import IFCA as IFCA
    from flsuite.aggregators.moon import MOON as MOON
    from flsuite.aggregators.objectives.base import Objective as Objective, Proximal as Proximal
    from flsuite.aggregators.objectives.feature_term import FeatureTerm as FeatureTerm
    from flsuite.aggregators.part import Part as Part, Server as Server, Statistic as Statistic
    from flsuite.aggregators.partial import FedBN as FedBN, FedPer as FedPer, LGFedAvg as LGFedAvg
    from flsuite.aggregators.perfedavg import PerFedAvg as PerFedAvg
    from flsuite.aggregators.pfedme import PFedMe as PFedMe
    from flsuite.aggregators.qfedavg import QFedAvg as QFedAvg
    from flsuite.aggregators.rules.base import (
        CohortRule as CohortRule,
        LinearRule as LinearRule,
        Rule as Rule,
    )
    from flsuite.aggregators.rules.cmga import CMGA as CMGA
    from flsuite.aggregators.rules.dense import DENSE as DENSE
    from flsuite.aggregators.rules.fedfisher import FedFisher as FedFisher
    from flsuite.aggregators.rules.fisher import (
        FisherAveraging as FisherAveraging,
        FisherMerge as FisherMerge,
    )
    from flsuite.aggregators.rules.mean import (
        Mean as Mean,
        MixedMean as MixedMean,
        Mixing as Mixing,
    )
    from flsuite.aggregators.rules.otfusion import OTFusion as OTFusion
    from flsuite.aggregators.rules.pfnm import PFNM as PFNM
    from flsuite.aggregators.rules.regmean import RegMean as RegMean
    from flsuite.aggregators.rules.robust.base import (
        Cohort as Cohort,
        ParameterRule as ParameterRule,
    )
    from flsuite.aggregators.rules.robust.centers import (
        CenteredClipping as CenteredClipping,
        CoordinateMedian as CoordinateMedian,
        GeometricMedian as GeometricMedian,
        NormClipping as NormClipping,
        TrimmedMean as TrimmedMean,
    )
    from flsuite.aggregators.rules.robust.chosen import (
        Bucketing as Bucketing,
        FLTrust as FLTrust,
        Krum as Krum,
        MultiKrum as MultiKrum,
    )
    from flsuite.aggregators.scaffold import (
        SCAFFOLD as SCAFFOLD,
        ControlVariates as ControlVariates,
    )
    from flsuite.aggregators.server_optimizers import (
        AdaptiveAdagrad as AdaptiveAdagrad,
        AdaptiveAdam as AdaptiveAdam,
        AdaptiveYogi as AdaptiveYogi,
    )
    from flsuite.aggregators.staleness import (
        Constant as Constant,
        Hinge as Hinge,
        Hyperbolic as Hyperbolic,
        Polynomial as Polynomial,
        Staleness as Staleness,
    )
    from flsuite.aggregators.transforms.base import (
        ClipUpdates as ClipUpdates,
        FitView as FitView,
        Payload as Payload,
        Transform as Transform,
    )
    from flsuite.aggregators.transforms.gaussian import GaussianMechanism as GaussianMechanism
    from flsuite.aggregators.transforms.low_rank import LowRank as LowRank
    from flsuite.aggregators.transforms.quantize import Quantize as Quantize
    from flsuite.aggregators.transforms.top_k import TopK as TopK


__getattr__, __dir__ = on_first_use(__name__)
