"""The help of the command and of its keys."""

import shutil
import textwrap
from collections.abc import Mapping

from flsuite import __version__
from flsuite.commands.known import (
    TRAINER,
    Argument,
    Class,
    classes,
    find,
    find_short,
    first_keys,
    plugged,
)
from flsuite.commands.typos import MODULE_TOO, did_you_mean, nearest, nearest_key, own_class
from flsuite.common.errors import FlsuiteError

SUMMARIES = {
    "fit": "Run a federation and write its folder. --ckpt_path last resumes a run.\n--json prints "
    "one object for other programs, and all else to the standard error.",
    "validate": "Score a finished run on validation data.",
    "test": "Score a finished run on test data: the global model and every client.",
    "predict": "Write class probabilities on test data to predictions.csv, and a model's pictures.",
}
HELP = f"""flsuite {__version__}: federated-learning experiments with PyTorch Lightning

usage: flsuite COMMAND --config FILE [--KEY VALUE ...]

commands:
  new           create a model, a data module and an experiment to start from
  fit           run a federation and write its folder
  resume        continue a run: flsuite resume RUN
  fork          begin a run at a moment of another one, under changed settings
  contribution  train a run again without each of its clients
  verify        do rounds of a run again, and compare them with its record
  debug         do one client's fit again, step by step, and stop at its fault
  pack          write what is needed to verify a run into one file
  ls            list runs: method, data, rounds, score, state
  validate      score a finished run on validation data
  test          score a finished run on test data: the global model and every client
  predict       write class probabilities on test data to predictions.csv, and a model's pictures
  partition     draw how a config splits the data, without training
  schedule      draw which clients train when on the virtual clock, without training
  schema        print the JSON schema of a config, for editors
  sweep         run methods x grid x seeds; can be killed and restarted
  report        compare finished runs: mean and spread over seeds
  workspace     create the charts of a project in Weights & Biases

examples:
  flsuite fit --config configs/quickstart.yaml
  flsuite fit --config configs/quickstart.yaml --trainer.rounds 50 --data.partition.alpha 0.1
  flsuite resume runs/quickstart/TIME-SEED --trainer.rounds 100
  flsuite fork runs/quickstart/TIME-SEED --at 10 --without 3
  flsuite verify runs/quickstart/TIME-SEED
  flsuite debug runs/quickstart/TIME-SEED --at 7 --client 3
  flsuite test runs/quickstart/TIME-SEED --ckpt_path best
  flsuite partition --config configs/quickstart.yaml
  flsuite schedule --config configs/asynchronous/quickstart.yaml
  flsuite sweep --config configs/sweeps/comparison.yaml
  flsuite report runs/comparison --metric accuracy f1_macro --html report.html

flsuite fit --help lists the options, --help=trainer Lightning's Trainer options, --help=KEY the
classes that a key takes, such as trainer.aggregator, and --help=CLASS the arguments of a class.
flsuite fit --config FILE --print_config prints the resolved config. --debug, with any command,
prints the traceback of an error. A key of a class is given
without init_args:
  --trainer.aggregator FedAvgM --trainer.aggregator.momentum 0.5

The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, 129
after SIGHUP, which a closed terminal sends, or 143 after SIGTERM, which clusters send before they
reclaim a machine. A run that ended with 1, 129, 130 or 143 keeps its last finished round;
--ckpt_path last continues from there.
"""


_NAME_WIDTH = 26
_FIRST = ("config", "model", "data", "ckpt_path", "run_dir", "seed_everything", "plugins")
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
    own, lightnings = _trainer_keys()
    if topic == "trainer":
        title = "keys of Lightning's Trainer for each client's fit, as --trainer.KEY VALUE:"
        whole = _described(Class("lightning.pytorch.Trainer", "", lightnings, [])).arguments
        return "\n".join(_table(title, {name: whole[name] for name in lightnings})) + "\n"
    name = topic.removeprefix("--")
    argument = _argument(command, name)
    listed = _listed(argument) if argument else {}
    if listed:
        return _of_key(name, listed)
    chosen = _class(name)
    if chosen is not None:
        return _of_class(_described(chosen))
    keys = [f"trainer.{key}" for key in own | lightnings]
    near = (
        own_class(name)
        or nearest_key(name.removeprefix("trainer."), first_keys(command), keys)
        or nearest(name, (c.name for c in classes()))
    )
    text = f"--help={topic}: no such class, and no key that takes one"
    raise FlsuiteError(text + did_you_mean(near, MODULE_TOO))


