"""Parts of an algorithm that keep state in their attributes are refused."""

import copyreg
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from flsuite import FlsuiteError
from flsuite.aggregators import Aggregator, FeatureTerm, FedAvg, Mean, Objective
from flsuite.common.client import ClientContext
from flsuite.federation import InProcess, Processes, Vectorized
from tests.aggregators.federations import run


class InStart(FeatureTerm):
    """Keeps a number of the last client that has started."""

    def start(self, client: ClientContext, w: Any) -> Any:
        self.share = client.samples / 20
        return w, {}


class InEnd(FeatureTerm):
    """Keeps a number of the last client that has ended."""

    def end(self, client: ClientContext, w: Any, held: Any) -> None:
        self.share = client.samples / 20


class OnItsClass(FeatureTerm):
    """Keeps a number in an attribute of its class."""

    share = 0

    def start(self, client: ClientContext, w: Any) -> Any:
        type(self).share += 1
        return w, {}


@dataclass(frozen=True)
class InADictionary(FeatureTerm):
    """Keeps a number in a dictionary, which stays the same object."""

    share: dict[int, int] = field(default_factory=dict)

    def start(self, client: ClientContext, w: Any) -> Any:
        self.share[client.id] = self.share.get(client.id, 0) + 1
        return w, {}


@dataclass(frozen=True)
class InATensor(FeatureTerm):
    """Keeps a number in a tensor, which stays the same object."""

    share: Tensor = field(default_factory=lambda: torch.zeros(()))

    def start(self, client: ClientContext, w: Any) -> Any:
        self.share.add_(1)
        return w, {}


class Caches:
    """Computes an attribute when it is first read."""

    @cached_property
    def half(self) -> float:
        return 0.5


@dataclass(slots=True)
class Slotted:
    size: float = 0.5


class CachesBesideSlots(Slotted, Caches):
    """Has slots and a cached property."""


@dataclass(frozen=True)
class UsesHelpers(FeatureTerm):
    """Has a teacher, a distribution and a helper that compute what they need once."""

    teacher: nn.Module = field(default_factory=lambda: nn.Sequential(nn.Linear(1, 1)))
    helper: list[Caches] = field(default_factory=lambda: [Caches(), CachesBesideSlots()])
    prior: Categorical = field(default_factory=lambda: Categorical(torch.ones(3)))

    @cached_property
    def own(self) -> float:
        return sum(one.half for one in self.helper) + float(self.prior.logits.sum())

    def start(self, client: ClientContext, w: Any) -> Any:
        self.teacher.eval()
        return w, {"own": torch.tensor(self.own)}


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
def test_what_follows_from_other_attributes_is_no_state(engine: Any) -> None:
    made = run(FedAvg(objective=UsesHelpers()), 2, engine=engine)
    assert made.round == 2


class AtLeastZero:
    """An attribute that is checked where it is set."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.__dict__["share"] if owner is not None else self

    def __set__(self, owner: Any, value: float) -> None:
        owner.__dict__["share"] = max(value, 0.0)


class Helper:
    share = AtLeastZero()

    def __init__(self) -> None:
        self.share = 0.0


class Reduced:
    """Has a lock, without which it is copied."""

    def __init__(self, value: float = 0.0) -> None:
        self.value, self.lock = value, Lock()


copyreg.pickle(Reduced, lambda one: (Reduced, (one.value,)))


@dataclass(frozen=True)
class InHelpers(FeatureTerm):
    """Keeps a number in an object of a class that does something of its own."""

    share: Any = field(default_factory=Helper)

    def start(self, client: ClientContext, w: Any) -> Any:
        name = "share" if isinstance(self.share, Helper) else "value"
        setattr(self.share, name, getattr(self.share, name) + 1)
        return w, {}


@dataclass
class Locked:
    """Has a lock, without which it cannot be copied."""

    value: float = 0.0
    lock: Any = field(default_factory=Lock)


class Counts(defaultdict[str, int]):
    """Makes its entries by a function without a name."""

    value = property(lambda self: self["n"], lambda self, number: self.update(n=number))

    def __init__(self) -> None:
        super().__init__(lambda: 0)


class InASlot(Objective):
    """Keeps a number in a slot."""

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share = 0

    def start(self, client: ClientContext, w: Any) -> Any:
        self.share += 1
        return w, {}


@dataclass(frozen=True)
class HasAGenerator(FeatureTerm):
    generator: torch.Generator = field(default_factory=torch.Generator)

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {}


class DrawsFromIt(HasAGenerator):
    def start(self, client: ClientContext, w: Any) -> Any:
        return w, {"drawn": torch.rand((), generator=self.generator)}


class TrainsItsTeacher(UsesHelpers):
    def start(self, client: ClientContext, w: Any) -> Any:
        with torch.no_grad():
            self.teacher[0].weight.add_(1)
        return w, {}


STATEFUL: list[tuple[Callable[[], Objective], str]] = [
    *((kind, "share") for kind in (InStart, InEnd, OnItsClass, InADictionary, InATensor, InASlot)),
    *(
        (lambda one=one: InHelpers(share=one()), "share")
        for one in (Helper, Reduced, Locked, Counts)
    ),
    (DrawsFromIt, "generator"),
    (TrainsItsTeacher, "teacher"),
]


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
@pytest.mark.parametrize(("make", "name"), STATEFUL)
def test_an_objective_keeps_no_state(make: Callable[[], Objective], name: str, engine: Any) -> None:
    with pytest.raises(FlsuiteError, match=f"has changed its {name} in a fit: all clients"):
        run(FedAvg(objective=make()), 2, engine=engine)


def test_a_generator_is_no_state_before_it_is_used() -> None:
    assert all(run(FedAvg(objective=HasAGenerator()), 2).round == 2 for _ in range(3))


class InConclude(Objective):
    """Keeps the number of its rounds."""

    share = 0

    def conclude(self, server: Any, statistics: Any, count: int) -> None:
        self.share += 1


class InResult(Mean):
    """Keeps the number of its rounds."""

    share = 0

    def result(self, server: Any, sums: Any, count: int) -> Any:
        self.share += 1
        return super().result(server, sums, count)


class InWeight(Mean):
    """Keeps the number of its weights."""

    share = 0

    def weight(self, update: Any) -> float:
        self.share += 1
        return super().weight(update) + self.share


AT_THE_SERVER = r"its share at the server: .* in server.memory"


@pytest.mark.parametrize("engine", [InProcess(), Processes(2)], ids=["one", "two"])
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"objective": InConclude()}, AT_THE_SERVER),
        ({"rule": InResult()}, AT_THE_SERVER),
        ({"rule": InWeight()}, "InWeight has changed its share"),
    ],
)
def test_parts_keep_no_state_at_the_server(parts: dict[str, Any], words: str, engine: Any) -> None:
    with pytest.raises(FlsuiteError, match=words):
        run(Aggregator(**parts), 2, engine=engine)
