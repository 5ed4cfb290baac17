"""Docstrings as plain text."""

import re

_ROLE = re.compile(r":\w+:`~?([^`<]*?)(?:\s*<[^>]*>)?`")
_LINK = re.compile(r"`([^`<]*?)\s*<[^>]*>`_+")
_ARGUMENT = re.compile(r"^( *)(\*{0,2}\w+)(?: *\([^)]*\))?: *(.*)$")


def argument_docs(doc: str | None) -> dict[str, str]:
    """Return the text of each argument in a docstring."""
    lines = (doc or "").partition("Args:\n")[2].splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    docs: dict[str, str] = {}
    name = ""
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line.strip() and depth < indent:
            break
        begins = _ARGUMENT.match(line) if depth == indent else None
        if begins:
            name = begins[2]
        if name:
            text = begins[3] if begins else line.strip()
            docs[name] = f"{docs.get(name, '')} {text}".strip()
    return {name: plain(text) for name, text in docs.items()}


def plain(text: str) -> str:
    """Return a text without its markup."""
    text = _ROLE.sub(lambda role: role[1].rpartition(".")[2], text)
    return " ".join(_LINK.sub(r"\1", text).replace("`", "").split())


def first_sentence(text: str) -> str:
    """Return the beginning of a text, up to the first period that ends a sentence."""
    paragraph = plain(text.partition("\n\n")[0])
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`'])", paragraph)[0]
