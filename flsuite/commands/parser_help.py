"""The help of the command and of its keys."""

import ast
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping

from flsuite import __version__
from flsuite.commands.static.classes import class_names, find_class, kinds_of, public_subclasses
from flsuite.commands.static.first_keys import TRAINER, first_keys
from flsuite.commands.static.modules import Definition, last_name, lookup, resolve
from flsuite.commands.static.signatures import Parameter, first_sentence, signature_of
from flsuite.commands.static.suggestions import nearest, nearest_key
from flsuite.common.errors import FlsuiteError

SUMMARIES = {
    "fit": "Run a federation and write its folder. --ckpt_path last resumes a run.",
    "validate": "Score a finished run on validation data.",
    "test": "Score a finished run on test data: the global model and every client.",
    "predict": "Write class probabilities on test data to predictions.csv, and a model's pictures.",
}
HELP = f"""flsuite {__version__}: federated-learning experiments with PyTorch Lightning

usage: flsuite COMMAND --config FILE [--KEY VALUE ...]

commands:
  new         create a model, a data module and an experiment to start from
  fit         run a federation and write its folder
  resume      continue a run: flsuite resume RUN
  fork        begin a run at a moment of another one, under changed settings
  contribution  train a run again without each of its clients
  verify      do rounds of a run again, and compare them with its record
  pack        write what is needed to verify a run into one file
  ls          list runs: method, data, rounds, score, state
  validate    score a finished run on validation data
  test        score a finished run on test data: the global model and every client
  predict     write class probabilities on test data to predictions.csv, and a model's pictures
  partition   draw how a config splits the data, without training
  schedule    draw which clients train when on the virtual clock, without training
  sweep       run methods x grid x seeds; can be killed and restarted
  report      compare finished runs: mean and spread over seeds
  workspace   create the charts of a project in Weights & Biases

examples:
  flsuite fit --config configs/quickstart.yaml
  flsuite fit --config configs/quickstart.yaml --trainer.rounds 50 --data.partition.alpha 0.1
  flsuite resume runs/quickstart/TIME-SEED --trainer.rounds 100
  flsuite fork runs/quickstart/TIME-SEED --at 10 --without 3
  flsuite verify runs/quickstart/TIME-SEED
  flsuite test runs/quickstart/TIME-SEED --ckpt_path best
  flsuite partition --config configs/quickstart.yaml
  flsuite schedule --config configs/asynchronous/quickstart.yaml
  flsuite sweep --config configs/sweeps/comparison.yaml
  flsuite report runs/comparison --metric accuracy f1_macro --html report.html

flsuite fit --help lists the options, --help=trainer Lightning's Trainer options, --help=KEY the
classes that a key takes, such as trainer.aggregator, and --help=CLASS the arguments of a class.
flsuite fit --config FILE --print_config prints the resolved config. A key of a class is given
without init_args:
  --trainer.aggregator FedAvgM --trainer.aggregator.momentum 0.5

The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, 129
after SIGHUP, which a closed terminal sends, or 143 after SIGTERM, which clusters send before they
reclaim a machine. A run that ended with 1, 129, 130 or 143 keeps its last finished round;
--ckpt_path last continues from there.
"""


_NAME_WIDTH = 26
_KINDS = {
    "Path": "PATH",
    "int": "N",
    "float": "X",
    "bool": "true|false",
    "str": "TEXT",
    "list": "LIST",
    "dict": "KEYS",
}
_FIRST = ("config", "model", "data", "ckpt_path", "run_dir", "seed_everything", "plugins")
_WORDS = {
    "config": "FILE",
    "ckpt_path": "PATH",
    "run_dir": "PATH",
    "output": "PATH",
    "plugins": "LIST",
    "seed_everything": "N",
}
_LONGEST_KIND = 24
_EPILOG = """
more:
  --help=trainer                  Lightning's arguments, which apply to each client's fit
  --help=trainer.aggregator       the classes that a key takes; also model, data, data.partition
  --help=FedProx                  the arguments of a class; also --help=my_module.Net

The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, 129
after SIGHUP, or 143 after SIGTERM. After 1, 129, 130 or 143, --ckpt_path last continues from the
last finished round.
"""


