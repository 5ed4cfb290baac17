"""Makes a site of the pages: the hooks of ``mkdocs.yml``.

A page has the same path on the site as in the repository, so its links work on both. A notebook
becomes a page with its stored outputs, and a package whose names users import a page of reference.
"""

import ast
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

from tests.docs.pages import NOTEBOOKS, PAGES, ROOT

REFERENCE = {  # its pages, and what they document below flsuite: all that users import
    "trainer": ["FederatedTrainer", "FederationError", "FlsuiteError"],
    "aggregators": ["aggregators", "aggregators.rules.solvers"],
    "federation": ["federation"],
    "callbacks": ["callbacks"],
    "models": ["models", "models.backbones.Backbone", "models.abilities", "models.flows"],
    "data": ["data", "data.loader"],
    "runs": ["runs.fork", "runs.rounds"],
    "analysis": ["analysis", "analysis.panels", "metrics.fisher"],
    "studies": ["studies.inversion", "studies.two_layer", "studies.unlearning"],
    "flower": ["flower.rule_strategy", "flower.server", "flower.client"],
    "common": [
        "common.arguments",
        "common.client",
        "common.messages",
        "common.random",
        "common.state",
    ],
}
_STYLE = """.md-grid { max-width: 76rem } td:first-child code { white-space: nowrap }
table.dataframe { display: block; overflow-x: auto }"""  # of notebooks, which are wider than phones
_LINKED = (".png", ".svg", ".yaml", ".py", ".csv", ".sh", ".sbatch")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of a folder by those that belong on the site."""
    # The theme's files may lie in an environment below the repository.
    pages = config.docs_dir
    theme = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(pages)]
    made = Files(theme)
    for path in [*PAGES, *_linked()]:
        name, always = str(path.relative_to(ROOT)), InclusionLevel.INCLUDED  # folders with a dot
        made.append(File.generated(config, name, abs_src_path=str(path), inclusion=always))
    for path in NOTEBOOKS:
        for name, content in notebook(path).items():
            made.append(File.generated(config, f"notebooks/{name}", content=content))
    made.append(File.generated(config, "style.css", content=_STYLE))
    for name, documented in REFERENCE.items():
        page = "\n\n".join(f"::: flsuite.{one}" for one in documented)
        made.append(File.generated(config, f"reference/{name}.md", content=page))
    return made


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link pages instead of notebooks, and the reference instead of the code.

    A list in a list is indented by four spaces, which the site needs and the repository does not.
    """
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)  # prose, a block, prose, ...
    parts[::2] = (re.sub(r"^ {2,3}(?=- )", " " * 4, part, flags=re.M) for part in parts[::2])
    markdown = "".join(parts)
    markdown = re.sub(r"(\]\([^)\s:]*)\.ipynb\b", r"\1.md", markdown)
    source = r"\[`(\w+)`\]\((?:\.\./)*(flsuite/[\w/]+)\.py\)"
    return re.sub(source, lambda m: f"[`{m[1]}`][{m[2].replace('/', '.')}.{m[1]}]", markdown)


def _linked() -> list[Path]:
    """Return the other files that pages link."""
    found = [ROOT / name for name in ("LICENSE", "CITATION.cff", "pyproject.toml")]
    for folder in (".github", "configs", "notebooks/figures"):
        found += (p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in _LINKED)
    return found


def notebook(path: Path) -> dict[str, str | bytes]:
    """Return a notebook as a page and its pictures, by their names."""
    files: dict[str, str | bytes] = {}
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                name = f"{path.stem}-{len(files)}.png"
                files[name] = b64decode("".join(data["image/png"]))
                parts.append(f"![A picture of this notebook]({name})")
            elif shown := data.get("text/html") or data.get("text/markdown"):
                parts.append("".join(shown))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return {f"{path.stem}.md": "\n\n".join(parts), **files}


class Roles(griffe.Extension):
    """Turns the roles of docstrings, which name what they link, into links, and reads exports."""

    def on_alias_instance(self, *, alias: griffe.Alias, node: ast.AST, **_: Any) -> None:
        """Let a name be public that a package imports as itself, which exports it."""
        names = node.names if isinstance(node, ast.ImportFrom) else []
        alias.public = any(one.name == one.asname == alias.name for one in names) or None

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            text = re.sub(r":\w+:`~?([\w.]*?)(\w+)`", self._link, obj.docstring.value)
            obj.docstring.value = text

    @staticmethod
    def _link(role: re.Match[str]) -> str:
        name = f"{role[1]}{role[2]}"  # optional: not all that is named has a page
        return f'<autoref optional identifier="{name}"><code>{role[2]}</code></autoref>'
