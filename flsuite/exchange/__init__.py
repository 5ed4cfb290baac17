"""Compression codecs for client updates, and secure aggregation."""

from flsuite.exchange.low_rank import LowRank
from flsuite.exchange.pairwise import PairwiseMasks
from flsuite.exchange.quantize import Quantize
from flsuite.exchange.secure import Parties, PartyCost, SecureAggregation, SumReport
from flsuite.exchange.top_k import TopK

__all__ = [
    "LowRank",
    "PairwiseMasks",
    "Parties",
    "PartyCost",
    "Quantize",
    "SecureAggregation",
    "SumReport",
    "TopK",
]
