"""Quantization of updates, and the codes of numbers.

Integer codes of a tensor are symmetric: with B bits, the scale of a tensor x is ``s = max|x| / L``
with ``L = 2^(B-1) - 1``, and its codes are ``round(x / s)``, within ``[-L, L]``. The error is at
most ``s / 2``. A message contains ``max|x|`` instead of s, which can be too small for the dtype of
x.

A tensor without negative values has codes from 0 to L. Without a sign bit, B - 1 bits give the same
values.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
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
from flsuite.common.arguments import Bits, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import mapped, mismatch, mismatch_of_keys, nbytes

_CHUNK = 8 * 2**15  # numbers per chunk, a multiple of 8 so chunks end on a byte
_DTYPES = {8: torch.int8, 16: torch.int16}


def packed_size(count: int, bits: int) -> int:
    """Return the size in bytes of ``count`` packed numbers."""
    return -(-count * bits // 8)


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers of at most 16 bits packed into bytes without gaps."""
    flat = numbers.reshape(-1).astype(">u2")
    chunks = [np.empty(0, np.uint8)]

    # In chunks, because every bit temporarily takes a byte.
    for start in range(0, len(flat), _CHUNK):
        both_bytes = flat[start : start + _CHUNK].view(np.uint8).reshape(-1, 2)
        chunks.append(np.packbits(np.unpackbits(both_bytes, axis=1)[:, 16 - bits :]))
    return np.concatenate(chunks)


