"""The pages of the project, and what they show: blocks of code, commands, links."""

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    ROOT / "flsuite" / "README.md",
    *sorted((ROOT / "configs").rglob("*.md")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Nothing but flsuite is understood. It prints its arguments as bash expands them.
_SHELL = """
flsuite() { printf '%q ' "$@"; echo; }
command_not_found_handle() { :; }
cd() { :; }; export() { :; }; source() { :; }
"""


def page_id(page: Path) -> str:
    """Return the name of a page in the tests."""
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    """Return the text of a page, or of the Markdown cells of a notebook."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def first_commands(page: Path, heading: str) -> str:
    """Return the first commands below a heading."""
    return blocks(page.read_text().partition(f"\n## {heading}\n")[2], "bash")[0]


def without_blocks(text: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the relative links and pictures of a page that lead nowhere."""
    broken = []
    for link in re.findall(
        r'(?:\]\(|src=")(?!https?:)([^)\s"]*)[)"]', without_blocks(text_of(page))
    ):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(text_of(target))):
            broken.append(link)
    return broken


def missing_files(page: Path) -> list[str]:
    """Return the files that a page names, from the root or from its folder, and that are not there.

    A name is a path with a folder and a suffix.
    """
    text = text_of(page)
    named = re.findall(r"(?<![\w/.])(?:configs|notebooks|flsuite|tests)/[\w/.-]+\.\w+", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    own = re.findall(r"`([\w/-]+\.(?:py|md|ipynb))`", text) if page.parent.name == "flsuite" else []
    return missing + [n for n in own if not (page.parent / n).exists() and not (ROOT / n).exists()]


def files_shown(page: Path) -> dict[str, str]:
    """Return the Python files that a page shows, which begin with a comment of their name."""
    found = {}
    for block in blocks(page.read_text(), "python"):
        if name := re.match(r"# (\w+\.py)\b", block):
            found[name[1]] = block
    return found


@cache
def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every ``flsuite`` that a page shows, as bash expands them."""
    shown = []
    for block in blocks(page.read_text(), "bash"):
        if "flsuite " not in block:
            continue
        printed = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", _SHELL + block],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/nowhere"},
        ).stdout
        shown += [shlex.split(line) for line in printed.splitlines()]
    return shown


@cache
def new_commands() -> dict[Path, list[list[str]]]:
    """Return the commands of each page that no page before it has shown.

    Commands that differ in numbers or in folders of runs alone count once.
    """
    seen: set[tuple[str, ...]] = set()
    new: dict[Path, list[list[str]]] = {}
    for page in PAGES:
        new[page] = []
        for command in commands(page):
            kind = tuple(re.sub(r"^(-?[\d.]+(e-?\d+)?|runs/.*)$", "VALUE", w) for w in command)
            if kind not in seen:
                seen.add(kind)
                new[page].append(command)
    return new


if __name__ == "__main__":  # python -m tests.docs.pages README.md Start
    print(first_commands(ROOT / sys.argv[1], sys.argv[2]), end="")
