"""Low-rank compression of the matrices of K-FAC and RegMean.

Jhunjhunwala, Wang and Joshi 2024, FedFisher, arXiv:2403.12329, compress the K-FAC factors by a
singular value decomposition with 8 bits. Here the factors stay positive semi-definite.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.transforms.base import (
    ENCODES,
    FitView,
    Payload,
    Transform,
    empty,
    refuse,
    require_finite,
)
from flsuite.aggregators.transforms.quantize import (
    TreeCode,
    TreeQuantizer,
    decode_codes,
    empty_codes,
    encode_codes,
    narrowed,
    quantize,
)
from flsuite.common.arguments import Bits, PositiveInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import flatten_tree, mismatch, mismatch_of_keys, nbytes


@dataclass(frozen=True)
class LowRank(Transform, Settings):
    """Sends the k largest eigenvalues of every K-FAC factor or Gram matrix, with eigenvectors.

    Take it if the rule sends matrices, as FedFisher's ``kfac`` and RegMean do.

    A matrix is sent as ``U e U^T``: codes for the eigenvectors U, float32 for the eigenvalues e. It
    arrives exactly symmetric and, up to rounding, positive semidefinite. Its error in the spectral
    norm is the largest omitted eigenvalue, plus the rounding of U. The change and the other
    statistics are rounded like in :class:`~flsuite.aggregators.Quantize`.

    Logged are ``trace_kept``, the fraction of the matrices' traces that is sent, and
    ``quantized_to_zero`` of the rest.

    Args:
        bits: Bits per number of the eigenvectors, from 2 to 16.
        rank: Eigenvalues per matrix. A smaller matrix has fewer. Default: as many as fit into the
            bytes of the uncompressed change, which is what FedAvg sends.
        state_bits: Bits per number of all else, from 2 to 16.
    """

    bits: Bits = 8
    rank: PositiveInt | None = None
    state_bits: Bits = 16

    needs = frozenset({"clients", "matrices", "each update"})
    withholds = {**ENCODES, "matrices": "packs them itself; set trainer.compression to Quantize"}

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        payload = narrowed(payload)
        rest, eigen, code_of = self._codes(payload, self.rank_of(payload))
        change = rest.encode(payload.change, "change")
        statistics = {k: code_of[k].encode(value, k) for k, value in payload.statistics.items()}
        kept = eigen.trace_kept / eigen.trace if eigen.trace else 1.0
        fit.metrics.update(rest.metrics(), trace_kept=kept)
        return Payload(change, statistics)

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        rest, _, code_of = self._codes(template, self.rank_of(template))
        change = rest.decode(payload.change, template.change, "change")
        refuse(mismatch_of_keys(payload.statistics, template.statistics, "statistics"))
        statistics = {
            name: code_of[name].decode(payload.statistics[name], value, f"statistics.{name}")
            for name, value in template.statistics.items()
        }
        return template._replace(change=change, statistics=statistics)

    def template(self, template: Payload) -> Payload:
        return self._packed(template, self.rank_of(template))

    def rank_of(self, template: Payload) -> int:
        """Return the number of eigenvalues of the largest matrix.

        Raises:
            FlsuiteError: If one eigenvalue per matrix does not fit into the bytes of the change.
        """
        matrices = flatten_tree({name: template.statistics[name] for name in template.psd})
        for name, matrix in matrices.items():
            if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
                raise FlsuiteError(f"LowRank: the statistic {name} is not a square matrix")
        if self.rank is not None or not matrices:
            return self.rank or 1

        # One rank for all matrices: bytes that a smaller one does not need go to the others.
        rank = bisect_right(
            range(1, max(map(len, matrices.values())) + 1),
            nbytes(template.change),
            key=lambda rank: nbytes(self._packed(template, rank)),
        )
        if rank == 0:
            raise FlsuiteError(
                "LowRank: one eigenvalue per matrix does not fit into the bytes of the change; "
                "set its rank"
            )
        return rank

    def _packed(self, template: Payload, rank: int) -> Payload:
        """Return shapes and dtypes of a message with matrices of this rank."""
        rest, _, code_of = self._codes(template, rank)
        statistics = {k: code_of[k].template(value) for k, value in template.statistics.items()}
        return Payload(rest.template(template.change), statistics)

    def _codes(
        self, like: Payload, rank: int
    ) -> "tuple[TreeQuantizer, _TreeEigen, dict[str, TreeCode]]":
        """Return the code of the change, the code of matrices, and the code of each statistic."""
        rest, eigen = TreeQuantizer(self.state_bits), _TreeEigen(rank, self.bits)
        return rest, eigen, {name: eigen if name in like.psd else rest for name in like.statistics}


class _TreeEigen(TreeCode):
    """Packs the symmetric matrices of nested dicts, and sums their traces.

    A matrix ``(n, n)`` becomes codes ``(n, k)`` of its eigenvectors U, and k float32 eigenvalues e.
    Every column of U has its own scale, so its largest entry has the largest code. The scale is not
    sent, because the columns have unit length.

    Args:
        rank: The largest k. A smaller matrix keeps all its eigenvalues.
        bits: Bits per number of U.

    Attributes:
        trace: Sum of all eigenvalues, packed or omitted.
        trace_kept: Sum of the packed eigenvalues.
    """

    def __init__(self, rank: int, bits: int) -> None:
        self.rank = rank
        self.bits = bits
        self.trace = 0.0
        self.trace_kept = 0.0

    def _encode(self, tree: Any, part: str) -> Any:
        # Ascending: the last columns belong to the largest eigenvalues.
        eigenvalues, vectors = torch.linalg.eigh(tree.double())
        eigenvalues.clamp_(min=0.0)  # rounding makes some zeros negative
        count = self._count(tree)
        largest, columns = eigenvalues[-count:], vectors[:, -count:]
        self.trace += float(eigenvalues.sum())
        self.trace_kept += float(largest.sum())

        codes = quantize(columns, columns.abs().amax(0), self.bits)
        return {"vectors": encode_codes(codes, self.bits), "values": largest.float()}

    def _decode(self, packed: Any, template: Any, name: str) -> Any:
        count = self._count(template)
        shape = torch.Size((len(template), count))
        refuse(mismatch_of_keys(packed, ("vectors", "values"), name))
        codes = decode_codes(packed["vectors"], shape, self.bits, f"{name}.vectors").double()
        values = packed["values"]
        refuse(mismatch(values, empty((count,), torch.float32), f"{name}.values"))
        require_finite({f"{name}.values": values})
        lengths = codes.square().sum(0).sqrt()
        if bool((values < 0).any()) or bool((lengths == 0).any()):
            raise ValueError(f"{name} has a negative eigenvalue, or an eigenvector of zeros")

        roots = codes * (values.double().sqrt() / lengths)
        product = roots @ roots.T
        # Make it exactly symmetric, which the product may not be.
        return ((product + product.T) / 2).to(template.dtype)

    def _template(self, template: Any) -> Any:
        count = self._count(template)
        vectors = empty_codes(torch.Size((len(template), count)), self.bits)
        return {"vectors": vectors, "values": empty((count,), torch.float32)}

    def _count(self, matrix: Tensor) -> int:
        return min(self.rank, len(matrix))
