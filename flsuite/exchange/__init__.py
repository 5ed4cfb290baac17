"""Updates on their way to the server: compressed, or masked so that only their sum is known."""

from flsuite.exchange.base import Compression
from flsuite.exchange.exchange import Exchange
from flsuite.exchange.low_rank import LowRank
from flsuite.exchange.pairwise import PairwiseMasks
from flsuite.exchange.quantize import Quantize
from flsuite.exchange.secure import Parties, PartyCost, SecureSum, SumReport
from flsuite.exchange.top_k import TopK

__all__ = [
    "Compression",
    "Exchange",
    "LowRank",
    "PairwiseMasks",
    "Parties",
    "PartyCost",
    "Quantize",
    "SecureSum",
    "SumReport",
    "TopK",
]
