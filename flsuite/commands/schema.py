"""``flsuite schema``: the JSON schema of a config, by which editors complete and check it.

It is made from ``known.json``, so the command does not import torch.
"""

import json
from typing import Any

from flsuite import __version__
from flsuite.commands.known import TRAINER, Argument, Class, classes, find, first_keys, is_described
from flsuite.commands.parsers import parser_of
from flsuite.common.moved import PACKAGES

Schema = dict[str, Any]

# What the placeholders of the help stand for. Any other word of a kind is a value itself.
_TYPES: dict[str, Schema] = {
    "": {},
    "VALUE": {},
    "N": {"type": "integer"},
    "X": {"type": "number"},
    "TEXT": {"type": "string"},
    "PATH": {"type": "string"},
    "LIST": {"type": "array"},
    "KEYS": {"type": "object"},
}
_OF_THE_COMMAND_LINE = ("config", "print_config")  # keys of the command line alone
_COUNT = {"type": "integer", "minimum": 1}
_SEEDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_OVERRIDES = {"$ref": "#/definitions/overrides"}
_CHOICES = {"type": "object", "additionalProperties": {"type": "array", "minItems": 1}}
# What commands/sweeps/reading.py reads.
_TUNE = {
    "type": "object",
    "properties": {
        "trials": _COUNT,
        "seeds": _SEEDS,
        "seed": {"type": "integer", "minimum": 0},
        "overrides": _OVERRIDES,
    },
    "additionalProperties": _CHOICES,  # of all methods, as common, or of one
    "required": ["trials", "seeds"],
}
_SWEEP = {
    "type": "object",
    "properties": {
        "config": {"type": "string"},
        "seeds": _SEEDS,
        "methods": {"type": "object", "additionalProperties": _OVERRIDES},
        "grid": _CHOICES,
        "tune": _TUNE,
        "overrides": _OVERRIDES,
        "workers": _COUNT,
        "updates_from": {"type": "string"},
        "until": {"anyOf": [{"enum": ["decided"]}, {"type": "object"}]},
        "together": {"enum": ["seeds"]},
    },
    "additionalProperties": False,
    "required": ["config", "seeds", "methods"],
}


def schema(args: list[str]) -> None:
    """Print the schema."""
    parser_of("schema").parse_args(args)
    print(json.dumps(config_schema(), indent=1))


def config_schema() -> Schema:
    """Return the JSON schema (draft 7) of the config of an experiment or of a sweep."""
    made = _Definitions()
    keys = {k: a for k, a in first_keys("fit").items() if k not in _OF_THE_COMMAND_LINE}
    experiment = made.mapping(keys)
    trainer = find(TRAINER)
    assert trainer is not None
    experiment["properties"]["trainer"] = made.arguments_of(trainer)

    of_trainer = {f"trainer.{name}": made.value(a) for name, a in trainer.arguments.items()}
    made.definitions["overrides"] = {
        "type": "object",
        "properties": {k: experiment["properties"][k] for k in ("model", "data")} | of_trainer,
        # A longer key belongs to a class that another file may name.
        "patternProperties": {r"^(model|data)\.|^trainer\.\w+\.": {}},
        "additionalProperties": False,
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Config of flsuite {__version__}",
        "if": {"required": ["methods"]},
        "then": _SWEEP,
        "else": experiment,
        "definitions": made.definitions,
    }


