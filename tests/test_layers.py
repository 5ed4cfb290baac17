"""Imports run one way, type annotations included."""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "flsuite"
LAYERS = (  # from the top to the ground floor; a file imports its own layer and those below
    ("commands", "flower", "__main__"),
    ("publish", "studies"),
    ("sweeps",),
    ("trainer",),
    ("callbacks",),
    ("analysis",),
    ("runs",),
    ("server",),
    ("schedules",),
    ("engines",),
    ("client",),
    ("exchange", "attacks"),
    ("aggregators",),
    ("metrics",),
    ("models",),
    ("data",),
    ("lightning_internals",),
    ("messages",),
    ("state",),
    ("arguments", "random", "files", "score_names"),
    ("errors",),
)
FLOOR = {name: floor for floor, names in enumerate(reversed(LAYERS)) for name in names}
AROUND = {"commands", "publish", "studies", "sweeps", "flower"}
CORE = FLOOR.keys() - AROUND - {"__main__", "callbacks", "analysis"}  # the rest stands on it
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    """Return the name in LAYERS that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imports(path: Path) -> set[str]:
    """Return the modules of flsuite that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("flsuite.")}


def test_a_file_imports_its_own_layer_and_those_below() -> None:
    above = {
        str(path.relative_to(PACKAGE)): names
        for path in FILES
        if (names := {n for n in imports(path) if FLOOR[n.split(".")[1]] > FLOOR[room(path)]})
    }
    assert FILES and not above


def test_the_core_stands_without_what_is_around_it() -> None:
    """Callbacks may draw a picture of a run that goes on. Nothing else of the core does."""
    assert {room(path) for path in FILES} >= {*CORE, "callbacks"}
    for path in FILES:
        used = {name.split(".")[1] for name in imports(path)}
        if room(path) == "callbacks":
            assert not used & AROUND, path
        elif room(path) in CORE:
            assert not used & (AROUND | {"analysis"}), path


def test_no_circles() -> None:
    graph = {}
    for path in FILES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[name] = imports(path)

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in graph.get(todo.pop(), set()) - seen:
                seen.add(name)
                todo.append(name)
        return seen

    assert [name for name in graph if name in reachable(name)] == []


def test_the_root_holds_the_trainer_and_the_ground_floor() -> None:
    floor = {"__main__", "lightning_internals", "messages", "state", *LAYERS[-2], *LAYERS[-1]}
    assert {path.stem for path in PACKAGE.glob("*.py")} <= {"__init__", "trainer", *floor}


def test_the_picture_of_the_code_has_the_layers_from_the_top() -> None:
    picture = (PACKAGE / "README.md").read_text().split("```")[1]
    shown = re.findall(r"(?:^|  )(\w+)(?:/|\.py)(?=\s)", picture, flags=re.M)
    floors = [FLOOR[name] for name in shown]
    assert floors == sorted(floors, reverse=True)
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(shown)
