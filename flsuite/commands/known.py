"""The classes that a config may name, as ``known.json`` describes them, without importing torch.

``python -m tests.docs.generated`` writes the file from the classes.
"""

import json
import sys
from functools import cache
from importlib import import_module
from itertools import chain
from pkgutil import get_data
from typing import Any, NamedTuple

from flsuite.common.errors import path_of
from flsuite.common.moved import moved

TRAINER = "flsuite.trainer.FederatedTrainer"
# Packages whose classes have short names, because the command imports them.
LIBRARIES = ("flsuite.", "lightning.pytorch.", "torch.optim.")


class Argument(NamedTuple):
    """An argument of a class, or a first key.

    Attributes:
        kind: The placeholder for its value, such as ``N`` or ``PATH``.
        text: What it means, and its default.
        bases: The paths of the classes whose objects it takes.
        takes_text: Whether a string may be something other than a class name.
        is_required: Whether a config must have it.
        bounds: The bounds of a number, by their names in a JSON schema.
    """

    kind: str = ""
    text: str = ""
    bases: list[str] = []
    takes_text: bool = True
    is_required: bool = False
    bounds: dict[str, float] = {}


class Class(NamedTuple):
    """A class that a config may name.

    Attributes:
        path: The module that defines it, and its name.
        summary: The first sentence about it.
        arguments: Its arguments, by name.
        bases: The paths of the class and of all that it extends.
        packages: The packages that export it.
        is_abstract: Whether only its subclasses can be created.
        is_open: Whether it takes more arguments than are known.
    """

    path: str
    summary: str
    arguments: dict[str, Argument]
    bases: list[str]
    packages: list[str] = []
    is_abstract: bool = False
    is_open: bool = False

    @property
    def name(self) -> str:
        """Return the short name."""
        return self.path.rpartition(".")[2]


def first_keys(command: str) -> dict[str, Argument]:
    """Return the top-level keys of a subcommand's config and command line."""
    return {name: Argument(*row) for name, row in _file()["commands"][command].items()}


@cache
def classes() -> list[Class]:
    """Return all classes of the file."""
    rows = _file()["classes"]
    found: dict[str, Class] = {}
    for path, (summary, own, *others) in rows.items():
        # An argument is a row, or the path of an earlier class that has the same argument.
        arguments = {
            name: found[row].arguments[name] if isinstance(row, str) else Argument(*row)
            for name, row in own.items()
        }
        found[path] = Class(path, summary, arguments, *others)
    return [*found.values()]


def find(path: str) -> Class | None:
    """Return a class by its full path, by the package that exports it, or by its path in 0.2."""
    path = moved(path)
    package, _, name = path.rpartition(".")
    ours = (c for c in classes() if c.path == path or (c.name == name and package in c.packages))
    return next(ours, None)


def find_short(name: str) -> Class | None:
    """Return a class by its short name, if it can be created and a package exports it."""
    return next((c for c in classes() if c.name == name and c.packages and not c.is_abstract), None)


def key_for(chosen: Class | None) -> str | None:
    """Return the name of an argument that takes a class, or ``None``."""
    of_classes = (pair for c in reversed(classes()) for pair in c.arguments.items())
    arguments = chain(first_keys("fit").items(), of_classes)
    takes = (k for k, a in arguments if chosen and not {*a.bases}.isdisjoint(chosen.bases))
    return next(takes, None)


def subclasses(bases: list[str]) -> dict[str, str]:
    """Return the paths of classes and their subclasses by short name, including loaded ones."""
    known = {c.name: c.path for c in classes() if not {*bases}.isdisjoint(c.bases)}
    places = (base.rpartition(".") for base in bases)
    loaded = (getattr(sys.modules.get(module), name, None) for module, _, name in places)
    todo: list[Any] = [cls for cls in loaded if cls is not None]
    while todo:
        cls = todo.pop()
        if not cls.__name__.startswith("_"):
            known.setdefault(cls.__name__, path_of(cls))
        todo += type.__subclasses__(cls)
    return known


def plugged(bases: list[str]) -> dict[str, str]:
    """Return the paths of the subclasses that plugins have loaded, by short name."""
    found = subclasses(bases).items()
    return {name: path for name, path in found if not path.startswith(LIBRARIES)}


def names_in(module: str, imports: bool = False) -> list[str]:
    """Return the names in a package that exports known classes, or an empty list.

    Args:
        module: Its path.
        imports: Whether to import the module, known or not.
    """
    if not imports:
        return _file()["packages"].get(module, [])
    try:
        return dir(import_module(module))
    except Exception:  # the parser says which
        return []


def is_described(path: str) -> bool:
    """Return whether the installed version of a class is the one that the file describes.

    Other versions of torch have more optimizers and arguments. The other packages are pinned.
    """
    if not path.startswith("torch."):
        return True
    from importlib.metadata import version

    return version("torch").split(".")[:2] == _file()["versions"]["torch"].split(".")[:2]


@cache
def _file() -> dict[str, Any]:
    return json.loads(get_data(__name__, "known.json") or "")
