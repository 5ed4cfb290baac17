"""Low-rank compression of the matrices of K-FAC and RegMean.

Jhunjhunwala, Wang and Joshi 2024, FedFisher, arXiv:2403.12329, compress the K-FAC factors by a
singular value decomposition with 8 bits. Here the factors stay positive semi-definite.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flsuite.aggregators.base import Aggregator
from flsuite.errors import FlsuiteError, require_whole
from flsuite.exchange.base import Compression, require_finite, require_keys
from flsuite.exchange.tree_eigen import TreeEigen
from flsuite.exchange.tree_quantizer import TreeQuantizer, require_bits
from flsuite.state import State, nbytes

__all__ = ["LowRank"]


class LowRank(Compression):
    """The k largest eigenvalues of every K-FAC factor or Gram matrix, and their eigenvectors.

    A matrix travels as ``U e U^T``: codes for the eigenvectors U, float32 for the eigenvalues e. It
    arrives exactly symmetric and, up to rounding, positive semi-definite. Its error in the spectral
    norm is the largest eigenvalue left out, beside the rounding of U. The state and the other
    extras are rounded as by :class:`~flsuite.exchange.Quantize`.

    The log has ``trace_kept``, the share of the matrices' traces that is sent, and
    ``quantized_to_zero`` of the rest.

    Args:
        bits: Bits per number of the eigenvectors, from 2 to 16.
        rank: Eigenvalues per matrix. A smaller matrix has fewer. Default: as many as fit into the
            bytes of the uncompressed state, which is what FedAvg sends.
        state_bits: Bits per number of all else, from 2 to 16.

    Attributes:
        largest_rank: Eigenvalues of the largest matrix. :meth:`configure` sets it.
    """

    largest_rank: int

    def __init__(self, bits: int = 8, rank: int | None = None, state_bits: int = 16) -> None:
        self.bits = bits
        self.rank = rank
        self.state_bits = state_bits
        require_bits("LowRank", bits=bits, state_bits=state_bits)
        require_whole("LowRank", 1, rank=rank)

    def encode(
        self, state: State, extras: dict[str, Any], base: State, memory: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        require_finite(state=state, extras=extras)
        quantizer, eigen = TreeQuantizer(self.state_bits), TreeEigen(self.largest_rank, self.bits)
        message = {
            "state": quantizer.encode(state, "state"),
            "matrices": eigen.encode({name: extras[name] for name in self._matrices}),
            "others": {name: quantizer.encode(extras[name], name) for name in self._others},
        }
        kept = eigen.trace_kept / eigen.trace if eigen.trace else 1.0
        return message, {**quantizer.metrics(), "trace_kept": kept}

    def decode(self, message: dict[str, Any], base: State) -> tuple[State, dict[str, Any]]:
        require_keys(message, ("state", "matrices", "others"), "message")
        quantizer, eigen = TreeQuantizer(self.state_bits), TreeEigen(self.largest_rank, self.bits)
        state = quantizer.decode(message["state"], self.state_template, "state")
        others = quantizer.decode(message["others"], self._others, "extras")
        matrices = eigen.decode(message["matrices"], self._matrices, "extras")

        extras = {**others, **matrices}
        return state, {name: extras[name] for name in self.extras_template}

    def configure(self, aggregator: Aggregator, state: State, extras: dict[str, Any]) -> None:
        super().configure(aggregator, state, extras)
        algorithm = type(aggregator).__name__
        names = aggregator.psd_extras
        if not names:
            raise FlsuiteError(
                f"LowRank compresses K-FAC factors and Gram matrices; {algorithm} sends none: use "
                "Quantize"
            )

        templates = self.extras_template
        self._matrices = {name: templates[name] for name in names}
        self._others = {name: value for name, value in templates.items() if name not in names}
        self._sides = _sides(self._matrices, f"extras of {algorithm}")
        self.largest_rank = self.rank or self._rank_within_budget()

    def size(self) -> int:
        return self._size(self.largest_rank)

    def _size(self, rank: int) -> int:
        """Return the bytes of a message whose matrices have this rank."""
        quantizer = TreeQuantizer(self.state_bits)
        others = quantizer.size(self.state_template) + quantizer.size(self._others)
        return others + TreeEigen(rank, self.bits).size(self._sides)

    def _rank_within_budget(self) -> int:
        """Return the largest rank whose message is no larger than the uncompressed state."""
        budget = nbytes(self.state_template)
        # One rank for all matrices: what a smaller one does not need is left to the others.
        rank = sum(self._size(rank) <= budget for rank in range(1, max(self._sides) + 1))
        if rank == 0:
            raise FlsuiteError(
                "LowRank: not even one eigenvalue per matrix fits into the bytes of the state; set "
                "trainer.compression.rank"
            )
        return rank


def _sides(tree: Any, name: str) -> list[int]:
    """Return the sides of all matrices of nested data, and refuse anything else in it."""
    if isinstance(tree, Mapping):
        return [side for key, value in tree.items() for side in _sides(value, f"{name}.{key}")]
    if not isinstance(tree, Tensor) or tree.dim() != 2 or tree.shape[0] != tree.shape[1]:
        raise FlsuiteError(f"LowRank: {name} is not a square matrix")
    return [len(tree)]
