"""The part of Ray that the engine uses, in this process: workers die and hang on request."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

Fate = Literal["works", "dies", "dies unseen", "hangs", "fails", "is silent"]
"""What a call meets. A worker that dies unseen does not even answer that it is alive."""

Plan = Callable[[int, str, int], Fate]
"""Returns the fate of a call, given the worker, the method and how often it was called before."""


class RayError(Exception):
    """Base of the errors of Ray."""


class RayTaskError(RayError):
    """An error raised by a worker's code."""


@dataclass(eq=False)
class Ref:
    """The promise of a value."""

    value: Any = None
    error: Exception | None = None
    is_ready: bool = False

    def become(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error, self.is_ready = value, error, True


@dataclass(eq=False)
class Handle:
    """A worker with its unanswered calls. It answers when somebody waits."""

    number: int
    worker: Any
    plan: Plan
    calls: deque[tuple[str, tuple[Any, ...], Ref]] = field(default_factory=deque)
    counts: dict[str, int] = field(default_factory=dict)
    is_dead: bool = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(method, args))

    def _call(self, method: str, args: tuple[Any, ...]) -> Ref:
        ref = Ref()
        self.calls.append((method, args, ref))
        if self.is_dead:
            self.die()
        return ref

    def die(self) -> None:
        self.is_dead = True
        while self.calls:
            self.calls.popleft()[2].become(error=RayError("The actor died.\nIt was killed. Sorry"))

    def answer_one(self) -> None:
        """Answer the oldest call, as the plan has it."""
        if not self.calls:
            return
        method, args, ref = self.calls[0]
        if method == "alive" and self._fate("work") == "dies unseen":
            self.die()
            return
        fate = "works" if method == "alive" else self._fate(method)
        if fate in ("dies", "dies unseen"):
            self.die()
        elif fate == "fails":
            self.calls.popleft()
            ref.become(error=RayTaskError("a bug"))
        elif fate == "works":
            self.calls.popleft()
            self.counts[method] = self.counts.get(method, 0) + 1
            ref.become(getattr(self.worker, method)(*[_value(arg) for arg in args]))

    def _fate(self, method: str) -> Fate:
        return self.plan(self.number, method, self.counts.get(method, 0))


def _value(arg: Any) -> Any:
    return arg.value if isinstance(arg, Ref) else arg


class SmallRay:
    """Stands in for the module ``ray``.

    Args:
        plan: What the calls meet.
        cpus: Cores of its one node.
        joins: Whether there is a cluster to join.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, plan: Plan, cpus: float = 2, joins: bool = True) -> None:
        self.plan, self.cpus, self.joins = plan, cpus, joins
        self.handles: list[Handle] = []
        self.settings: dict[str, Any] | None = None

    def is_initialized(self) -> bool:
        return self.settings is not None

    def init(self, **settings: Any) -> None:
        if not self.joins:
            raise ConnectionError("nobody is there")
        self.settings = settings

    def shutdown(self) -> None:
        self.settings = None

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}]

    def put(self, value: Any) -> Ref:
        return Ref(value, is_ready=True)

    def remote(self, kind: type) -> Any:
        def start(*args: Any) -> Handle:
            self.handles.append(Handle(len(self.handles), kind(*args), self.plan))
            return self.handles[-1]

        return SimpleNamespace(options=lambda **needs: SimpleNamespace(remote=start))

    def kill(self, handle: Handle) -> None:
        handle.die()

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        for handle in self.handles:
            if any(ref.is_ready for ref in refs):
                break
            handle.answer_one()
        ready = [ref for ref in refs if ref.is_ready]
        if not ready:
            time.sleep(min(timeout, 0.05))
        return ready[:1], [ref for ref in refs if ref not in ready[:1]]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value
