"""The definitions of a module, read from its source without importing it."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeGuard

from flsuite.common.moved import moved

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
_CLOSED = (*_DEFINITIONS, *_ASSIGNMENTS, ast.Lambda)  # names bound inside them are not the module's
_DYNAMIC = {"__getattr__", "globals", "exec", "setattr", "__import__"}


class Definition(NamedTuple):
    """A class, a function, or an expression that is assigned to a name.

    Attributes:
        module: The module that contains it. Its names are resolved there.
        node: Its syntax tree.
    """

    module: str
    node: ast.AST

    @property
    def name(self) -> str:
        """Return the name in its source, or an empty text for an expression."""
        return getattr(self.node, "name", "")


class Content(NamedTuple):
    """The names of a module.

    Attributes:
        names: The statements that bind each name.
        is_complete: Whether the module has no other names.
    """

    names: dict[str, list[ast.AST]]
    is_complete: bool


def find_source(module: str) -> Path | None:
    """Return the source file of a module, or ``None`` if none is found."""
    top, *rest = moved(module).split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # as of __main__
        return None
    if spec is None:
        return None
    path = Path(spec.origin or "")
    places = list(spec.submodule_search_locations or ())
    for name in rest:
        files = [Path(p, *end) for p in places for end in ((name, "__init__.py"), (f"{name}.py",))]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            return None
        path, places = found, [str(found.parent)] if found.name == "__init__.py" else []
    return path if path.suffix == ".py" and path.is_file() else None


def exists(module: str) -> bool:
    """Return whether a top-level module can be imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return True


def content_of(module: str) -> Content | None:
    """Return the names of a module, or ``None`` without a readable source."""
    path = find_source(module)
    return None if path is None else _content(path, path.stat().st_mtime_ns)


def lookup(module: str, name: str, depth: int = 9) -> Definition | None:
    """Return the definition of a name in a module, through imports, or ``None`` if unknown."""
    content = content_of(module)
    nodes = content.names.get(name, []) if content else []
    if len(nodes) != 1 or depth == 0:
        return None
    node = nodes[0]
    if isinstance(node, ast.ImportFrom):
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        return lookup(_origin(module, node), original, depth - 1)
    if isinstance(node, _ASSIGNMENTS) and node.value is not None:
        is_name = isinstance(node.value, (ast.Name, ast.Attribute))
        other = resolve(module, node.value, depth - 1) if is_name else None
        return other or Definition(module, node.value)
    return Definition(module, node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None


def resolve(module: str, node: ast.AST, depth: int = 9) -> Definition | None:
    """Return the definition behind an expression, such as ``Rule[T]`` or ``torch.Tensor``."""
    node = node.value if isinstance(node, ast.Subscript) else node
    if isinstance(node, ast.Name):
        return lookup(module, node.id, depth)
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return None
    content = content_of(module)
    for bound in content.names.get(node.value.id, []) if content else []:
        for alias in bound.names if isinstance(bound, (ast.Import, ast.ImportFrom)) else []:
            if (alias.asname or alias.name) == node.value.id:
                prefix = _origin(module, bound) + "." if isinstance(bound, ast.ImportFrom) else ""
                return lookup(prefix + alias.name, node.attr, depth)
    return None


def last_name(node: ast.expr) -> str:
    """Return the last name of ``a.b`` or ``a.b[c]``."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return ast.unparse(node).rpartition(".")[2]


@lru_cache(maxsize=1000)
def _content(path: Path, changed: int) -> Content:
    """Read a file. The time of its last change is part of the cache key."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return Content({}, False)
    names: dict[str, list[ast.AST]] = {}
    is_complete = True
    for node in _statements(tree):
        for name in _bound(node):
            names.setdefault(name, []).append(node)
            is_complete = is_complete and name not in ("*", "__getattr__")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return Content(names, is_complete and not used & _DYNAMIC)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported, also in ``if`` and ``try``."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _CLOSED):
            yield from _statements(child)


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, _ASSIGNMENTS):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in ast.walk(target)]
        return [part.id for part in parts if _is_stored(part)]
    # For example in a loop.
    return [node.id] if _is_stored(node) else []


def imported(module: str, node: ast.AST) -> list[str]:
    """Return the modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [_origin(module, node)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _origin(module: str, node: ast.ImportFrom) -> str:
    """Return the module from which an import takes its names."""
    if not node.level:
        return node.module or ""
    path = find_source(module)
    is_package = path is not None and path.name == "__init__.py"
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
