"""Imports run one way, type annotations included."""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "flsuite"
LAYERS = (  # from the top to the ground floor; a file imports its own layer and those below
    ("commands", "flower", "__main__"),
    ("studies",),
    ("trainer",),
    ("callbacks",),
    ("analysis",),
    ("runs",),
    ("federation", "federation.server"),
    ("federation.schedules",),
    ("federation.engines",),
    ("federation.client",),
    ("aggregators",),
    ("metrics",),
    ("models",),
    ("data",),
    ("common",),
)
FLOOR = {name: floor for floor, names in enumerate(reversed(LAYERS)) for name in names}
AROUND = {"commands", "studies", "flower"}
CORE = (
    FLOOR.keys() - AROUND - {"__main__", "callbacks", "analysis", "federation"}
)  # the rest stands on it
FILES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" or len(path.relative_to(PACKAGE).parts) > 2  # a room's exports
)


def module(path: Path) -> str:
    """Return the name of a file's module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(name: str) -> str:
    """Return the name in LAYERS that a module belongs to."""
    _, first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "federation" and rest else first


def is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


@cache
def imports(path: Path) -> set[str]:
    """Return the modules of flsuite that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if is_module(name) else node.module for name in inner}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("flsuite.")}


def test_a_file_imports_its_own_layer_and_those_below() -> None:
    above = {
        str(path.relative_to(PACKAGE)): names
        for path in FILES
        if (names := {n for n in imports(path) if FLOOR[room(n)] > FLOOR[room(module(path))]})
    }
    assert FILES and not above


def test_a_name_is_imported_from_the_module_that_defines_it() -> None:
    """A room exports names for users. Whoever reads the code sees where each comes from."""
    rooms = {f"flsuite.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    inside = [path for path in FILES if path.name != "__init__.py"]
    used = {module(path): names for path in inside if (names := imports(path) & rooms)}
    # What workers are forked with is imported early.
    assert used.keys() == {"flsuite.commands.cells"}, used


def test_the_core_stands_without_what_is_around_it() -> None:
    """Callbacks may draw a picture of a run that goes on. Nothing else of the core does."""
    assert {room(module(path)) for path in FILES} >= {*CORE, "callbacks"}
    for path in FILES:
        used = {room(name) for name in imports(path)}
        if room(module(path)) == "callbacks":
            assert not used & AROUND, path
        elif room(module(path)) in CORE:
            assert not used & (AROUND | {"analysis"}), path


def test_no_circles() -> None:
    graph = {module(path): imports(path) for path in FILES}

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in graph.get(todo.pop(), set()) - seen:
                seen.add(name)
                todo.append(name)
        return seen

    assert [name for name in graph if name in reachable(name)] == []


def test_the_root_holds_the_trainer_alone() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "trainer"}


def test_the_picture_of_the_code_has_the_layers_from_the_top() -> None:
    picture = (PACKAGE / "README.md").read_text("utf-8").split("```")[1]
    shown = re.findall(r"(?:^|  )(\w+)(?:/|\.py)(?=\s)", picture, flags=re.M)
    floors = [
        FLOOR[name] for room in shown for name in (room, f"federation.{room}") if name in FLOOR
    ]
    assert floors == sorted(floors, reverse=True) and len(floors) == len(FLOOR) - 1
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(shown)
