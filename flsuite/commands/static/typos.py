"""The misspelled keys and classes of a request, all at once.

Configs and command line are checked against the source of the named classes. Arguments that the
source does not show are left to the parser.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flsuite.commands.request import options, read_config, read_value
from flsuite.commands.static.classes import Kinds, kinds_of, may_define, subclasses
from flsuite.commands.static.first_keys import TRAINER, first_keys
from flsuite.commands.static.modules import Definition, content_of, exists, find_source, lookup
from flsuite.commands.static.signatures import OPEN, Parameter, Signature, signature_of
from flsuite.commands.static.suggestions import nearest, nearest_key
from flsuite.common.errors import FlsuiteError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
_CONFIGS = (".yaml", ".yml", ".json")  # a file with a class, which the parser reads
_SPLITS = ("clients", "partition", "labels", "ids", "bins", "val_fraction")
_SWEEPS = ("config", "grid", "methods", "overrides", "seeds", "tune", "updates_from", "workers")
_PARTS = ("rule", "objective", "transforms", "server_optimizer")
_LIBRARIES = ("flsuite", "lightning", "torch", "torchmetrics")

_KeyPath = tuple[str, ...]


class TyposError(FlsuiteError):
    """A request with misspelled names.

    Attributes:
        lines: One line per misspelled name.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def refuse_typos(command: str, args: list[str]) -> None:
    """Refuse a request with keys or classes that do not exist.

    Raises:
        TyposError: If there is one.
        FlsuiteError: If a config cannot be read.
    """
    checked = _Checked(command)
    for key, text in options(args):
        if key == "config" and text is None:
            raise FlsuiteError("--config needs a file")
        if key == "config":
            checked.config(str(text))
        else:
            checked.option(key, None if text is None else read_value(text))
    lines = [
        line
        for line, unknown in checked.lines.items()
        if not unknown or not may_define(checked.modules, unknown)
    ]
    if lines:
        raise TyposError(lines)


