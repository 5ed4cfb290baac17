"""The command ``flsuite``: its subcommands, their help, and the exit status.

Importing torch and Lightning takes seconds. Nothing here imports them before the subcommand is
known to need them.
"""

import atexit
import gc
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from flsuite import __version__
from flsuite.commands.run_folder import with_run_folder
from flsuite.commands.termination import TERMINATED, ending_on_sigterm
from flsuite.errors import FederationError, FlsuiteError, one_line

_HELP = f"""flsuite {__version__}: federated-learning experiments with PyTorch Lightning

usage: flsuite COMMAND --config FILE [--KEY VALUE ...]

commands:
  new         write a model, its data and an experiment of your own, to start from
  fit         run a federation and write its folder
  resume      go on with a run: flsuite resume RUN
  ls          list runs: method, data, rounds, score, state
  validate    score a finished run on validation data
  test        score a finished run on test data: the global model and every client
  predict     write class probabilities on test data to predictions.csv, and a model's pictures
  partition   draw how a config splits the data, without training
  schedule    draw who trains when by the virtual clock, without training
  sweep       run methods x grid x seeds; killed and started again it goes on
  report      compare finished runs: mean and spread over seeds
  workspace   make the charts of a project in Weights & Biases

examples:
  flsuite fit --config configs/quickstart.yaml
  flsuite fit --config configs/quickstart.yaml --trainer.rounds 50 --data.partition.alpha 0.1
  flsuite resume runs/quickstart/TIME-SEED --trainer.rounds 100
  flsuite test runs/quickstart/TIME-SEED --ckpt_path best
  flsuite partition --config configs/quickstart.yaml
  flsuite schedule --config configs/quickstart.yaml
  flsuite sweep --config configs/sweeps/quickstart.yaml
  flsuite report runs/quickstart --metric accuracy f1_macro --html report.html

flsuite COMMAND --help lists every key; flsuite fit --config FILE --print_config prints the resolved
config. A key of a class is given without init_args:
  --trainer.aggregator FedAvgM --trainer.aggregator.momentum 0.5

The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, or 143
after SIGTERM, which clusters send before they take a machine away. A run that has ended with 1, 130
or 143 keeps its last finished round, from which --ckpt_path last goes on.
"""

_PARTITION_HELP = """usage: flsuite partition --config FILE [--output FOLDER]
                         [--data.KEY VALUE ...] [--seed_everything SEED]

Draw how a config splits the data (class by client), without training. It writes NAME-partition.png,
and the same numbers as NAME-partition.csv with the columns client, split, class, samples. NAME is
the name of the config.

  --config FILE           a config as for flsuite fit; its model and trainer are not used
  --output FOLDER         where to write; default: the working folder
  --data.KEY VALUE        override a key of the data, e.g. --data.partition.alpha 0.1
  --seed_everything SEED  the run's seed, which decides the partition unless data.seed is given
  --plugins LIST          modules to import first, e.g. '[my_package]', for short class names
"""

_SCHEDULE_HELP = """usage: flsuite schedule --config FILE [--output FOLDER] [--KEY VALUE ...]

Draw who trains when by the virtual clock, without training. It writes NAME-timeline.png, and the
same fits as NAME-timeline.csv with the columns fit, client, version, started_s, ended_s, outcome,
round, staleness, weight. NAME is the name of the config.

  --config FILE      a config as for flsuite fit
  --output FOLDER    where to write; default: the working folder
  --KEY VALUE        override a key of the config, as for flsuite fit, e.g. --trainer.rounds 20
"""

