"""Secure sums: what they are, and what they cost."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability
from flsuite.aggregators.transforms.base import Payload
from flsuite.common.state import State, mismatch, mismatch_of_keys, non_finite

WITHHELD: Mapping[Capability, str] = dict.fromkeys(
    ("dense changes", "exact changes", "plain updates"), "encodes them"
)
"""The capabilities that every codec withholds."""


def finite_payload(payload: Payload) -> Payload:
    """Return a payload with its change in float32, like its template.

    Raises:
        ValueError: If a number is not finite in float32. The message names the entry.
    """
    narrow = {k: v.float() if v.is_floating_point() else v for k, v in payload.change.items()}
    require_finite(change=narrow, statistics=payload.statistics)
    return payload._replace(change=narrow)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor, with a shape and a dtype but without values."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def require_finite(**trees: Any) -> None:
    """Refuse nested data with NaN or infinity, which no code can represent.

    Raises:
        ValueError: If there is one. The message names the entry.
    """
    for part, tree in trees.items():
        if name := non_finite(tree, part):
            raise ValueError(
                f"{name} is not finite; lower the learning rate, clip gradients with "
                "trainer.gradient_clip_val, or look for such numbers in the samples"
            )


def require_match(got: Any, template: Any, name: str) -> None:
    """Refuse a part of a message that differs from a template in keys, shapes or dtypes.

    Raises:
        ValueError: If it differs. The message names the entry.
    """
    if fault := mismatch(got, template, name):
        raise ValueError(fault)


def require_keys(got: Any, keys: Iterable[str], name: str) -> None:
    """Refuse a part of a message that is not a dict with these keys.

    Raises:
        ValueError: If it is not. The message names the keys.
    """
    if fault := mismatch_of_keys(got, keys, name):
        raise ValueError(fault)


class TreeCode(ABC):
    """A codec for nested dicts, leaf by leaf. A subclass implements the code of a leaf."""

    def encode(self, tree: Any, part: str) -> Any:
        """Return the packed form of finite nested data.

        Args:
            tree: A tensor, a number, or nested dicts of them.
            part: The name under which its numbers are counted.
        """
        if isinstance(tree, Mapping):
            return {key: self.encode(value, part) for key, value in tree.items()}
        return self._encode(tree, part)

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
        require_keys(packed, template, name)
        return {k: self.decode(packed[k], value, f"{name}.{k}") for k, value in template.items()}

    def template(self, template: Any) -> Any:
        """Return the largest shapes and dtypes of the packed form."""
        if isinstance(template, Mapping):
            return {key: self.template(value) for key, value in template.items()}
        return self._template(template)

    @abstractmethod
    def _encode(self, leaf: Any, part: str) -> Any: ...

    @abstractmethod
    def _decode(self, packed: Any, template: Any, name: str) -> Any: ...

    @abstractmethod
    def _template(self, template: Any) -> Any: ...


@dataclass
class PartyCost:
    """The cost of secure aggregation for one client.

    Attributes:
        seconds: Wall time of the client's part.
        sent: Bytes sent, per phase.
        received: Bytes received, per phase.
    """

    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


@dataclass
class SumReport:
    """The cost of secure aggregation, and the clients whose contributions it includes.

    Attributes:
        survivors: Clients whose contributions are in the sum, ascending.
        dropped: The other clients of the cohort, ascending.
        costs: The cost for each client of the cohort.
        server_seconds: Wall time of the server's part.
    """

    survivors: tuple[int, ...]
    dropped: tuple[int, ...]
    costs: dict[int, PartyCost]
    server_seconds: float


class Parties(ABC):
    """The simulated client devices of a round.

    Attributes:
        clients: The cohort, ascending.
    """

    clients: tuple[int, ...]

    @abstractmethod
    def hold(self, client: int, contribution: State) -> None:
        """Move a trained client's contribution to its device.

        Raises:
            ValueError: If it cannot be summed. The message says why.
        """

    @abstractmethod
    def finish(
        self, arrived: Collection[int], gone: Collection[int] = ()
    ) -> tuple[State, SumReport]:
        """Return the sums in float64, and their cost.

        Args:
            arrived: Clients that came back. Each has called :meth:`hold`.
            gone: Clients that are lost after sending their masked contribution.

        Raises:
            FederationError: If too few clients came back, or remain at the end.
        """


class SecureAggregation(ABC):
    """A protocol that sums the clients' contributions without showing them to the server.

    A subclass stores each of its parameters under its own name.
    """

    @abstractmethod
    def configure(self, template: State, clients: int) -> None:
        """Prepare for contributions, and refuse settings that cannot work.

        Args:
            template: The contribution of any client. Only names and shapes matter.
            clients: Clients per round.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the bytes that a client sends in a full round, after :meth:`configure`.

        This counts the protocol: keys, shares and masked contributions.
        """

    @abstractmethod
    def begin(self, clients: Sequence[int]) -> Parties:
        """Let the clients of a round agree on keys before they train.

        Raises:
            FederationError: If there are too few of them.
        """
