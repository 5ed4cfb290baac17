"""Nested positive semi-definite matrices as their largest eigenvalues and the eigenvectors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flsuite.exchange.base import decode_each, empty, require_finite, require_keys, require_match
from flsuite.exchange.codes import decode_codes, empty_codes, encode_codes, quantize

__all__ = ["TreeEigen"]


class TreeEigen:
    """Packs the symmetric matrices of nested dicts, and sums their traces.

    A matrix ``(n, n)`` becomes codes ``(n, k)`` of its eigenvectors U, and k eigenvalues e in
    float32. Every column of U has a scale of its own, so that its largest entry has the largest
    code. The scale is not sent, because the length of the column is known to be one.

    Args:
        rank: The largest k. A smaller matrix has all its eigenvalues.
        bits: Bits per number of U.

    Attributes:
        trace: Sum of all eigenvalues that were packed or left out.
        trace_kept: Sum of those that were packed.
    """

    def __init__(self, rank: int, bits: int) -> None:
        self.rank = rank
        self.bits = bits
        self.trace = 0.0
        self.trace_kept = 0.0

    def encode(self, tree: Any) -> Any:
        """Return the packed form of finite matrices."""
        if isinstance(tree, Mapping):
            return {key: self.encode(value) for key, value in tree.items()}

        # Ascending: the last columns belong to the largest eigenvalues.
        eigenvalues, vectors = torch.linalg.eigh(tree.double())
        eigenvalues.clamp_(min=0.0)  # rounding makes some zeros negative
        count = self._count(tree)
        largest, columns = eigenvalues[-count:], vectors[:, -count:]
        self.trace += float(eigenvalues.sum())
        self.trace_kept += float(largest.sum())

        codes = quantize(columns, columns.abs().amax(0), self.bits)
        return {"vectors": encode_codes(codes, self.bits), "values": largest.float()}

    def decode(self, packed: Any, template: Any, name: str) -> Any:
        """Return the matrices, in the shapes and dtypes of a template.

        Args:
            packed: What :meth:`encode` returned. It may be anything.
            template: The shapes and dtypes that were packed.
            name: The name of the data, for errors.

        Raises:
            ValueError: If it does not fit the template.
        """
        if isinstance(template, Mapping):
            return decode_each(self.decode, packed, template, name)

        count = self._count(template)
        shape = torch.Size((len(template), count))
        require_keys(packed, ("vectors", "values"), name)
        codes = decode_codes(packed["vectors"], shape, self.bits, f"{name}.vectors").double()
        values = packed["values"]
        require_match(values, empty((count,), torch.float32), f"{name}.values")
        require_finite(**{f"{name}.values": values})
        lengths = codes.square().sum(0).sqrt()
        if bool((values < 0).any()) or bool((lengths == 0).any()):
            raise ValueError(f"{name} has a negative eigenvalue, or an eigenvector of zeros")

        roots = codes * (values.double().sqrt() / lengths)
        product = roots @ roots.T
        # Symmetric to the last bit, which the product need not be.
        return ((product + product.T) / 2).to(template.dtype)

    def template(self, template: Any) -> Any:
        """Return the shapes and dtypes of the packed form."""
        if isinstance(template, Mapping):
            return {key: self.template(value) for key, value in template.items()}
        count = self._count(template)
        vectors = empty_codes(torch.Size((len(template), count)), self.bits)
        return {"vectors": vectors, "values": empty((count,), torch.float32)}

    def _count(self, matrix: Tensor) -> int:
        return min(self.rank, len(matrix))
