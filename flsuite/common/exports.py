"""Packages whose names are imported on first use."""

import sys
from collections.abc import Callable
from dis import get_instructions
from functools import cache
from importlib import import_module
from typing import Any

from flsuite.common.errors import likeliest


def on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that imports its names on first use.

    So ``import flsuite.federation`` costs nothing, and a run imports only what it uses. Type
    checkers and editors read the imports, which stand below ``if TYPE_CHECKING:``. Each import
    names the module that defines the name, and exports it (``as``). ``__all__`` lists them.

    Args:
        package: ``__name__`` of the package.
    """

    @cache
    def homes() -> dict[str, str]:
        # Bytecode exists even where the source does not, as in a zip file of ``.pyc`` files.
        loader: Any = getattr(sys.modules[package].__spec__, "loader", None)
        present, modules, module = {*vars(sys.modules[package])}, {}, ""
        for instruction in get_instructions(loader.get_code(package)):
            if instruction.opname == "IMPORT_NAME":
                module = instruction.argval
            elif instruction.opname == "IMPORT_FROM" and instruction.argval not in present:
                modules[instruction.argval] = module
        return modules

    def get(name: str) -> Any:
        if name == "__all__":
            return [*homes()]
        if not name.startswith("__") and name in homes():
            return getattr(import_module(homes()[name]), name)
        near = likeliest(name, homes())
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return get, lambda: sorted({*vars(sys.modules[package]), *homes()})


def import_names(*packages: str) -> None:
    """Import all names that some packages export, so that configs can use their short names."""
    for package in map(import_module, packages):
        for name in package.__all__:
            getattr(package, name)
