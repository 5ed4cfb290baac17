"""Signatures and docstrings of classes, read from their source.

A class that may take more arguments than its source shows is marked as open.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from flsuite.commands.static.modules import Definition, last_name, resolve

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


_PLAIN_BASES = {"ABC", "Generic", "NamedTuple", "Protocol", "object"}  # without arguments to add
_HARMLESS = {"_defaults_from_env_vars", "override"}  # decorators that do not change the arguments


class Parameter(NamedTuple):
    """An argument of a class.

    Attributes:
        module: The module that declares it. Names in the annotation are resolved there.
        annotation: Its type.
        default: Its default.
        doc: Its text in the docstring.
    """

    module: str
    annotation: ast.expr | None = None
    default: ast.expr | None = None
    doc: str = ""


class Signature(NamedTuple):
    """The arguments of a class.

    Attributes:
        parameters: The known arguments, by name.
        is_open: Whether there may be others.
    """

    parameters: dict[str, Parameter]
    is_open: bool = False


OPEN = Signature({}, is_open=True)


def signature_of(defined: Definition, depth: int = 9) -> Signature:
    """Return the arguments of a class."""
    cls = defined.node
    if not isinstance(cls, ast.ClassDef) or depth == 0:
        return OPEN
    metaclasses = [k for k in cls.keywords if last_name(k.value) != "ABCMeta"]
    is_dataclass = [_callee(node) == "dataclass" for node in cls.decorator_list]
    if metaclasses or not all(is_dataclass):
        return OPEN

    init = next((node for node in cls.body if _is_function(node, "__init__")), None)
    if isinstance(init, ast.FunctionDef):
        return _of_init(defined, cls, init, depth)
    if any(_is_function(node, "__new__") for node in cls.body):
        return OPEN
    inherited = _of_bases(defined, cls, depth)
    is_tuple = "NamedTuple" in map(last_name, cls.bases)
    has_fields = bool(is_dataclass) or is_tuple
    return _with(inherited, dict(_fields(defined, cls))) if has_fields else inherited


def _of_init(
    defined: Definition, cls: ast.ClassDef, init: ast.FunctionDef, depth: int
) -> Signature:
    docs = argument_docs(ast.get_docstring(init)) | argument_docs(ast.get_docstring(cls))
    own = function_parameters(defined.module, init, docs)
    if any(_callee(node) not in _HARMLESS for node in init.decorator_list):
        return Signature(own, is_open=True)
    extra = init.args.kwarg.arg if init.args.kwarg else None
    if extra is None:
        return Signature(own)
    calls = [
        node
        for node in ast.walk(init)
        if isinstance(node, ast.Call)
        and any(k.arg is None and last_name(k.value) == extra for k in node.keywords)
    ]
    calls_base = all(ast.unparse(call.func) == "super().__init__" for call in calls)
    uses = [node for node in ast.walk(init) if isinstance(node, ast.Name) and node.id == extra]
    # A user's class may take arguments out of it, by kwargs.pop for example. Ours do not.
    only_passes_on = len(uses) == len(calls) or defined.module.split(".")[0] == "flsuite"
    if not calls or not calls_base or not only_passes_on:
        return Signature(own, is_open=True)
    # Arguments that __init__ passes on by name cannot be set again.
    fixed = {k.arg for call in calls for k in call.keywords}
    inherited = _of_bases(defined, cls, depth)
    free = {k: v for k, v in inherited.parameters.items() if k not in fixed | own.keys()}
    for name in own.keys() & inherited.parameters.keys():
        own[name] = own[name]._replace(doc=own[name].doc or inherited.parameters[name].doc)
    return Signature(own | free, inherited.is_open)


def own_and_bases(defined: Definition | None) -> Iterator[Definition]:
    """Yield a class and the classes that it extends, the nearest first."""
    if defined is None or not isinstance(defined.node, ast.ClassDef):
        return
    yield defined
    for base in defined.node.bases:
        yield from own_and_bases(resolve(defined.module, base))


def _of_bases(defined: Definition, cls: ast.ClassDef, depth: int) -> Signature:
    """Return the arguments of all bases together, without regard to their order."""
    together = Signature({})
    for base in reversed(cls.bases):
        if last_name(base) in _PLAIN_BASES:
            continue
        found = resolve(defined.module, base)
        inherited = signature_of(found, depth - 1) if found else OPEN
        together = _with(together, inherited.parameters, inherited.is_open)
    return together


def _with(signature: Signature, more: dict[str, Parameter], is_open: bool = False) -> Signature:
    return Signature({**signature.parameters, **more}, signature.is_open or is_open)


def function_parameters(
    module: str, function: ast.FunctionDef, docs: dict[str, str]
) -> dict[str, Parameter]:
    """Return the named arguments of a method."""
    arguments = function.args
    usual = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(usual) - len(arguments.defaults))
    pairs = [*zip(usual, [*missing, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        arg.arg: Parameter(module, arg.annotation, default, docs.get(arg.arg, ""))
        for arg, default in pairs[1:]
    }


def _fields(defined: Definition, cls: ast.ClassDef) -> Iterator[tuple[str, Parameter]]:
    docs = argument_docs(ast.get_docstring(cls))
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        is_fixed = isinstance(node.value, ast.Call) and "init=False" in ast.unparse(node.value)
        if not is_fixed and last_name(node.annotation) != "ClassVar":
            name = node.target.id
            yield name, Parameter(defined.module, node.annotation, node.value, docs.get(name, ""))


def _is_function(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _callee(node: ast.expr) -> str:
    return last_name(node.func if isinstance(node, ast.Call) else node)
