"""Prints ``flsuite/commands/known.json``, which describes the classes that a config may name."""

import inspect
import json
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.optim.lr_scheduler import LRScheduler

import flsuite.commands.fit  # noqa: F401  (loads all classes with short names)
from flsuite.commands.describing import argument, described, is_known, parameters_of
from flsuite.commands.known import LIBRARIES, TRAINER, Argument, Class
from flsuite.common.errors import path_of
from flsuite.trainer import FederatedTrainer

_FIRST = {
    "config": Argument("FILE", "A config file. Several are read in order, and later keys win."),
    "seed_everything": Argument(
        "N",
        "The run's seed, which determines all random numbers.",
        bounds={"minimum": 0, "maximum": 2**32 - 1},
    ),
    "plugins": Argument(
        "LIST", "Your modules to import first, so that their classes have short names."
    ),
    "run_dir": Argument("PATH", "The run's folder."),
    "print_config": Argument("", "Print the resolved config and exit."),
    "model": Argument(
        "CLASS", "The model that every client trains.", [path_of(LightningModule)], False
    ),
    "data": Argument("CLASS", "The data of all clients.", [path_of(LightningDataModule)], False),
    "trainer": Argument("KEYS", "The federation.", [TRAINER]),
}
_PICTURE = {
    "output": Argument("PATH", "Where to write."),
    "ckpt_path": Argument("PATH", "Ignored; accepted from a config for fit."),
}
_INSIDE = ("lightning.pytorch.cli", "lightning.pytorch.demos")  # no config may name their classes


def text() -> str:
    """Return the file for today's classes."""
    rows: dict[str, Any] = {}
    known: dict[str, Class] = {}
    for cls in sorted(_classes(), key=lambda cls: (len(cls.__mro__), path_of(cls))):
        known[path_of(cls)] = _described(cls)
        rows[path_of(cls)] = _row(cls, known)
    parts = {
        "versions": json.dumps({name: version(name) for name in ("torch", "lightning")}),
        "commands": _lines({c: _first_keys(c) for c in _COMMANDS}),
        "packages": _lines(_names(rows)),
        "classes": _lines(rows),
    }
    return "{\n" + ",\n".join(f'"{name}": {part}' for name, part in parts.items()) + "\n}\n"


_COMMANDS = ("fit", "validate", "test", "predict", "partition", "schedule")


def _classes() -> set[type]:
    """Return what a user may need: trainers, models, data, schedulers, and their arguments."""
    found: set[type] = set()
    todo: list[type] = [
        FederatedTrainer,
        Trainer,
        LightningModule,
        LightningDataModule,
        LRScheduler,
    ]
    while todo:
        cls = todo.pop()
        is_inside = cls.__name__.startswith("_") or cls.__module__.startswith(_INSIDE)
        if cls in found or not is_known(cls):
            continue
        found.add(cls)
        todo += type.__subclasses__(cls)
        for one in () if is_inside else parameters_of(cls).values():
            for path in argument(one).bases:
                module, _, name = path.rpartition(".")
                todo.append(vars(sys.modules[module])[name])
    return {
        c for c in found if not c.__name__.startswith("_") and not c.__module__.startswith(_INSIDE)
    }


def _described(cls: type) -> Class:
    parts = cls.__module__.split(".")
    above = [import_module(".".join(parts[: count + 1])) for count in range(len(parts))]
    exporting = [m for m in above if vars(m).get("__path__") and getattr(m, cls.__name__, 0) is cls]
    own = {
        name
        for name, one in parameters_of(cls).items()
        if f"{getattr(one.component, '__module__', cls.__module__)}.".startswith(LIBRARIES)
    }
    one = described(cls)
    return one._replace(
        summary=one.summary if _is_ours(cls) else "",
        arguments={
            k: _facts(cls, k, given)._replace(
                # The server gives an optimizer its parameters.
                is_required=given.is_required and _is_ours(cls) and k != "params"
            )
            for k, given in one.arguments.items()
            if k in own
        },
        bases=[path_of(base) for base in cls.__mro__ if is_known(base)],
        packages=[module.__name__ for module in exporting],
        # Not all of these have the metaclass that refuses to create them.
        is_abstract=inspect.isabstract(cls) or any(map(_is_missing, vars(cls).values())),
        is_open=own != one.arguments.keys(),
    )


def _is_ours(cls: Any) -> bool:
    return cls.__module__.startswith("flsuite.")


def _facts(cls: type, name: str, given: Argument) -> Argument:
    """Return an argument without the sentences of other projects, which the help reads there."""
    ours = [base for base in cls.__mro__ if _is_ours(base) and "__init__" in vars(base)]
    described = (parameters_of(base).get(name) for base in ours)
    if any(one.doc and _is_ours(one.parent or cls) for one in described if one):
        return given
    _, default, value = given.text.partition("Default:")
    return given._replace(text=f"{default}{value}" if default else "")


def _is_missing(method: object) -> bool:
    return getattr(method, "__isabstractmethod__", False)


def _row(cls: type, known: dict[str, Class]) -> list[Any]:
    """Return a class as the file has it. For an inherited argument it names the owner."""
    one = known[path_of(cls)]
    arguments: dict[str, Any] = {}
    for name, given in one.arguments.items():
        parent: Any = parameters_of(cls)[name].parent
        owner = path_of(parent) if inspect.isclass(parent) and parent is not cls else ""
        is_same = owner in known and known[owner].arguments.get(name) == given
        arguments[name] = owner if is_same else _short(given)
    return [one.summary, arguments, *one[3:]]


def _short(given: Argument) -> list[Any]:
    """Return an argument without the defaults at its end."""
    row = list(given)
    while row and row[-1] == Argument()[len(row) - 1]:
        row.pop()
    return row


def _first_keys(command: str) -> dict[str, Argument]:
    picture = _PICTURE if command in ("partition", "schedule") else {}
    method = {} if picture else parameters_of(FederatedTrainer, command)
    own = {n: argument(p) for n, p in method.items() if n not in ("model", "datamodule")}
    return _FIRST | picture | own


def _names(rows: dict[str, Any]) -> dict[str, list[str]]:
    """Return what can be called in every package that exports one of the rows."""
    packages = {package: import_module(package) for row in rows.values() for package in row[3]}
    return {
        package: [
            name for name in dir(module) if name[0] != "_" and callable(getattr(module, name))
        ]
        for package, module in sorted(packages.items())
    }


def _lines(content: dict[str, Any]) -> str:
    rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(rows) + "\n}"


if __name__ == "__main__":
    print(text(), end="")
