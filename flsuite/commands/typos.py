"""The misspelled keys and classes of a request, all at once.

Configs and command line are checked against what is known of the named classes, before torch and
Lightning are imported. Classes of a user's own modules are checked after their import.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flsuite.commands.known import (
    TRAINER,
    Argument,
    Class,
    find,
    find_short,
    first_keys,
    is_described,
    key_for,
    names_in,
    subclasses,
)
from flsuite.commands.request import options, read_config, read_value
from flsuite.commands.sweeps.reading import KEYS
from flsuite.common.errors import FlsuiteError, likeliest
from flsuite.common.files import LAMBDA, NO_LAMBDA
from flsuite.common.moved import moved

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
_CONFIGS = (".yaml", ".yml", ".json")  # a file with a class, which the parser reads
_SPLITS = ("clients", "partition", "labels", "ids", "bins", "val_fraction")
_PARTS = ("rule", "objective", "transforms", "server_optimizer")
_FEW = 8  # classes that are listed
MODULE_TOO = "; give its module too, as my_module.Name"
_LIBRARIES = ("flsuite", "lightning", "torch", "torchmetrics")

_KeyPath = tuple[str, ...]


def refuse_typos(command: str, args: list[str], imports: bool = False) -> bool:
    """Refuse a command line if it, or a config that it names, has an unknown key or class.

    Args:
        command: The subcommand, such as ``fit``.
        args: The arguments after the subcommand.
        imports: Whether to import classes that ``known.json`` does not describe, in order to check
            their arguments: the user's own classes, and those of another version of torch. Import
            the plugins first.

    Returns:
        Whether names are left that only a second call with ``imports`` can check.

    Raises:
        FlsuiteError: If keys or classes are unknown, with a line for each, or a config cannot be
            read.
    """
    checked = _Checked(command, imports)
    for key, text in options(args):
        if key == "config" and text is None:
            raise FlsuiteError("--config needs a file")
        if key == "config":
            checked.config(str(text))
        else:
            checked.option(key, None if text is None else read_value(text))
    waits = checked.needs_imports and not imports
    lines = [line for line, is_guess in checked.lines.items() if not (is_guess and waits)]
    if lines:
        raise FlsuiteError(*lines)
    return waits


class _Checked:
    """The findings on a request, read in the parser's order."""

    def __init__(self, command: str, imports: bool) -> None:
        self.command, self.imports = command, imports
        self.file = ""  # the config that is being read; empty for the command line
        self.needs_imports = False  # whether the request names a user's own modules
        # Error lines, and whether an import may make the name known.
        self.lines: dict[str, bool] = {}
        # The current class of each key, None if unknown.
        self.classes: dict[_KeyPath, Class | None] = {}
        self.classes["trainer",] = find(TRAINER)
        # Where the likeliest class was taken in place of an unknown one.
        self.guessed: set[_KeyPath] = set()

    def config(self, path: str) -> None:
        """Check a file."""
        self.file = path
        self._keys((), read_config(path))

    def option(self, key: str, value: Any) -> None:
        """Check an option of the command line."""
        self.file = ""
        at: _KeyPath = ()
        argument = Argument()
        for name in key.removesuffix("+").split("."):
            if name in ("help", "dict_kwargs") or name.isdigit():
                return
            if name == "class_path" and at:
                value = {"class_path": value}
            if name in _OF_A_CLASS and at:
                continue
            found = self._argument(at, name)
            if found is None:
                return
            at, argument = found
        self._value(at, argument, value)

    def _keys(self, at: _KeyPath, content: Mapping[Any, Any]) -> None:
        for name, value in content.items():
            found = None if "." in str(name) else self._argument(at, str(name))
            if found is not None:
                self._value(*found, value)

    def _value(self, at: _KeyPath, argument: Argument, value: Any) -> None:
        if at == ("plugins",):
            self.needs_imports |= bool(value)
        elif at == ("trainer",):  # its class is fixed
            self._keys(at, value if isinstance(value, Mapping) else {})
        elif isinstance(value, Mapping):
            self._mapping(at, argument, value)
        elif isinstance(value, list):
            for item in value:
                self._value(at, argument, item)
        elif isinstance(value, str) and LAMBDA.match(value):
            self._refuse(at, f"{self._named(at)}: {NO_LAMBDA}")
        elif isinstance(value, str) and argument.bases:
            self._choose(at, argument, value)
        else:
            self._forget(at)

    def _mapping(self, at: _KeyPath, argument: Argument, value: Mapping[Any, Any]) -> None:
        path, inner = value.get("class_path"), value.get("init_args")
        others = [str(name) for name in value if name not in _OF_A_CLASS]
        if isinstance(path, str):
            self._choose(at, argument._replace(takes_text=False), path)
        elif self.classes.get(at):
            others, inner = [], value if others else inner
        else:
            is_class = bool(argument.bases)
            others = [n for n in others if is_class and likeliest(n, _OF_A_CLASS, cutoff=0.8)]
            inner = None
        for name in others:
            self._refuse_next_to_class(at, name)
        if isinstance(inner, Mapping):
            self._keys(at, inner)

    def _argument(self, at: _KeyPath, name: str) -> tuple[_KeyPath, Argument] | None:
        """Return a key of a place, or ``None`` if it is unknown.

        An unknown key is refused, and the likeliest key is returned in its place.
        """
        chosen = self.classes.get(at)
        known = self._arguments(at)
        if name in known:
            return (*at, name), known[name]
        if at and (chosen is None or chosen.is_open):
            return None
        if name in KEYS and not at and self.file:  # once for all of them
            self._refuse(at, f"this is a sweep: flsuite sweep --config {self.file}")
            return None

        meant = nearest_key(name, known, self._all_keys())
        if chosen and name in _PARTS and at == ("trainer", "aggregator"):
            hint = f"; {chosen.name} has its own; class_path Aggregator takes all four"
        elif chosen and name in _SPLITS and at == ("data",) and "clients" not in known:
            hint = f"; FromDataModule takes it, with {chosen.name} as its data"
        elif meant is not None:
            hint = did_you_mean(self._named((*at, meant) if meant in known else meant))
        elif chosen and at != ("trainer",):
            names = [name for name in known if name != "params"]  # an optimizer gets them later
            hint = f"; {chosen.name} takes {', '.join(names) or 'no arguments'}"
        elif self.file and (*at, name) == (self.command,):  # as LightningCLI writes it elsewhere
            hint = "; remove it, and move the keys below it to the left"
        else:
            hint = f"; see flsuite {self.command} --help"
        self._refuse(at, f"unknown key {self._named((*at, name))}{hint}")
        return ((*at, meant), known[meant]) if meant in known else None

    def _named(self, path: _KeyPath | str) -> str:
        """Return a key as it is written in the config or on the command line."""
        key = path if isinstance(path, str) else ".".join(path)
        return key if self.file else f"--{key}"

    def _refuse(self, at: _KeyPath, text: str, about: str = "") -> None:
        """Add an error line.

        Args:
            at: The place of the fault.
            text: What is wrong.
            about: The path of the class at fault. Default: the class of the place.
        """
        chosen = self.classes.get(at)
        is_current = is_described(about or (chosen.path if chosen else ""))
        self.needs_imports |= not is_current
        is_guess = any(at[:length] in self.guessed for length in range(len(at) + 1))
        self.lines[f"{self.file}: {text}" if self.file else text] = is_guess or not is_current

    def _arguments(self, at: _KeyPath) -> dict[str, Argument]:
        chosen = self.classes.get(at)
        return chosen.arguments if chosen else {} if at else first_keys(self.command)

    def _all_keys(self) -> Iterator[str]:
        """Yield the keys of all places, starting with the trainer and the algorithm."""
        yield from (f"trainer.{name}" for name in self._arguments(("trainer",)))
        yield from (f"trainer.aggregator.{part}" for part in _PARTS)
        if default := find_short("Synchronous"):
            yield from (f"trainer.schedule.{name}" for name in default.arguments)
        if "optimizer" in self._arguments(("model",)) and (usual := find_short("SGD")):
            yield from (f"model.optimizer.{name}" for name in usual.arguments)
        for at in self.classes:
            yield from (".".join((*at, name)) for name in self._arguments(at))

    def _refuse_next_to_class(self, at: _KeyPath, name: str) -> None:
        inside = name in self._arguments(at)
        meant = f"init_args: {name}" if inside else nearest(name, _OF_A_CLASS)
        hint = did_you_mean(meant, "; a class has class_path and init_args")
        self._refuse(at, f"unknown key {self._named((*at, name))}{hint}")

    def _choose(self, at: _KeyPath, argument: Argument, name: str) -> None:
        """Record the class of a place, if the text is a class name."""
        self._forget(at)
        if not _NAME.fullmatch(name) or name.endswith(_CONFIGS):
            return
        is_class = not argument.takes_text  # else it may be a file
        bases = " or ".join(_shown_base(base) for base in argument.bases)
        if "." in name:
            chosen = self.classes[at] = self._find(name) if is_class else find(name)
            if chosen is None and is_class:
                self._refuse_path(at, name)
            elif (
                chosen
                and (bases and is_class and {*argument.bases}.isdisjoint(chosen.bases))
                and (key := key_for(chosen))
            ):
                text = f"{self._named(at)}: {name} is not of type {bases}; it is for the key {key}"
                self._refuse(at, text)
            return
        known = subclasses(argument.bases)
        if name not in known and known and is_class:
            own = own_class(name)
            near = own or nearest(name, known)
            lists = f", or see flsuite fit --help={'.'.join(at)}"
            paths = (path for path in known.values() if path not in argument.bases)
            usable = [c.name for c in map(find, paths) if c and not c.is_abstract] or [*known]
            if len(usable) <= _FEW:
                lists = f"; there are: {', '.join(sorted(usable))}"
            meant = find_short(name) or (self._find(own) if own else None)
            fits = meant and not {*argument.bases}.isdisjoint(meant.bases)
            key = None if fits else key_for(meant)
            hint = f"; it is for the key {key}" if key else did_you_mean(near, MODULE_TOO + lists)
            self.guessed.add(at)
            text = f"{self._named(at)}: there is no {bases} called {name}{hint}"
            self._refuse(at, text, argument.bases[0])
            name = near or name
        self.classes[at] = self._find(known[name]) if name in known else None

    def _find(self, path: str) -> Class | None:
        known = find(path)
        if not self.imports or (known and is_described(path)):
            return known
        from flsuite.commands.describing import imported

        return imported(path)

    def _forget(self, at: _KeyPath) -> None:
        self.classes = {k: v for k, v in self.classes.items() if k[: len(at)] != at}
        self.guessed = {key for key in self.guessed if key[: len(at)] != at}

    def _refuse_path(self, at: _KeyPath, path: str) -> None:
        """Refuse a class if its module does not exist or does not define it."""
        module, _, name = path.rpartition(".")
        top, key = module.split(".")[0], self._named(at)
        today = moved(path).rpartition(".")[0]
        names = names_in(today, self.imports)
        if top == "flsuite" and not exists(today):
            same = find_short(name)
            hint = did_you_mean(f"{same.packages[-1]}.{name}" if same else None)
            self._refuse(at, f"{key}: there is no module {module}{hint}")
        elif not exists(top):
            near = nearest(top, [*(file.stem for file in Path().glob("*.py")), *_LIBRARIES])
            hint = did_you_mean(near, ", nor is it installed")
            if (beside := Path(self.file).parent / f"{top}.py").is_file():
                hint = f"; run the command in {beside.parent}, which has {beside.name}"
            self._refuse(at, f"{key}: there is no module {top} in this folder{hint}")
        elif names and name not in names:
            near = nearest(name, (other for other in names if other[0].isupper()))
            text = f"{key}: {module} has no class {name}{did_you_mean(near)}"
            self._refuse(at, text, path)
        else:
            self.needs_imports = True