_SWEEP_HELP = """usage: flsuite sweep --config FILE [--folder FOLDER] [--workers N]
                     [--status | --dry-run] [--KEY VALUE ...]

Run methods x grid x seeds. Each cell is an ordinary run folder, FOLDER/METHOD-GRID-HASH/seed-N.
Start the same command again after a kill or an error, and it goes on: done cells are left alone,
others are resumed, failed ones are tried again. Several of these commands may work on one folder.
After a change of FILE, the new cells run. Cells that fail are listed at the end and stop nobody.

  --config FILE      a sweep, see configs/sweeps/README.md
  --folder FOLDER    the sweep's folder; default: runs/NAME, with the name of FILE
  --workers N        cells that run at a time; default: workers of FILE, else 1
  --status           print each cell's score or state, failures and the time left; run nothing
  --dry-run          build every method once, print the cells and the time left; run nothing
  --KEY VALUE        override a key of the config in all cells, e.g. --trainer.rounds 2

The exit status is 0 if all cells are done, 1 if some have failed, 2 if something is wrong in FILE,
130 after Ctrl-C, or 143 after SIGTERM.
"""

_REPORT_HELP = """usage: flsuite report FOLDER [FOLDER ...] [--metric NAME ...] [--last N]
                      [--x AXIS] [--split SPLIT] [--target VALUE] [--against METHOD]
                      [--rows SETTING --columns SETTING]
                      [--output FOLDER] [--html FILE] [--wandb PROJECT]

Compare finished runs. Every run in or below a FOLDER counts. Runs whose settings (settings.yaml)
differ in nothing but the seed are one row, named by the settings in which it differs from the other
rows, with mean and standard deviation: test scores of the last round, of the round picked on
validation data, the mean of the last rounds, and the best on test data (not an honest choice; for
comparison with published tables that were made so). Methods that have seeds in common are compared
in pairs, within the same partition: mean difference, 95 % interval and p-value of the paired
t-test, and p-value with Holm's correction over all pairs. Of a sweep, the budget of the tuning is
shown too.

  --metric NAME ...   scores of metrics.csv, e.g. accuracy f1_macro; default accuracy
  --last N            rounds in the mean of the last ones; default 10
  --x AXIS            axis of the picture and of --target: round, virtual_s, wall_s, client_updates
                      or bytes (shown in MB); default round
  --split SPLIT       data of the picture and of --target: test or val; default test
  --target VALUE      add when the score first reaches VALUE (a loss is reached from above), in
                      rounds, virtual seconds, seconds, client updates and MB: mean and standard
                      deviation over the runs that reach it, and how many do not; the group that is
                      first on the axis of --x is named
  --against METHOD    compare all others with this method, and not all pairs
  --rows SETTING --columns SETTING
                      print cross tables instead, e.g. --rows aggregator --columns attack: the
                      scores of the last round by two settings, one table for each combination of
                      the others; --output writes cross.csv, cross.md (with spreads, and the round
                      picked on validation data) and a heat map per metric
  --output FOLDER     write report.csv, report.md, report.png (curves with their range),
                      comparison.csv (pairs) and target.csv (all axes) there
  --html FILE         write one page that needs no other file and no network: tables that sort,
                      curves with bands, clients, partition, and how to run each row again; it needs
                      the extra flsuite[report]
  --wandb PROJECT     make a report with the table and charts in Weights & Biases; PROJECT or
                      ENTITY/PROJECT; needs pip install 'flsuite[workspaces]'

report.csv has the columns to_target, to_target_std and reached if there is a target. They are in
the unit of the AXIS in metrics.csv. On every axis but round, runs of one group have different
points. The picture then shows the range that all of them cover, with the last score at or before
each point.
"""

_WORKSPACE_HELP = """usage: flsuite workspace --project PROJECT [--entity ENTITY] [--name NAME]
                         [--metric NAME] [--dry-run]

Make the charts of a project in Weights & Biases: the score by round, bytes, virtual seconds and
client updates, as mean and band over the seeds of a group; last and picked round; gamma and its
parts; clients; partition; comparison of runs. It needs pip install 'flsuite[workspaces]'.

  --project PROJECT   the project of the runs
  --entity ENTITY     the user or team that owns it; default: $WANDB_ENTITY, else yours
  --name NAME         the title of the workspace; default flsuite
  --metric NAME       the score to compare; default accuracy
  --dry-run           print what would be made, without asking W&B
"""

