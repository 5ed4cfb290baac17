"""The limits and options of a run, and all settings that determine its result, as plain data.

A resume refuses a run whose settings differ, and ``flsuite report`` groups runs by them. Describing
an object is the inverse of instantiating a config. It relies on one convention: a class that a
config can name stores each parameter of its ``__init__`` under the same name, or under that name
with a leading underscore. An argument that a class of the user stores otherwise is described as the
config gave it.
"""

import enum
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Trainer

from flsuite.common.arguments import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Settings,
    arguments,
)
from flsuite.common.errors import FlsuiteError, path_of
from flsuite.common.moved import room_of
from flsuite.common.state import raw_bytes
from flsuite.federation.client.callbacks import LRDecay
from flsuite.federation.client.entries import BatchNorm
from flsuite.federation.engines.base import EngineChoice
from flsuite.federation.schedules.base import Clock

# The settings that a FederatedTrainer stores under their own names.
_OF_TRAINER = ("aggregator", "schedule", "compression", "secure_sum", "attack")

WEIGHTS = ("initial_weights", "given_weights")
"""Digests of the weights of a model that had weights before the run.

``initial_weights`` is for models that were built for other data or used in another run.
``given_weights`` is for modules that have their layers from the start. A seed may have drawn them.
"""
OnClientError = Literal["continue", "raise"]
"""What a run does about a client that fails: continue without its update, or end."""
_CONTENT = ", content "
_UNREAD = f"{_CONTENT}not read"
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Budget(Settings):
    """The limits of a run, which ends with the first round that reaches one of them.

    Attributes:
        rounds: Maximum number of rounds.
        max_virtual_seconds: Maximum virtual time.
        max_client_updates: Maximum number of aggregated client updates.
    """

    owner = "trainer"

    rounds: PositiveInt | None = None
    max_virtual_seconds: PositiveFloat | None = None
    max_client_updates: PositiveInt | None = None

    @classmethod
    def of(cls, rounds: int | None, seconds: float | None, updates: int | None) -> "Budget":
        """Return these limits, or 10 rounds if none is given."""
        is_open = rounds is None and seconds is None and updates is None
        return cls(10 if is_open else rounds, seconds, updates)

    @property
    def is_of_time_alone(self) -> bool:
        """Return whether virtual time is the only limit."""
        others = self.rounds, self.max_client_updates
        return self.max_virtual_seconds is not None and others == (None, None)

    def is_spent(self, clock: Clock) -> bool:
        """Return whether a limit is reached."""
        return any(spent >= limit for spent, limit in self._pairs(clock))

    def share(self, clock: Clock) -> float:
        """Return the spent share of the limit closest to its end, in [0, 1]."""
        shares = (spent / limit for spent, limit in self._pairs(clock))
        return min(max(shares, default=0.0), 1.0)

    def __str__(self) -> str:
        limits = {name: limit for name, limit in vars(self).items() if limit is not None}
        return ", ".join(f"trainer.{name} (now {limit})" for name, limit in limits.items())

    def _pairs(self, clock: Clock) -> Iterator[tuple[float, float]]:
        """Yield what is spent of each limit, and the limit."""
        spent = clock.round, clock.seconds, clock.client_updates
        limits = self.rounds, self.max_virtual_seconds, self.max_client_updates
        return ((used, limit) for used, limit in zip(spent, limits, strict=True) if limit)


@dataclass(frozen=True)
class RunOptions(Settings):
    """The plain options of a run, see :class:`~flsuite.FederatedTrainer`."""

    owner = "trainer"

    budget: Budget
    seed: Seed
    evaluate_every: PositiveInt = 1
    monitor: str | None = None
    score_clients: PositiveInt = 100
    adapt_epochs: NonNegativeInt = 0
    batchnorm: BatchNorm = "average"
    keep_optimizers: bool = False
    channels_last: bool = True
    lr_decay: LRDecay | None = None
    max_share: Fraction | None = None
    on_client_error: OnClientError = "continue"
    show: bool = False