def unpack(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Return the first ``count`` numbers of a packed array, as an int32 vector."""
    numbers = np.empty(count, np.int32)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        first = start * bits // 8
        part = packed[first : first + packed_size(size, bits)]

        wide = np.zeros((size, 16), np.uint8)
        wide[:, 16 - bits :] = np.unpackbits(part)[: size * bits].reshape(size, bits)
        numbers[start : start + size] = np.packbits(wide, axis=1).view(">u2")[:, 0]
    return numbers


def _largest_code(bits: int) -> int:
    """Return L, the largest code."""
    return 2 ** (bits - 1) - 1


def quantize(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return the int32 codes of finite values.

    Args:
        values: The tensor.
        largest: The largest absolute values, in a shape that broadcasts: one for the whole tensor,
            or one per column.
        bits: Bits per code.
    """
    levels = _largest_code(bits)
    # In float64, because a tiny float32 divided by L underflows to 0 in float32.
    scale = largest.double() / levels
    codes = torch.round(values.double() / scale).clamp_(-levels, levels)
    return torch.where(scale > 0, codes, 0.0).to(torch.int32)  # avoids 0 / 0 in all-zero columns


def encode_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes as 8-bit or 16-bit integers in their shape, or packed into bytes."""
    if bits in _DTYPES:
        return codes.to(_DTYPES[bits])
    return torch.from_numpy(pack(codes.numpy() + _largest_code(bits), bits))


def decode_codes(encoded: Any, shape: torch.Size, bits: int, name: str) -> Tensor:
    """Return the int32 codes that :func:`encode_codes` encoded.

    Raises:
        ValueError: If their number is wrong, or one is outside ``[-L, L]``.
    """
    levels = _largest_code(bits)
    refuse(mismatch(encoded, empty_codes(shape, bits), f"{name}.codes"))
    if bits in _DTYPES:
        codes = encoded.to(torch.int32)
    else:
        numbers = unpack(encoded.numpy(), shape.numel(), bits)
        codes = torch.from_numpy(numbers - levels).reshape(shape)
    # Two's complement has a number below -L, and the packed form a number above L.
    if bool((codes.abs() > levels).any()):
        raise ValueError(f"{name}.codes has a code outside [-{levels}, {levels}]")
    return codes


def empty_codes(shape: torch.Size, bits: int) -> Tensor:
    """Return a template of the result of :func:`encode_codes`."""
    if bits in _DTYPES:
        return empty(shape, _DTYPES[bits])
    return empty((packed_size(shape.numel(), bits),), torch.uint8)


def narrowed(payload: Payload) -> Payload:
    """Return a payload with its change in float32, like its template.

    Raises:
        ValueError: If a number is not finite in float32. The message names the entry.
    """
    change = {k: v.float() if v.is_floating_point() else v for k, v in payload.change.items()}
    payload = payload._replace(change=change)
    require_finite(payload._asdict())
    return payload


@dataclass(frozen=True)
class Quantize(Transform, Settings):
    """Quantizes every float of the change and of the statistics to ``bits`` bits.

    Take it to send a half or a quarter of the bytes, with 16 or 8 bits per number.

    Each tensor x is rounded to multiples of ``s = max|x| / (2^(bits-1) - 1)``, with an error of at
    most ``s / 2``. Zeros stay zeros. A tensor without negative values, such as a Fisher diagonal,
    needs no sign and takes ``bits - 1``. With 16 bits, a change and a Fisher diagonal together are
    smaller than the model in float32. Integers, such as counters, and buffers are sent unchanged.

    Logged is ``quantized_to_zero/change``, and the same for every statistic: the fraction of its
    nonzero numbers that became zero because they are below ``s / 2``.

    K-FAC factors and Gram matrices are refused, because rounding each number would make them
    indefinite. :class:`~flsuite.aggregators.LowRank` keeps them positive semidefinite.

    Args:
        bits: Bits per number, from 2 to 16.
    """

    bits: Bits = 16

    needs = frozenset({"clients", "rounded matrices"})
    # A second codec would receive codes instead of numbers.
    withholds = {
        **ENCODES,
        "rounded matrices": "has rounded all numbers; set trainer.compression to LowRank",
    }

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        payload, quantizer = narrowed(payload), TreeQuantizer(self.bits)
        change = quantizer.encode(payload.change, "change")
        statistics = {k: quantizer.encode(value, k) for k, value in payload.statistics.items()}
        fit.metrics.update(quantizer.metrics())
        return Payload(change, statistics)

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        decode = TreeQuantizer(self.bits).decode
        change = decode(payload.change, template.change, "change")
        return Payload(change, decode(payload.statistics, template.statistics, "statistics"))

    def template(self, template: Payload) -> Payload:
        if not template.change and not template.statistics:
            raise FlsuiteError("Quantize: clients send nothing; leave it out")
        quantizer = TreeQuantizer(self.bits)
        change = quantizer.template(template.change)
        return Payload(change, quantizer.template(template.statistics))


class TreeCode(ABC):
    """A codec for nested dicts, leaf by leaf. A subclass implements the code of a leaf."""

    def encode(self, tree: Any, part: str) -> Any:
        """Return the packed form of finite nested data.

        Args:
            tree: A tensor, a number, or nested dicts of them.
            part: The name under which its numbers are counted.
        """
        return mapped({part: tree}, partial(self._encode, part=part))[part]

    def decode(self, packed: Any, template: Any, name: str) -> Any:
        """Return the packed data, in the shapes and dtypes of a template.

        Args:
            packed: The return value of :meth:`encode`. It may contain anything.
            template: The original shapes and dtypes.
            name: The name of the data, for errors.

        Raises:
            ValueError: If it does not fit the template.
        """
        if not isinstance(template, Mapping):
            return self._decode(packed, template, name)
        refuse(mismatch_of_keys(packed, template, name))
        return {k: self.decode(packed[k], value, f"{name}.{k}") for k, value in template.items()}

    def template(self, template: Any) -> Any:
        """Return the largest shapes and dtypes of the packed form."""
        return mapped({"": template}, self._template)[""]

    @abstractmethod
    def _encode(self, leaf: Any, part: str) -> Any: ...

    @abstractmethod
    def _decode(self, packed: Any, template: Any, name: str) -> Any: ...

    @abstractmethod
    def _template(self, template: Any) -> Any: ...


class TreeQuantizer(TreeCode):
    """Packs the float tensors of nested dicts, and counts the numbers that become zero.

    Integer tensors and numbers stay unchanged, and so do float tensors that codes would not make
    smaller.

    Args:
        bits: Bits per number.

    Attributes:
        counts: The count of nonzero numbers, per part.
        lost: The count of those whose code is zero, per part.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def _encode(self, tree: Any, part: str) -> Any:
        if not self._is_packed(tree):
            return tree

        largest = tree.abs().max()
        codes = quantize(tree, largest, self.bits)
        count = int(torch.count_nonzero(tree))
        self.counts[part] += count
        self.lost[part] += count - int(torch.count_nonzero(codes))
        if bool((codes < 0).any()):
            return {"largest": largest, "codes": encode_codes(codes, self.bits)}
        magnitudes = torch.from_numpy(pack(codes.numpy(), self.bits - 1))
        return {"largest": largest, "magnitudes": magnitudes}

    def _decode(self, packed: Any, template: Any, name: str) -> Any:
        if not self._is_packed(template):
            refuse(mismatch(packed, template, name))
            require_finite({name: packed})
            return packed

        has_signs = not isinstance(packed, dict) or "codes" in packed
        kind = "codes" if has_signs else "magnitudes"
        refuse(mismatch_of_keys(packed, ("largest", kind), name))
        refuse(mismatch(packed["largest"], empty((), template.dtype), f"{name}.largest"))
        largest = float(packed["largest"])
        if not 0 <= largest < float("inf"):
            raise ValueError(
                f"{name}.largest is {largest}; a finite number of at least 0 is expected"
            )

        if has_signs:
            codes = decode_codes(packed["codes"], template.shape, self.bits, name)
        else:
            count, bits = template.numel(), self.bits - 1
            expected = empty((packed_size(count, bits),), torch.uint8)
            refuse(mismatch(packed["magnitudes"], expected, f"{name}.magnitudes"))
            codes = torch.from_numpy(unpack(packed["magnitudes"].numpy(), count, bits))
        values = codes.double().mul_(largest / _largest_code(self.bits))
        return values.reshape(template.shape).to(template.dtype)

    def _template(self, template: Any) -> Any:
        return self._packed(template) if self._is_packed(template) else template

    def metrics(self) -> dict[str, float]:
        """Return the fraction of nonzero numbers that became zero, per part."""
        return {
            f"quantized_to_zero/{part}": self.lost[part] / count
            for part, count in self.counts.items()
            if count
        }

    def _is_packed(self, leaf: Any) -> bool:
        """Return whether a leaf is packed, which depends only on its shape and dtype."""
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return is_float and nbytes(self._packed(leaf)) < nbytes(leaf)

    def _packed(self, tensor: Tensor) -> dict[str, Tensor]:
        codes = empty_codes(tensor.shape, self.bits)
        return {"largest": empty((), tensor.dtype), "codes": codes}
