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
from pathlib import Path

from docstring_parser import parse
from lightning.pytorch.profilers import Profiler
from torch.optim import Optimizer

import flsuite
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
    "profilers": (Profiler, ["federation"]),
}
FAMILIES = {  # the parts of the gallery
    "Algorithms": ["aggregators"],
    "Their parts": ["rules", "objectives", "transforms", "server optimizers"],
    "Trust": ["robust rules", "attacks", "secure sums"],
    "Time": ["schedules", "selections", "speeds", "availability", "staleness weights"],
    "Models": ["models", "backbones"],
    "Data": ["data", "partitions", "skews", "augmentation"],
    "Runs": ["engines", "learning rates over rounds", "callbacks", "profilers"],
}
PICTURES = {  # of a family: what it shows, the file, and the page that explains it
    "Algorithms": ("Curves of three methods", "../notebooks/figures/quickstart", "guide/comparing"),
    "Their parts": ("Accuracy over sent bytes", "one_shot/figures/statistics", "one_shot/README"),
    "Trust": ("Accuracy of rules under attacks", "trust/figures/accuracy", "trust/README"),
    "Time": ("Fits over virtual time", "../notebooks/figures/asynchronous", "guide/time"),
    "Models": (
        "A fused model in comparison",
        "fusedspacefed/figures/retinamnist-tuned",
        "fusedspacefed/README",
    ),
    "Data": ("Classes by client", "../notebooks/figures/partition", "guide/data"),
    "Runs": (
        "What each client adds",
        "counterfactual/figures/contribution",
        "counterfactual/README",
    ),
}
PASSED_ON = {"parts", "kwargs", "params"}  # to a base class
KNOWN = ROOT / "flsuite" / "commands" / "known.json"
_NAME = "(?:Di |Le|Mc)?[A-Z][a-zà-ÿ]+"  # of an author
_PAPER = re.compile(rf"{_NAME}(?:, {_NAME})*(?:,? and {_NAME}| et al\.)? (?:19|20)\d\d\b")
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
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


def gallery() -> str:
    """Return all that a config can name: what it is, when to take it, and the paper."""
    parts = []
    for family, kinds in FAMILIES.items():
        shown, file, page = PICTURES[family]
        image = f'<img src="{file}.png" alt="{shown}" height="150">'
        parts += [f"## {family}", f"[{image}<br>{shown}]({page}.md)"]
        for kind in kinds:
            parts += [f"### {kind.capitalize()}"] * (len(kinds) > 1)
            cards = [("", "what it is", "when", "from"), *map(card, classes(kind))]
            columns = [c for c in zip(*cards, strict=True) if any(c[1:])]
            rows = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
            parts.append("\n".join([rows[0], f"{'|---' * len(columns)}|", *rows[1:]]))
    return "\n\n".join(parts)


def card(cls: type) -> tuple[str, ...]:
    """Return a class's name with a link to its code, what it is, when to take it, and its paper."""
    link = f"[`{cls.__name__}`](../{cls.__module__.replace('.', '/')}.py)"
    when = re.search(r"^Take it (.+)\.$", inspect.cleandoc(cls.__doc__ or ""), flags=re.M)
    return link, summary(cls), plain(when[1]) if when else "", paper(cls)


def paper(cls: type) -> str:
    """Return the paper of a class: the one that its module names with it, else its own first."""
    everywhere = references(sys.modules[cls.__module__].__doc__ or "")
    name = re.sub(r"\W", "", cls.__name__.lower())
    named = [one for text, one in everywhere.items() if name in re.sub(r"\W", "", text.lower())]
    own = references((cls.__doc__ or "").split("Args:")[0])
    only = list(everywhere.values()) if len(everywhere) == 1 else []
    return next(iter([*named[-1:], *own.values(), *only]), "")


def references(docstring: str) -> dict[str, str]:
    """Return the papers of a docstring, each by the text that ends with it."""
    text = " ".join(docstring.split())
    found, start = {}, 0
    papers = list(_PAPER.finditer(text))
    ends = [*(after.start() for after in papers[1:]), len(text)]
    for one, end in zip(papers, ends, strict=False):
        number = _ARXIV.search(text, one.end(), end)
        end = number.end() if number else one.end()
        link = f"[{one[0]}](https://arxiv.org/abs/{number[1]})" if number else one[0]
        found[text[start:end]], start = link, end
    return found


def described(kind: str) -> str:
    """Return the classes of a kind with what they do, and their arguments with the defaults."""
    shared = PASSED_ON | inspect.signature(KINDS[kind][0]).parameters.keys()
    rows = []
    for cls in classes(kind):
        own = {n: p for n, p in inspect.signature(cls).parameters.items() if n not in shared}
        given = ", ".join(f"`{n}` {default(p)}".strip() for n, p in own.items())
        rows.append(f"| `{cls.__name__}` | {summary(cls)} | {given} |")
    return "\n".join(["| | | arguments and defaults |", "|---|---|---|", *rows])


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
        "gallery": gallery,
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


def badges() -> dict[str, str]:
    """Return the badges of the README by their alternative texts, from ``pyproject.toml``."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (licence,) = re.findall(r'^license = "(.+)"$', project, flags=re.M)
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    facts = {"licence": licence, "python": f"{pythons[0]} to {pythons[-1]}"}
    facts["version"] = flsuite.__version__
    return {f"{label}: {fact}": badge(label, fact) for label, fact in facts.items()}


def badge_file(text: str) -> Path:
    """Return the file of a badge."""
    return ROOT / ".github" / "badges" / f"{text.partition(':')[0]}.svg"


def badge(label: str, fact: str) -> str:
    """Return a picture of a label and a fact side by side."""
    left, right = (7 * len(text) + 14 for text in (label, fact))
    places = [(left / 2, label), (left + right / 2, fact)]
    texts = "".join(f'<text x="{x:g}" y="14">{text}</text>' for x, text in places)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20">'
        f'<rect width="{left + right}" height="20" rx="3" fill="#57606a"/>'
        f'<path d="M{left} 0h{right - 3}q3 0 3 3v14q0 3-3 3h-{right - 3}z" fill="#4051b5"/>'
        f'<g fill="#fff" font-family="sans-serif" font-size="11" text-anchor="middle">{texts}</g>'
        "</svg>\n"
    )


def known_classes() -> str:
    """Return ``known.json`` for today's classes, from a process that loads no others."""
    command = [sys.executable, "-m", "tests.docs.known"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")))
    for text, picture in badges().items():
        badge_file(text).write_text(picture, "utf-8")
    KNOWN.write_text(known_classes(), "utf-8")