def run_settings(
    trainer: Any,
    options: RunOptions,
    model: torch.nn.Module,
    data: Any,
    callbacks: Sequence[Any],
    weights: str | None,
    checkpoint: Path | None,
) -> dict[str, Any]:
    """Return all settings that determine a run's result, as plain data.

    Args:
        trainer: The federated trainer, after the attackers are drawn.
        options: The options of the run.
        model: The client model.
        data: The data module.
        callbacks: The callbacks. Only callbacks that can change the result are described.
        weights: The name in :data:`WEIGHTS` for the digest of the model's weights. ``None`` if the
            run's seed determines them.
        checkpoint: The checkpoint that will be resumed, if any.
    """
    apart = ("show", "budget", "max_share", "on_client_error")
    plain = {k: v for k, v in vars(options).items() if k not in apart}
    client = {
        k: v for k, v in trainer.client_kwargs.items() if k not in ("default_root_dir", "profiler")
    }
    fork = trainer.fork
    return {
        **describe({**vars(options.budget), **plain}),
        "model": describe(model),
        "data": _describe_data(data),
        "client": _describe_chosen(client, Trainer),
        **{name: describe(getattr(trainer, name)) for name in _OF_TRAINER},
        **described_engine(trainer.engine),
        # Only where they are set, so that runs of earlier versions have the same settings.
        **({"without": sorted(trainer.without)} if trainer.without else {}),
        **({} if options.max_share is None else {"max_share": options.max_share}),
        **(fork.settings(checkpoint) if fork else {}),
        # They may be drawn from the seed, so the description of the attack does not contain them.
        "attackers": None if trainer.attack is None else describe(trainer.attack.attackers),
        **_describe_callbacks(callbacks),
        **{name: _weights_digest(model) if name == weights else None for name in WEIGHTS},
    }


def described_engine(engine: EngineChoice) -> dict[str, Any]:
    """Return an engine's class and the arguments that decide the result, if any do."""
    if not engine.decides:
        return {}
    arguments = {name: describe(getattr(engine, name)) for name in engine.decides}
    return {"engine": {"class_path": class_name(type(engine)), "init_args": arguments}}


def class_name(cls: type) -> str:
    """Return the public path of a class.

    For example ``flsuite.models.Classifier``, not the module that defines the class.
    """
    ours = cls.__module__.startswith("flsuite.")
    return f"{room_of(cls.__module__) if ours else cls.__module__}.{cls.__qualname__}"


def describe(obj: Any) -> Any:
    """Return the object as plain data, such as ``{class_path, init_args}``."""
    for kinds, as_plain in _PLAIN:
        if isinstance(obj, kinds):
            return as_plain(obj)
    if inspect.isroutine(obj):
        return _describe_function(obj)
    own = getattr(type(obj), "described", arguments)
    described = describe(own(obj))
    # The content of a file that an object has read determines the result. Its folder does not.
    for name, content in getattr(obj, "content_digests", {}).items():
        file = Path(getattr(obj, name)).name
        described[name] = f"{file}{_UNREAD}" if content is None else f"{file}{_CONTENT}{content}"
    return {"class_path": class_name(type(obj)), "init_args": described}


def with_contents(ours: Any, theirs: Any) -> Any:
    """Return our description, with their digests of files that we have not read.

    Digests are copied only for equal file names, so that other names remain differences.
    """
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {name: with_contents(value, theirs.get(name)) for name, value in ours.items()}
    if not (isinstance(ours, str) and ours.endswith(_UNREAD) and isinstance(theirs, str)):
        return ours
    return theirs if theirs.startswith(ours.removesuffix("not read")) else ours


def _describe_data(datamodule: Any) -> Any:
    """Describe a data module and any module that it wraps, without the folder of the files."""

    def without_place(description: Any) -> Any:
        if not isinstance(description, dict):
            return description
        relevant = {k: v for k, v in description.items() if k not in ("root", "download")}
        return {name: without_place(value) for name, value in relevant.items()}

    return without_place(describe(datamodule))