def help_of(command: str, summary: str, topic: str = "") -> str:
    """Return the help of a command, or of one of its keys or classes.

    Args:
        command: A subcommand that reads a config.
        summary: What it does.
        topic: ``trainer``, a key that takes a class, or the name of a class.

    Raises:
        FlsuiteError: If the topic is neither a key nor a class.
    """
    if not topic:
        return _of_command(command, summary)
    if topic == "trainer":
        return _of_lightning()
    name = topic.removeprefix("--")
    bases = _bases_of(command, name)
    if bases:
        return _of_key(name, bases)
    definition = find_class(name)
    if definition is not None:
        return _of_class(definition)
    keys = [f"trainer.{key}" for key in _trainer_parameters()]
    near = nearest_key(name, first_keys(command).parameters, keys) or nearest(name, class_names())
    hint = f" (did you mean {near}?)" if near else ""
    raise FlsuiteError(f"--help={topic}: no such class, and no key that takes one{hint}")


def _of_command(command: str, summary: str) -> str:
    keys = first_keys(command).parameters
    own = {f"--{name}": keys[name] for name in (*_FIRST, *keys) if name in keys}
    own["--KEY VALUE"] = Parameter("", doc="Any key of a config, e.g. --data.partition.alpha 0.1.")
    del own["--trainer"]
    federated = {
        name: parameter
        for name, parameter in _trainer_parameters().items()
        if parameter.module == TRAINER[0] and name not in keys
    }
    lines = [f"usage: flsuite {command} --config FILE [--KEY VALUE ...]", "", summary, ""]
    lines += _table("options:", own)
    lines += ["", *_table("keys of the trainer, as --trainer.KEY VALUE:", federated)]
    return "\n".join(lines) + "\n" + _EPILOG


def _of_lightning() -> str:
    """Return the arguments that the trainer passes on to Lightning's Trainer."""
    lightning = {k: v for k, v in _trainer_parameters().items() if v.module != TRAINER[0]}
    title = "keys of Lightning's Trainer for each client's fit, as --trainer.KEY VALUE:"
    return "\n".join(_table(title, lightning)) + "\n"


def _of_key(name: str, bases: Iterable[Definition]) -> str:
    lines = [f"--{name} takes one of these classes, or my_module.Name of your own:"]
    rows = {
        class_name: _summary(found)
        for base in bases
        for class_name, module in public_subclasses(base).items()
        if (found := lookup(module, class_name)) and (found != base or module.startswith("flsuite"))
    }
    width = max(map(len, rows), default=0) + 2
    for class_name, text in sorted(rows.items()):
        lines += _row(class_name, text, width)
    example = next(iter(sorted(rows)), "FedProx")
    return "\n".join([*lines, "", f"The arguments of one: --help={example}"]) + "\n"


def _of_class(found: Definition) -> str:
    signature = signature_of(found)
    assert isinstance(found.node, ast.ClassDef)
    lines = [f"{found.node.name}: {_summary(found)}", ""]
    lines += _table("arguments:", signature.parameters)
    if signature.is_open:
        lines += ["", f"It takes more arguments; --KEY.help {found.node.name} lists them."]
    return "\n".join(lines) + "\n"


def _bases_of(command: str, name: str) -> tuple[Definition, ...]:
    """Return the classes that a key takes, such as ``data.partition``."""
    first, *rest = name.split(".")
    parameter = first_keys(command).parameters.get(first)
    for inner in rest:
        bases = kinds_of(parameter).bases if parameter else ()
        parameter = next((p for base in bases if (p := _parameter(base, inner))), None)
    return kinds_of(parameter).bases if parameter else ()


