"""Classes by short name, and the classes that a key takes, read from source."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from flsuite.commands.static.modules import (
    Definition,
    content_of,
    find_source,
    imported,
    last_name,
    lookup,
    resolve,
)
from flsuite.commands.static.signatures import Parameter

_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)
# Packages whose classes have short names, because the command imports them.
_PACKAGES = ("flsuite", "lightning.pytorch", "torch.optim")
_TEXT_BASES = {"str", "int", "float", "Enum", "IntEnum", "StrEnum", "Flag", "Path", "Protocol"}
_HOLDERS = {"Optional", "Union", "list", "List", "tuple", "Sequence", "Iterable"}
_KNOWN_LIBRARIES = {
    *sys.stdlib_module_names,
    *("flsuite", "lightning", "torch", "torchmetrics", "torchvision", "pytorch_lightning"),
    *("numpy", "scipy", "pandas", "sklearn", "matplotlib", "PIL", "yaml", "medmnist", "normflows"),
}


class Kinds(NamedTuple):
    """The kinds of values that a key takes.

    Attributes:
        bases: The classes whose objects it takes.
        takes_text: Whether a text may be something other than a class name.
    """

    bases: tuple[Definition, ...] = ()
    takes_text: bool = False


_ANY = Kinds(takes_text=True)


def kinds_of(parameter: Parameter) -> Kinds:
    """Return the kinds of values that a key takes, from its annotation."""
    if parameter.annotation is None:
        return _ANY
    return _kinds(parameter.module, parameter.annotation, 9)


def subclasses(base: Definition) -> dict[str, str]:
    """Return the modules of a base and its subclasses that have short names, by class name."""
    modules = {base.name: base.module}
    more = dict(modules)
    while more:
        more = {
            name: module
            for name, module, bases in _index()
            if bases & modules.keys() and name not in modules
        }
        modules |= more
    return {k: v for k, v in modules.items() if not k.startswith("_")} | _loaded(base)


def public_subclasses(base: Definition) -> dict[str, str]:
    """Return the :func:`subclasses` that a package exports and that are not abstract."""
    return {name: module for name, module in subclasses(base).items() if _is_public(name, module)}


def find_class(name: str) -> Definition | None:
    """Find a class by its full path, or by its short name if a package exports it."""
    if "." in name:
        module, _, name = name.rpartition(".")
        found = lookup(module, name)
        return found if found and isinstance(found.node, ast.ClassDef) else None
    places = [module for other, module, _ in _index() if other == name and _is_public(name, module)]
    return lookup(places[0], name) if places else None


def class_names() -> list[str]:
    """Return the short names of all classes that are not private."""
    return [name for name, _, _ in _index() if not name.startswith("_")]


def _is_public(name: str, module: str) -> bool:
    found = lookup(module, name)
    if found is None or _is_abstract(found):
        return False
    parts = module.split(".")
    packages = [".".join(parts[:count]) for count in range(1, len(parts))]
    exported = (content_of(package) for package in packages)
    return any(content and name in content.names for content in exported)


def _is_abstract(found: Definition) -> bool:
    body = found.node.body if isinstance(found.node, ast.ClassDef) else []
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return any(ast.unparse(d) == "abstractmethod" for f in functions for d in f.decorator_list)


def _kinds(module: str, node: ast.expr, depth: int) -> Kinds:
    if isinstance(node, ast.Constant) and node.value is None:
        return Kinds()
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _kinds(module, ast.parse(node.value, mode="eval").body, depth)
    if isinstance(node, ast.BinOp):
        return _together(module, [node.left, node.right], depth)
    if isinstance(node, ast.Subscript):
        return _of_subscript(module, node, depth)
    if ast.unparse(node) == "bool":
        return Kinds()
    found = resolve(module, node) if depth else None
    if found is None or isinstance(found.node, ast.FunctionDef):
        return _ANY
    if isinstance(found.node, ast.ClassDef):
        return _ANY if _may_be_text(found) else Kinds((found,))
    return _kinds(found.module, found.node, depth - 1) if isinstance(found.node, ast.expr) else _ANY


def _may_be_text(found: Definition, depth: int = 9) -> bool:
    """Return whether a text may represent an object of a class, such as an enum or a path.

    Protocols count too, because any class with their methods fits.
    """
    if found.module.split(".")[0] in sys.stdlib_module_names or depth == 0:
        return True
    for base in found.node.bases if isinstance(found.node, ast.ClassDef) else ():
        if last_name(base) in _TEXT_BASES:
            return True
        above = resolve(found.module, base)
        is_own = above and above.module.split(".")[0] not in sys.stdlib_module_names
        if above and is_own and _may_be_text(above, depth - 1):
            return True
    return False


def _of_subscript(module: str, node: ast.Subscript, depth: int) -> Kinds:
    name = last_name(node)
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Callable":  # a class whose objects the function returns
        returned = _kinds(module, inner[-1], depth)
        return returned if returned.bases else _ANY
    if name == "Annotated":
        return _kinds(module, inner[0], depth)
    return _together(module, inner, depth) if name in _HOLDERS else _ANY


def _together(module: str, nodes: list[ast.expr], depth: int) -> Kinds:
    every = [_kinds(module, node, depth) for node in nodes]
    bases = tuple(base for kinds in every for base in kinds.bases)
    return Kinds(bases, any(kinds.takes_text for kinds in every))


def may_define(modules: set[str], name: str) -> bool:
    """Return whether a user's modules, or modules that they import, may define a class.

    Known libraries are skipped.
    """
    seen: set[str] = set()
    todo = set(modules)
    while todo:
        module = todo.pop()
        seen.add(module)
        content = content_of(module)
        if content is None or not content.is_complete or name in content.names:
            return True
        more = {m for nodes in content.names.values() for n in nodes for m in imported(module, n)}
        todo |= {m for m in more if m.split(".")[0] not in _KNOWN_LIBRARIES} - seen
    return False


@cache
def _index() -> list[tuple[str, str, frozenset[str]]]:
    """Return the name, the module and the bases of every class of the packages."""
    return [found for package in _PACKAGES for found in _classes(package)]


def _classes(package: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    source = find_source(package)
    if source is None:
        return
    for path in sorted(source.parent.rglob("*.py")):
        if {"demos", "template"} & {*path.parts}:  # examples, which nothing imports
            continue
        inner = path.relative_to(source.parent).with_suffix("").parts
        module = ".".join((package, *(part for part in inner if part != "__init__")))
        for name, bases in _CLASS.findall(path.read_text(encoding="utf-8")):
            yield name, module, frozenset(re.findall(r"\w+", bases))


def _loaded(base: Definition) -> dict[str, str]:
    """Return the subclasses loaded in this process, including a user's own."""
    todo = [getattr(sys.modules.get(base.module), base.name, None)]
    found = {}
    while todo:
        cls = todo.pop()
        if isinstance(cls, type):
            found[cls.__name__] = cls.__module__
            todo += type.__subclasses__(cls)
    return found
