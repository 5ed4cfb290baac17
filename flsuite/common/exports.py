"""Packages whose names are imported on first use."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def on_first_use(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that imports its names on first use.

    So ``import flsuite.federation`` costs nothing, and a run imports only what it uses. Type
    checkers and editors read the imports, which stand below ``if TYPE_CHECKING:``. Each import
    names the module that defines the name.

    Args:
        package: ``__name__`` of the package.
        file: Its ``__file__``.
    """

    @cache
    def homes() -> dict[str, str]:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes()[name]), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *homes()})


def import_names(*packages: ModuleType) -> None:
    """Import all names that some packages export, so that configs can use their short names."""
    for package in packages:
        for name in package.__all__:
            getattr(package, name)