def _parameter(base: Definition, name: str) -> Parameter | None:
    """Return an argument of a class, or of its first subclass that has it."""
    for class_name, module in public_subclasses(base).items():
        found = lookup(module, class_name)
        parameter = signature_of(found).parameters.get(name) if found else None
        if parameter is not None:
            return parameter
    return None


def _trainer_parameters() -> dict[str, Parameter]:
    """Return the arguments of the trainer and of Lightning's Trainer, by name."""
    trainer = lookup(*TRAINER)
    assert trainer is not None
    return signature_of(trainer).parameters


def _summary(found: Definition) -> str:
    node = found.node
    return first_sentence(ast.get_docstring(node) or "") if isinstance(node, ast.ClassDef) else ""


def _table(title: str, parameters: Mapping[str, Parameter]) -> list[str]:
    lines = [title]
    for name, parameter in parameters.items():
        shown = f"{name} {_WORDS.get(name.removeprefix('--')) or _kind(parameter)}".rstrip()
        lines += _row(shown, _described(parameter), _NAME_WIDTH)
    return lines


def _row(name: str, text: str, width: int) -> list[str]:
    """Return the lines of a table row, with the text aligned to one column."""
    room = min(100, shutil.get_terminal_size((100, 24)).columns) - width - 2
    wrapped = textwrap.wrap(text, max(room, 30)) or [""]
    head = [f"  {name:{width}}{wrapped[0]}"] if len(name) < width else [f"  {name}"]
    rest = wrapped[1:] if len(name) < width else wrapped
    return [line.rstrip() for line in (*head, *(" " * (width + 2) + line for line in rest))]


def _described(parameter: Parameter) -> str:
    text, _, default = parameter.doc.partition("Default:")
    node = parameter.default
    if node is not None and not isinstance(node, ast.Call) and ast.unparse(node) != "None":
        value = ast.unparse(node).strip("'")
        default = f"{value.lower() if value in ('True', 'False') else value}."
    described = first_sentence(text)
    if default and default.strip() != "None.":
        described += f" Default: {first_sentence(default)}"
    return described


def _kind(parameter: Parameter) -> str:
    """Return the placeholder for the value of an argument, such as ``N`` or ``PATH``."""
    if parameter.annotation is None:
        return ""
    kinds = dict.fromkeys(_kinds(parameter.module, parameter.annotation))
    shown = "|".join(kinds)
    return shown if len(shown) <= _LONGEST_KIND else "VALUE"


def _kinds(module: str, node: ast.AST, depth: int = 5) -> list[str]:
    if isinstance(node, ast.BinOp):
        return _kinds(module, node.left, depth) + _kinds(module, node.right, depth)
    if isinstance(node, ast.Subscript):
        return _of_subscript(module, node, depth)
    if isinstance(node, ast.Constant):
        return []
    if ast.unparse(node) in _KINDS:
        return [_KINDS[ast.unparse(node)]]
    found = resolve(module, node) if depth else None
    if found and isinstance(found.node, ast.ClassDef):
        return ["VALUE" if found.module.split(".")[0] in sys.stdlib_module_names else "CLASS"]
    return _kinds(*found, depth - 1) if found and isinstance(found.node, ast.expr) else ["VALUE"]


def _of_subscript(module: str, node: ast.Subscript, depth: int) -> list[str]:
    name = last_name(node)
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        return [str(value.value) for value in inner if isinstance(value, ast.Constant)]
    if name in ("Optional", "Union"):
        return [kind for part in inner for kind in _kinds(module, part, depth)]
    if name in ("Annotated", "Callable"):
        return _kinds(module, inner[0 if name == "Annotated" else -1], depth)
    is_list = any("CLASS" in _kinds(module, part, depth) for part in inner)
    return ["CLASS" if is_list else _KINDS.get(name.lower(), "VALUE")]