def _class(name: str) -> Class | None:
    """Return a class by its short name or its path, which may be a user's own."""
    if known := find(name) if "." in name else find_short(name):
        return known
    path = name if "." in name else plugged([c.path for c in classes()]).get(name)
    from flsuite.commands.describing import imported  # which takes a while

    return imported(path) if path else None


def _described(known: Class) -> Class:
    """Return a class with its own texts. A class of another project is imported for them."""
    if known.path.startswith("flsuite."):
        return known
    from flsuite.commands.describing import imported

    return imported(known.path) or known


def _of_command(command: str, summary: str) -> str:
    keys = first_keys(command)
    first = {f"--{name}": keys[name] for name in (*_FIRST, *keys) if name in keys}
    first["--KEY VALUE"] = Argument(text="Any key of a config, e.g. --data.partition.alpha 0.1.")
    del first["--trainer"]
    own, _ = _trainer_keys()
    federated = {name: argument for name, argument in own.items() if name not in keys}
    source = "--config FILE" if command == "fit" else "RUN | --config FILE"
    lines = [f"usage: flsuite {command} {source} [--KEY VALUE ...]", "", summary, ""]
    lines += _table("options:", first)
    lines += ["", *_table("keys of the trainer, as --trainer.KEY VALUE:", federated)]
    return "\n".join(lines) + "\n" + _EPILOG


def _of_key(name: str, listed: dict[str, Class]) -> str:
    lines = [f"--{name} takes one of these classes, or my_module.Name of your own:"]
    width = max(map(len, listed)) + 2
    for class_name, known in sorted(listed.items()):
        lines += _row(class_name, _described(known).summary, width)
    return "\n".join([*lines, "", f"The arguments of one: --help={min(listed)}"]) + "\n"


def _of_class(known: Class) -> str:
    lines = [f"{known.name}: {known.summary}", "", *_table("arguments:", known.arguments)]
    if known.is_open:
        lines += ["", f"It takes more arguments; --KEY.help {known.name} lists them."]
    return "\n".join(lines) + "\n"


def _argument(command: str, name: str) -> Argument | None:
    """Return the argument for a key such as ``data.partition``, of the first class that has it."""
    first, *rest = name.split(".")
    argument = first_keys(command).get(first)
    for inner in rest:
        owners = _listed(argument).values() if argument else ()
        argument = next((o.arguments[inner] for o in owners if inner in o.arguments), None)
    return argument


def _listed(argument: Argument) -> dict[str, Class]:
    """Return the classes that a key takes and a package or a plugin has, by name."""
    listed = {
        known.name: known
        for known in classes()
        if known.packages
        and not known.is_abstract
        and not {*argument.bases}.isdisjoint(known.bases)
        # Libraries export base classes that cannot be used as they are.
        and (known.path.startswith("flsuite.") or known.path not in argument.bases)
    }
    own = {name: _class(path) for name, path in plugged(argument.bases).items()}
    return listed | {name: known for name, known in own.items() if known}


def _trainer_keys() -> tuple[dict[str, Argument], dict[str, Argument]]:
    """Return the arguments of the trainer, and those that it passes on to Lightning's."""
    trainer, lightnings = find(TRAINER), find("lightning.pytorch.Trainer")
    assert trainer and lightnings
    passed_on = {k: v for k, v in trainer.arguments.items() if v is lightnings.arguments.get(k)}
    own = {name: v for name, v in trainer.arguments.items() if name not in passed_on}
    return own, passed_on


def _table(title: str, arguments: Mapping[str, Argument]) -> list[str]:
    lines = [title]
    for name, argument in arguments.items():
        lines += _row(f"{name} {argument.kind}".rstrip(), argument.text, _NAME_WIDTH)
    return lines


def _row(name: str, text: str, width: int) -> list[str]:
    """Return the lines of a table row, with the text aligned to one column."""
    room = min(100, shutil.get_terminal_size((100, 24)).columns) - width - 2
    wrapped = textwrap.wrap(text, max(room, 30)) or [""]
    head = [f"  {name:{width}}{wrapped[0]}"] if len(name) < width else [f"  {name}"]
    rest = wrapped[1:] if len(name) < width else wrapped
    return [line.rstrip() for line in (*head, *(" " * (width + 2) + line for line in rest))]
