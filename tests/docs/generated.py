"""Writes what follows from the code: ``python -m tests.docs.generated``.

These are the tables of the pages, and the classes that the command knows before it imports them. A
page has a table between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``.
"""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from docstring_parser import parse
from torch.optim import Optimizer

from flsuite.aggregators import (
    Aggregator,
    Attack,
    FeatureTerm,
    Objective,
    Rule,
    SecureAggregation,
    Staleness,
    Transform,
)
from flsuite.callbacks import FederationCallback
from flsuite.data import Augment, FederatedDataModule, Partition, Skew
from flsuite.federation import Availability, Schedule, Selection, Speeds
from flsuite.federation.client.callbacks import LRDecay
from flsuite.federation.engines.base import EngineChoice
from flsuite.models import Backbone, ClientModel
from tests.composition.table import pairs_table, summary_table
from tests.docs.pages import PAGES, ROOT

KINDS: dict[str, tuple[type, Sequence[str]]] = {  # what its classes extend, and who exports them
    "aggregators": (Aggregator, ["aggregators"]),
    "rules": (Rule, ["aggregators"]),
    "robust rules": (Rule, [f"aggregators.rules.robust.{f}" for f in ("centers", "chosen")]),
    "objectives": (Objective, ["aggregators"]),
    "transforms": (Transform, ["aggregators"]),
    "server optimizers": (Optimizer, ["aggregators"]),
    "staleness weights": (Staleness, ["aggregators"]),
    "secure sums": (SecureAggregation, ["aggregators"]),
    "attacks": (Attack, ["aggregators"]),
    "schedules": (Schedule, ["federation"]),
    "speeds": (Speeds, ["federation"]),
    "availability": (Availability, ["federation"]),
    "selections": (Selection, ["federation"]),
    "engines": (EngineChoice, ["federation"]),
    "learning rates over rounds": (LRDecay, ["federation"]),
    "models": (ClientModel, ["models"]),
    "backbones": (Backbone, ["models"]),
    "data": (FederatedDataModule, ["data"]),
    "partitions": (Partition, ["data"]),
    "skews": (Skew, ["data"]),
    "augmentation": (Augment, ["data"]),
    "callbacks": (FederationCallback, ["callbacks"]),
}
INSIDE = {  # the rows of the README's table
    "algorithms": ["aggregators"],
    "their parts": ["rules", "objectives", "transforms", "server optimizers"],
    "trust": ["robust rules", "attacks", "secure sums"],
    "time": ["schedules", "selections", "speeds", "availability", "staleness weights"],
    "models": ["models", "backbones"],
    "data": ["data", "partitions", "skews", "augmentation"],
    "runs": ["engines", "learning rates over rounds", "callbacks"],
}
PASSED_ON = {"parts", "kwargs", "params"}  # to a base class
KNOWN = ROOT / "flsuite" / "commands" / "known.json"
_MARKED = re.compile(r"(<!-- generated: ([\w -]+) -->\n).*?(<!-- /generated -->)", flags=re.S)


def classes(kind: str) -> list[type]:
    """Return the classes of a kind that a config can name, by their names."""
    base, packages = KINDS[kind]
    found: set[type] = set()
    for package in packages:
        module = import_module(f"flsuite.{package}")
        exported = [getattr(module, n) for n in getattr(module, "__all__", vars(module))]
        found |= {c for c in exported if inspect.isclass(c) and issubclass(c, base)}
    if kind == "rules":
        found -= set(classes("robust rules"))
    bases = {base, FeatureTerm}  # which a config can name to no effect
    named = (c for c in found if c not in bases and not inspect.isabstract(c))
    return sorted(named, key=lambda c: c.__name__.lower())


def inside() -> str:
    """Return the table of all that a config can name."""
    rows = [f"| {row} | {'; '.join(map(named, kinds))} |" for row, kinds in INSIDE.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def named(kind: str) -> str:
    """Return the names of the classes of a kind."""
    title = "" if kind in INSIDE or kind == "aggregators" else f"{kind}: "
    return title + ", ".join(f"`{c.__name__}`" for c in classes(kind))


def described(kind: str) -> str:
    """Return the classes of a kind with what they do, and their arguments with the defaults."""
    shared = PASSED_ON | inspect.signature(KINDS[kind][0]).parameters.keys()
    rows = []
    for cls in classes(kind):
        own = {n: p for n, p in inspect.signature(cls).parameters.items() if n not in shared}
        given = ", ".join(f"`{n}` {default(p)}".strip() for n, p in own.items())
        rows.append(f"| `{cls.__name__}` | {summary(cls)} | {given} |")
    return "\n".join(["| | | arguments and defaults |", "|---|---|---|", *rows])


def datasets() -> str:
    """Return the datasets with what they are."""
    rows = [f"| `{cls.__name__}` | {summary(cls)} |" for cls in classes("data")]
    return "\n".join(["| | |", "|---|---|", *rows])


def arguments(name: str) -> str:
    """Return the arguments of a class with their defaults, and what its docstring says of them."""
    (cls,) = {c for kind in KINDS for c in classes(kind) if c.__name__ == name}
    texts = {p.arg_name: p.description or "" for p in parse(cls.__doc__ or "").params}
    own = {n: p for n, p in inspect.signature(cls).parameters.items() if n not in PASSED_ON}
    rows = [f"| `{n}` | {default(p)} | {plain(texts[n])} |" for n, p in own.items()]
    return "\n".join([f"| `{name}` | default | |", "|---|---|---|", *rows])


def summary(cls: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return plain(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0])


def plain(text: str) -> str:
    """Return the text of a docstring as a cell of Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = text.replace("``", "`").replace("\n", " ").replace("|", r"\|")
    return text.rstrip(".:")


def default(parameter: inspect.Parameter) -> str:
    """Return the default of an argument as YAML has it, if there is one."""
    given = parameter.default
    if given is parameter.empty:
        return ""
    if given is None:
        return "`null`"
    given = list(given) if isinstance(given, tuple) else given
    return f"`{str(given).lower() if isinstance(given, bool) else given}`"


def generated(name: str) -> str:
    """Return the table of this name."""
    others: dict[str, Callable[[], str]] = {
        "inside": inside,
        "datasets": datasets,
        "pairs": pairs_table,
        "pairs of kinds": summary_table,
    }
    if name.startswith("arguments of "):
        return arguments(name.removeprefix("arguments of "))
    return others[name]() if name in others else described(name)


def written(text: str) -> str:
    """Return a page with its tables as they are today."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{generated(m[2])}\n\n{m[3]}", text)


def tables(text: str) -> list[str]:
    """Return the names of the generated tables of a page."""
    return [match[2] for match in _MARKED.finditer(text)]


def known_classes() -> str:
    """Return ``known.json`` for today's classes, from a process that loads no others."""
    command = [sys.executable, "-m", "tests.docs.known"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")))
    KNOWN.write_text(known_classes(), "utf-8")