class _Definitions:
    """Makes the parts of the schema: the arguments of each class, and each choice of classes.

    Attributes:
        definitions: The parts that others refer to, by name.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}

    def mapping(self, arguments: dict[str, Argument], is_open: bool = False) -> Schema:
        """Return the schema of a mapping with these keys."""
        return {
            "type": "object",
            "properties": {name: self.value(argument) for name, argument in arguments.items()},
            "additionalProperties": is_open,
            "required": [name for name, argument in arguments.items() if argument.is_required],
        }

    def value(self, argument: Argument) -> Schema:
        """Return the schema of an argument. ``null`` leaves it out."""
        words = argument.kind.split("|")
        choices = [_read(word) for word in words if word not in _TYPES and word != "CLASS"]
        options = [
            _TYPES[word] | (argument.bounds if word in ("N", "X") else {})
            for word in words
            if word in _TYPES
        ]
        if "CLASS" in words:
            options.append(self._class_of(argument.bases))
        if choices:
            options.append({"enum": choices})

        made: Schema = {} if {} in options else {"anyOf": [*options, {"type": "null"}]}
        if argument.text:
            made["description"] = argument.text.strip()
        default = _read(argument.text.partition("Default: ")[2].removesuffix("."))
        if default in choices or (("N" in words or "X" in words) and not isinstance(default, str)):
            made["default"] = default
        return made

    def arguments_of(self, known: Class) -> Schema:
        """Return the schema of a class's arguments."""
        if known.path not in self.definitions:
            self.definitions[known.path] = {}  # one of them may be a class of the same kind
            is_open = known.is_open or not is_described(known.path)
            own = self.mapping(known.arguments, is_open)
            self.definitions[known.path] = own | {"description": known.summary}
        return {"$ref": f"#/definitions/{known.path}"}

    def _class_of(self, bases: list[str]) -> Schema:
        """Return the schema of a class that extends one of these, or of a list of them."""
        usable = (c for c in classes() if not c.is_abstract)
        found = [c for c in usable if not {*bases}.isdisjoint(c.bases)]
        if not any(c.packages for c in found):  # only a user's package has them
            return {"type": ["string", "object", "array"]}
        name = f"a {' or a '.join(bases)}".replace(" ", "-")
        itself = {"$ref": f"#/definitions/{name}"}
        if name not in self.definitions:
            self.definitions[name] = {}
            choice = self._choice(found)
            self.definitions[name] = {"anyOf": [*choice, {"type": "array", "items": itself}]}
        return itself

    def _choice(self, found: list[Class]) -> list[Schema]:
        """Return the schemas of one class: its name, or a mapping with its arguments."""
        # A class of the user, or of a study, which is described nowhere.
        own = {"type": "string", "pattern": r"^(?!flsuite\.(?!studies\.))\w+(\.\w+)+$"}
        alone = [c for c in found if not any(a.is_required for a in c.arguments.values())]
        whole = {
            "type": "object",
            "properties": {
                "class_path": {"anyOf": [*_named(found), own]},
                "init_args": {"type": "object"},
                "dict_kwargs": {"type": "object"},
            },
            "additionalProperties": False,
            "required": ["class_path"],
            "allOf": [
                _if_class(
                    _names(c),
                    {"properties": {"init_args": self.arguments_of(c)}}
                    | ({} if c in alone else {"required": ["init_args"]}),
                )
                for c in found
            ],
        }
        return [*_named(alone), own, whole]


def _named(found: list[Class]) -> list[Schema]:
    """Return the schemas of the names of classes. An editor offers the short ones."""
    short = {c.name: c.summary for c in found if c.packages}
    long = [name for c in found for name in _names(c) if name not in short]
    return [{"enum": [*short], "enumDescriptions": [*short.values()]}] * bool(short) + [
        {"enum": long}
    ] * bool(long)


def _if_class(names: list[str], then: Schema) -> Schema:
    """Return a condition on the chosen class."""
    chosen = {"properties": {"class_path": {"enum": names}}, "required": ["class_path"]}
    return {"if": chosen, "then": then}


def _names(known: Class) -> list[str]:
    """Return all names of a class in a config."""
    old = [was for was, now in PACKAGES.items() if known.path.startswith(f"{now}.")]
    packages = [f"{package}.{known.name}" for package in (*known.packages, *old)]
    return [*[known.name] * bool(known.packages), known.path, *packages]


def _read(word: str) -> Any:
    """Return a value of the help: a number, true or false, or else a text."""
    try:
        return json.loads(word.lower())
    except ValueError:
        return word