class _Checked:
    """The findings on a request, read in the parser's order."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.file = ""  # the config that is being read; empty for the command line
        # Error lines with the short name at fault, which a user's module may still define.
        self.lines: dict[str, str] = {}
        self.modules: set[str] = set()  # the user's modules that the request names
        # The current class of each key, None if unknown.
        self.classes: dict[_KeyPath, Definition | None] = {}
        self.classes["trainer",] = lookup(*TRAINER)
        # A class has one signature for all of its keys. A later request may find it changed.
        self.signature_of = cache(signature_of)
        # The unknown short name, where the likeliest class was taken in its place.
        self.guessed: dict[_KeyPath, str] = {}

    def config(self, path: str) -> None:
        """Check a file."""
        self.file = path
        self._keys((), read_config(path))

    def option(self, key: str, value: Any) -> None:
        """Check an option of the command line."""
        self.file = ""
        at: _KeyPath = ()
        parameter = Parameter("")
        names = key.removesuffix("+").split(".")
        for name in names:
            if name in ("help", "dict_kwargs") or name.isdigit():
                return
            if name == "class_path" and at:
                value = {"class_path": value}
            if name in _OF_A_CLASS and at:
                continue
            found = self._parameter(at, name)
            if found is None:
                return
            at, parameter = found
        self._value(at, parameter, value)

    def _keys(self, at: _KeyPath, content: Mapping[Any, Any]) -> None:
        for name, value in content.items():
            if isinstance(name, str) and "." not in name:
                found = self._parameter(at, name)
                if found is not None:
                    self._value(*found, value)

    def _value(self, at: _KeyPath, parameter: Parameter, value: Any) -> None:
        kinds = kinds_of(parameter)
        if at == ("plugins",):
            named = value if isinstance(value, list) else [value]
            self.modules |= {plugin for plugin in named if isinstance(plugin, str)}
        elif at == ("trainer",):  # its class is fixed
            if isinstance(value, Mapping):
                self._keys(at, value)
        elif isinstance(value, list):
            for item in value:
                self._value(at, parameter, item)
        elif isinstance(value, str) and kinds.bases:
            self._choose(at, kinds, value)
        elif isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            self._choose(at, kinds._replace(takes_text=False), value["class_path"])
            for name in value.keys() - set(_OF_A_CLASS):
                self._refuse_next_to_class(at, str(name))
            if isinstance(value.get("init_args"), Mapping):
                self._keys(at, value["init_args"])
        elif isinstance(value, Mapping) and self.classes.get(at):
            inner = value.get("init_args", value) if set(value) <= set(_OF_A_CLASS) else value
            if isinstance(inner, Mapping):
                self._keys(at, inner)
        elif isinstance(value, Mapping) and kinds.bases:
            for name in value:
                if nearest(str(name), _OF_A_CLASS, 0.8) not in (None, name):
                    self._refuse_next_to_class(at, str(name))
        elif not isinstance(value, Mapping):
            self._forget(at)

    def _parameter(self, at: _KeyPath, name: str) -> tuple[_KeyPath, Parameter] | None:
        """Return a key of a place, or ``None`` if it is unknown.

        An unknown key is refused, and the likeliest key is returned in its place.
        """
        signature = self._signature(at)
        known = signature.parameters
        if name in known:
            return (*at, name), known[name]
        if signature.is_open:
            return None
        if name in _SWEEPS and not at and self.file:  # once for all of them
            self._refuse(f"this is a sweep: flsuite sweep --config {self.file}")
            return None
        meant = nearest_key(name, known, self._all_keys())
        if name in _PARTS and at == ("trainer", "aggregator"):
            hint = f"; {self._class_name(at)} has its own; class_path Aggregator takes all four"
        elif name in _SPLITS and at == ("data",) and "clients" not in known:
            hint = f"; FromDataModule takes it, with {self._class_name(at)} as its data"
        elif meant is not None:
            hint = f" (did you mean {self._named((*at, meant) if meant in known else meant)}?)"
        elif at and at != ("trainer",):
            names = [name for name in known if name != "params"]  # an optimizer gets them later
            hint = f"; {self._class_name(at)} takes {', '.join(names) or 'no arguments'}"
        else:
            hint = f"; see flsuite {self.command} --help"
        self._refuse(f"unknown key {self._named((*at, name))}{hint}", self._guess(at))
        return ((*at, meant), known[meant]) if meant in known else None

    def _named(self, path: _KeyPath | str) -> str:
        """Return a key as it is written in the config or on the command line."""
        key = path if isinstance(path, str) else ".".join(path)
        return key if self.file else f"--{key}"

    def _refuse(self, text: str, name: str = "") -> None:
        self.lines[f"{self.file}: {text}" if self.file else text] = name

    def _guess(self, at: _KeyPath) -> str:
        """Return the short name that the class of a place was guessed for, if it was."""
        places = (at[:length] for length in range(len(at) + 1))
        return next((self.guessed[place] for place in places if place in self.guessed), "")

    def _signature(self, at: _KeyPath) -> Signature:
        if not at:
            return first_keys(self.command)
        chosen = self.classes.get(at)
        return self.signature_of(chosen) if chosen else OPEN

    def _all_keys(self) -> Iterator[str]:
        """Yield the keys of all places, starting with the trainer and the algorithm."""
        yield from (f"trainer.{name}" for name in self._signature(("trainer",)).parameters)
        yield from (f"trainer.aggregator.{part}" for part in _PARTS)
        if default := lookup("flsuite.federation", "Synchronous"):
            yield from (f"trainer.schedule.{name}" for name in signature_of(default).parameters)
        for at in self.classes:
            yield from (".".join((*at, name)) for name in self._signature(at).parameters)

    def _class_name(self, at: _KeyPath) -> str:
        chosen = self.classes[at]
        return chosen.name if chosen else "it"

    def _refuse_next_to_class(self, at: _KeyPath, name: str) -> None:
        inside = name in self._signature(at).parameters
        meant = f"init_args: {name}" if inside else nearest(name, _OF_A_CLASS)
        hint = f" (did you mean {meant}?)" if meant else "; a class has class_path and init_args"
        self._refuse(f"unknown key {self._named((*at, name))}{hint}", self._guess(at))

    def _choose(self, at: _KeyPath, kinds: Kinds, name: str) -> None:
        """Record the class of a place, if the text is a class name."""
        self._forget(at)
        if not _NAME.fullmatch(name) or name.endswith(_CONFIGS):
            return
        if "." in name:
            module, _, last = name.rpartition(".")
            self.classes[at] = lookup(module, last)
            if name.split(".")[0] not in _LIBRARIES:
                self.modules.add(module)
            if not kinds.takes_text:  # else it may be a file
                self._refuse_path(at, module, last)
            return
        known = {k: v for base in kinds.bases for k, v in subclasses(base).items()}
        if name not in known and known and not kinds.takes_text:
            near = nearest(name, known)
            hint = (
                f" (did you mean {near}?)" if near else "; give its module too, as my_module.Name"
            )
            bases = " or ".join(dict.fromkeys(base.name for base in kinds.bases))
            text = f"{self._named(at)}: there is no {bases} called {name}{hint}"
            self._refuse(text, name)
            self.guessed[at] = name
            name = near or name
        self.classes[at] = lookup(known[name], name) if name in known else None

    def _forget(self, at: _KeyPath) -> None:
        for known in (self.classes, self.guessed):
            for other in [other for other in known if other[: len(at)] == at]:
                del known[other]

    def _refuse_path(self, at: _KeyPath, module: str, name: str) -> None:
        """Refuse a class if its module does not exist or does not define it."""
        top, content, key = module.split(".")[0], content_of(module), self._named(at)
        if not exists(top):
            near = nearest(top, [*(path.stem for path in Path().glob("*.py")), *_LIBRARIES])
            hint = f" (did you mean {near}?)" if near else ", nor is it installed"
            self._refuse(f"{key}: there is no module {top} in this folder{hint}")
        elif content and content.is_complete and name not in content.names:
            if find_source(f"{module}.{name}"):
                return
            near = nearest(name, (other for other in content.names if other[0].isupper()))
            hint = f" (did you mean {near}?)" if near else ""
            self._refuse(f"{key}: {module} has no class {name}{hint}")