_RESUME_HELP = """usage: flsuite resume RUN [--KEY VALUE ...]

Go on with a run in its folder, from its last finished round, with the settings of its config.yaml.
It is flsuite fit --config RUN/config.yaml --run_dir RUN --ckpt_path last.

  RUN                the folder of a run; flsuite ls lists them
  --KEY VALUE        override a key, such as --trainer.rounds 100, which extends the run
"""

_LS_HELP = """usage: flsuite ls [FOLDER ...] [--method NAME] [--data NAME] [--partition NAME]
                  [--state STATE] [--sort KEY] [--json | --csv]

List the runs in or below a FOLDER: what they are, how far they have come, their score on test data
in the last round and in the one picked on validation data, and when they last wrote something.

  FOLDER             default: runs
  --method NAME      runs of this aggregator; so are --data and --partition. A part of a name is
                     enough if no run has that name
  --state STATE      finished, interrupted, running or broken
  --sort KEY         run (default), score (best first), rounds or age
  --json, --csv      write the list to the standard output for other programs
"""

_NEW_HELP = """usage: flsuite new NAME

Write a folder NAME with my_model.py (a LightningModule), my_data.py (a LightningDataModule) and
exp.yaml (an experiment), which run as they are and are meant to be changed.
"""

_HELPS = {
    "partition": _PARTITION_HELP,
    "schedule": _SCHEDULE_HELP,
    "sweep": _SWEEP_HELP,
    "report": _REPORT_HELP,
    "workspace": _WORKSPACE_HELP,
    "resume": _RESUME_HELP,
    "ls": _LS_HELP,
    "new": _NEW_HELP,
}
_HOW_TO_GO_ON = {
    "resume": "; the same command goes on with the run",
    "fit": "; fit goes on from the last finished round with --ckpt_path last",
    "sweep": "; the same command goes on with the sweep",
}
_BINARY = (io.BufferedWriter, io.BufferedRandom)
_LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict")
_CONFIG_COMMANDS = (*_LIGHTNING_COMMANDS, "partition", "schedule")


def console() -> None:
    """Run the command in a process that has nothing else to do."""
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            _end(end.code)
        raise


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, or
    143 after SIGTERM.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    command = args[0] if args else "--help"
    if command in ("-h", "--help", "help"):
        print(_HELP, end="")
    elif command == "--version":
        print(f"flsuite {__version__}")
    elif command in _HELPS and {"-h", "--help"} & set(args):
        print(_HELPS[command], end="")
    elif command in _LIGHTNING_COMMANDS or command in _HELPS:
        sys.exit(run_command(command, args[1:]))
    else:
        known = ", ".join((*_LIGHTNING_COMMANDS, *_HELPS))
        sys.exit(_complain(f"unknown command {command!r}; there are: {known}", 2))


def run_command(command: str, args: list[str]) -> int:
    """Run one subcommand and return the exit status.

    Errors become one line.
    """
    with ending_on_sigterm() as termination:
        try:
            _run(command, args)
        except FlsuiteError as error:
            return _complain(one_line(error), 2)
        except FederationError as error:
            return _complain(one_line(error), 1)
        except OSError as error:  # a full or read-only disk, a folder that is gone
            return _complain(one_line(error), 1)
        except KeyboardInterrupt:
            how = _HOW_TO_GO_ON.get(command, "")
            if termination.has_come:
                return _complain(f"terminated{how}", TERMINATED)
            return _complain(f"interrupted{how}", 130)
    return 0


def _run(command: str, args: list[str]) -> None:
    if command in (*_LIGHTNING_COMMANDS, "resume"):
        command, args = with_run_folder(command, args)
    if command not in _CONFIG_COMMANDS:
        _call(command, args)
        return
    _prepare(args)
    if command in _LIGHTNING_COMMANDS:
        with _collecting_later():
            from flsuite.commands.fit import run

        run(command, args)
    else:
        _call(command, args)