def _describe_chosen(arguments: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Describe the arguments that are set and differ from the function's defaults."""
    # A resolved config lists all defaults, so an argument equal to its default is not a choice.
    parameters = inspect.signature(function).parameters.values()
    usual = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {
        name: describe(value)
        for name, value in arguments.items()
        if value is not None and (name not in usual or value != usual[name])
    }


def _describe_callbacks(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Describe the callbacks that can change a result.

    A class declares its effect as ``affects``, which is ``weights`` (the default), ``rounds`` or
    ``nothing``.
    """
    return {
        name: [describe(c) for c in callbacks if getattr(c, "affects", "weights") == effect]
        for name, effect in (("callbacks", "weights"), ("stopping", "rounds"))
    }


def _weights_digest(module: torch.nn.Module) -> str:
    """Return a short digest of a module's weights and buffers."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(raw_bytes(value))
    return digest.hexdigest()[:12]


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, our value and their value where two descriptions differ."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            # init_args is a level of the description, not a name from the user.
            name = path if key == "init_args" else f"{path}.{key}" if path else str(key)
            yield from differences(ours.get(key), theirs.get(key), name)
    elif ours != theirs and not _is_of_old_run(ours, theirs):
        yield path.removesuffix(".class_path"), ours, theirs


def _is_of_old_run(ours: Any, theirs: Any) -> bool:
    """Return whether they name the same file, and an older run has not recorded its content."""
    if not (isinstance(ours, str) and isinstance(theirs, str)):
        return False
    (file, *now), (old, *then) = ours.split(_CONTENT), theirs.split(_CONTENT)
    return bool(now) != bool(then) and Path(file).name == Path(old).name


def refuse_mismatch(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    path: Path,
    names: Iterable[str],
    remedy: str = "start a new run",
) -> None:
    """Refuse to continue a run or a checkpoint with other settings. The message names them.

    Args:
        ours: The settings of this run.
        theirs: The settings that were saved.
        path: The run or the checkpoint that they were saved with.
        names: The settings that are compared. One that is missing on one side differs.
        remedy: What to do, other than to use the same settings.
    """
    ours, theirs = ({name: side.get(name) for name in names} for side in (ours, theirs))
    differing = differences(ours, theirs)
    if named := [f"{name} is {now!r} here and {then!r} there" for name, now, then in differing]:
        more = f" (and {len(named) - 3} more)" if len(named) > 3 else ""
        raise FlsuiteError(
            f"these settings do not fit {path}: {'; '.join(named[:3])}{more}; use the run's "
            f"settings, or {remedy}"
        )


def _describe_partial(obj: functools.partial[Any]) -> dict[str, Any]:
    # jsonargparse wraps the class in its own helpers, as leading arguments.
    target = next((argument for argument in obj.args if isinstance(argument, type)), obj.func)
    arguments = _describe_chosen(obj.keywords, target)
    return {"class_path": path_of(target), "init_args": arguments}


# The first that fits counts.
_PLAIN: list[tuple[Any, Callable[[Any], Any]]] = [
    (np.generic, lambda obj: obj.item()),
    (enum.Enum, lambda obj: describe(obj.value)),
    (_SCALARS, lambda obj: obj),
    ((Path, torch.dtype, torch.device), str),
    (torch.nn.Parameter, lambda obj: f"Parameter{tuple(obj.shape)}"),  # drawn from the seed
    ((np.ndarray, torch.Tensor), lambda obj: obj.tolist()),
    (Mapping, lambda obj: {str(key): describe(value) for key, value in obj.items()}),
    ((list, tuple), lambda obj: [describe(value) for value in obj]),
    # Sorted, because the order of a set may differ between runs.
    ((set, frozenset), lambda obj: sorted(map(describe, obj), key=repr)),
    (functools.partial, _describe_partial),
    (type, path_of),
]


@functools.cache
def _source(function: Any) -> str:
    """Read a function's source once, because the file may change while the program runs."""
    try:
        return inspect.getsource(function).strip()
    # The file may have been replaced by one that is not Python.
    except (OSError, TypeError, SyntaxError, TokenError):
        return path_of(function)


def _describe_function(function: Any) -> str:
    """Return a function's source with its outer values, such as lr in ``lambda: SGD(lr=lr)``."""
    try:
        outer = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return _source(function)
    values = {
        name: describe(value)
        for name, value in {**outer.nonlocals, **outer.globals}.items()
        if isinstance(value, (*_SCALARS, np.generic))
    }
    return _source(function) + (f" with {values}" if values else "")