def _shown_base(path: str) -> str:
    """Return the name of a base class for people: an engine or ``Auto`` is an ``Engine``."""
    return path.rpartition(".")[2].removesuffix("Choice")


def exists(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
    except (ImportError, ValueError):
        return True


def did_you_mean(name: str | None, otherwise: str = "") -> str:
    """Return `` (did you mean NAME?)`` to append to a message, or ``otherwise`` without a name."""
    return f" (did you mean {name}?)" if name else otherwise


def own_class(name: str) -> str | None:
    """Return the path of a class of this name in a file of the working folder, if there is one."""
    line = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    files = (file for file in sorted(Path().glob("*.py")) if file.is_file())
    found = (f for f in files if line.search(f.read_text("utf-8", errors="replace")))
    return next((f"{file.stem}.{name}" for file in found), None)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the likeliest name, if any is likely."""
    return next(iter(likeliest(name, known, 1, cutoff)), None)


def nearest_key(key: str, siblings: Iterable[str], elsewhere: Iterable[str]) -> str | None:
    """Return the likeliest key for an unknown one.

    Args:
        key: The last name of the unknown key.
        siblings: The names that exist in its place.
        elsewhere: Dotted keys of other places. Earlier ones are preferred.
    """
    siblings, elsewhere = list(siblings), list(elsewhere)
    longer = [name for name in siblings if name.startswith(key) and len(key) > 2]
    if longer:  # an abbreviation
        return min(longer, key=len)
    ends = {other: other.rpartition(".")[2] for other in elsewhere}
    same = [other for other, end in ends.items() if end == key]
    if same:
        return same[0]
    longer = [name for name in siblings if name.endswith(f"_{key}")]  # epochs: max_epochs
    near = longer[0] if longer else nearest(key, siblings)
    if near:
        return near
    last = [other for other, end in ends.items() if end.endswith(f"_{key}")]
    if last:
        return last[0]
    end = nearest(key, ends.values(), 0.75)
    return next((other for other in elsewhere if ends[other] == end), None)