def _call(command: str, args: list[str]) -> None:
    """Call the function that is a command, in the module of the same name."""
    getattr(importlib.import_module(f"flsuite.commands.{command}"), command)(args)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Import without garbage collection, and leave what has been imported out of it for good.

    Nothing of it is garbage, and a collection takes half a second to see that.
    """
    if "torch" in sys.modules:  # this process does more than this command
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # some libraries complain of what is left at the very end


def _end(status: int) -> None:
    """End this process without taking apart what torch and Lightning have made.

    The system frees it anyway, and Python would take more than a second for it. What a user may
    rely on at an exit happens: functions of :mod:`atexit`, and open files are written to the disk.
    Where others wait for the end of this function, as a thread or a debugger, it just returns.
    """
    watched = sys.gettrace() or sys.getprofile() or _is_monitored() or sys.flags.inspect
    if watched or threading.active_count() > 1:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to stop
    atexit._run_exitfuncs()
    # A text file writes into a binary one, which comes after it. Asking an object itself for its
    # class may call code of its own.
    objects = gc.get_objects()
    texts = [file for file in objects if issubclass(type(file), io.TextIOWrapper)]
    binaries = [file for file in objects if issubclass(type(file), _BINARY)]
    for file in (*texts, *binaries):
        with suppress(AttributeError, ValueError, OSError):  # closed, or not for writing
            file.flush()
    os._exit(status)


def _is_monitored() -> bool:
    """Return whether a profiler or a debugger has registered, which it can from Python 3.12 on."""
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(place) for place in range(6))


def _complain(message: str, status: int) -> int:
    print(f"flsuite: error: {message}", file=sys.stderr)
    return status


def _prepare(args: list[str]) -> None:
    """Import plugins, and start the process that workers are forked from if it cannot be a fork.

    Both come before the parser is built. The parser must know a plugin's classes, and the other
    process imports torch while this one does. A fork comes later, when an engine is constructed.
    """
    configs = [_read(path) for path in _values(args, "--config", "-c")]
    chosen = _values(args, "--trainer.engine") or [
        _engine(config) for config in configs
    ]  # overrides the config
    if "Processes" in str(chosen) and "--print_config" not in args and "--help" not in args:
        from flsuite.engines.forkserver import can_fork_later, prepare_workers

        if not can_fork_later():
            prepare_workers()

    if "" not in sys.path:
        sys.path.insert(0, "")  # finds a user's package in the working folder, as python -m does
    import_plugins(args)


def import_plugins(args: list[str]) -> None:
    """Import the modules that ``--plugins`` and the configs name.

    Their classes then have short names.

    Raises:
        FlsuiteError: If an import fails, or a config cannot be read.
    """
    import yaml

    configs = [_read(path) for path in _values(args, "--config", "-c")]
    try:
        given = [yaml.safe_load(value) for value in _values(args, "--plugins")]
    except yaml.YAMLError as error:
        raise FlsuiteError(f"plugins: not a list of modules ({one_line(error)})") from error
    for plugins in [*given, *(config.get("plugins") for config in configs)]:
        if not isinstance(plugins, str | list | None):
            raise FlsuiteError(f"plugins: expected a list of modules, got {plugins!r}")
        for plugin in [plugins] if isinstance(plugins, str) else plugins or []:
            if not isinstance(plugin, str):
                raise FlsuiteError(f"plugins: {plugin!r} is not the name of a module")
            try:
                importlib.import_module(plugin)
            except Exception as error:  # a module may raise anything while it is imported
                raise FlsuiteError(
                    f"plugins: cannot import {plugin!r} ({one_line(error)}); fix or install it, or "
                    "run the command in the folder that holds it"
                ) from error


def _values(args: list[str], *options: str) -> list[str]:
    found = [after for option, after in pairwise(args) if option in options]
    return found + [
        arg.split("=", 1)[1] for arg in args if arg.split("=", 1)[0] in options and "=" in arg
    ]


def _read(path: str) -> dict[str, Any]:
    import yaml

    if not Path(path).is_file():
        raise FlsuiteError(f"there is no config file {path}")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FlsuiteError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise FlsuiteError(
            f"{path} is not a config: it must be a mapping with model, data and trainer"
        )
    return content


def _engine(config: dict[str, Any]) -> Any:
    trainer = config.get("trainer")
    return trainer.get("engine") if isinstance(trainer, dict) else None


if __name__ == "__main__":
    console()
