"""The options of the commands that have a plain parser. Docstrings are their help.

They are declared apart from the commands, whose imports take seconds.
"""

import argparse
import inspect
from collections.abc import Callable
from typing import NoReturn

from flsuite.common.errors import FlsuiteError, likeliest

_CONFIG = "-c", "--config"


class _CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line.

    Args:
        command: Name of the command.
    """

    def __init__(self, command: str) -> None:
        plain = argparse.RawDescriptionHelpFormatter
        name = f"flsuite {command}"
        super().__init__(name, formatter_class=plain, add_help=False, allow_abbrev=False)
        self.command = command

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        known = [name for action in self._actions for name in action.option_strings]
        near = likeliest(unknown[0], known) if unknown else []
        hint = f"did you mean {near[0]}?" if near else f"see flsuite {self.command} --help"
        raise FlsuiteError(f"{self.command}: {message}; {hint}")


def parser_of(command: str) -> _CommandParser:
    """Return the parser of one of :data:`PARSERS`."""
    declare = PARSERS[command]
    parser = _CommandParser(command)
    parser.description = inspect.getdoc(declare)
    declare(parser)
    # Positional arguments come first: an option with several values would take them.
    needed = [action for action in parser._actions if action.required]
    names = [" ".join([*action.option_strings[-1:], str(action.metavar)]) for action in needed]
    parser.usage = " ".join([parser.prog, *names, "[OPTION ...]"])
    return parser


def _add_json(parser: argparse._ActionsContainer) -> None:
    how = "print one object for other programs, and everything else to the standard error"
    parser.add_argument("--json", action="store_true", help=how)


def _new(parser: _CommandParser) -> None:
    """Write a folder with my_model.py (a LightningModule), my_data.py (a LightningDataModule) and
    exp.yaml (an experiment). They run as they are; change them to your needs.
    """
    parser.add_argument("name", metavar="NAME", help="the folder")


def _resume(parser: _CommandParser) -> None:
    """Continue a run in its folder from its last finished round, with the settings of its
    config.yaml. Short for flsuite fit --config RUN/config.yaml --run_dir RUN --ckpt_path last.

    --KEY VALUE overrides a key. The limits may grow, such as --trainer.rounds 100, and loggers,
    engines and callbacks that only look on may change. What decides the weights, such as a learning
    rate, may not: flsuite fork begins a run with another one.
    """
    parser.add_argument("run", metavar="RUN", help="the folder of a run; flsuite ls lists them")


def _fork(parser: _CommandParser) -> None:
    """Begin a run at the state of RUN after a round, under changed settings: an attack that begins,
    a client that leaves, another rule or rate. What does not change keeps its random draws, so
    that a fork without changes ends like its parent, bit for bit. settings.yaml says where it
    came from, and its table has the parent's rounds before. A round that RUN has not kept
    (trainer.keep_rounds) is replayed from the nearest kept one before it, and then kept.

    --KEY VALUE overrides a key of RUN's config, as for flsuite fit. --run_dir FOLDER names the
    fork's folder; default: a new one.
    """
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of the parent")
    how = "the round after which the fork begins; 0 is the start"
    add("--at", metavar="ROUND", type=int, required=True, help=how)
    how = "clients that no longer train; all others train as they would with them"
    add("--without", metavar="CLIENT", type=int, nargs="+", default=[], help=how)


def _contribution(parser: _CommandParser) -> None:
    """Measure what each client adds to the score of a run.

    By training: the test score of the last round, from forks of RUN without the client; all others
    train when and as they would with it. By updates: an estimate without training, the validation
    score of each kept round that is aggregated again without the client, summed over the rounds;
    RUN needs trainer.keep_updates true and trainer.keep_rounds 1. Writes contribution.csv,
    cost.csv, contribution.png, and each fork's folder; the same command continues after a kill.
    Several RUNs, such as seeds of one experiment, give a mean and a spread.
    """
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="the folder of a run")
    add("--clients", metavar="LIST", default="all", help="such as 0,3,7; default: all")
    how = "the round after which the clients are gone; default 0, the start"
    add("--at", metavar="ROUND", type=int, default=0, help=how)
    how = "training (default), updates, or both with their rank correlation"
    add("--by", choices=("training", "updates", "both"), default="training", help=how)
    how = "leave-one-out (default), or shapley: clients join in random orders"
    methods = "leave-one-out", "shapley"
    add("--method", choices=methods, default=methods[0], help=how)
    how = "orders of shapley per RUN; default 10. Equal sets are scored once"
    add("--permutations", metavar="N", type=int, default=10, help=how)
    how = "shapley: who joins within X of RUN's score adds nothing; default 0"
    add("--tolerance", metavar="X", type=float, default=0.0, help=how)
    how = "the score; default accuracy. Positive values are useful clients, also of a loss"
    add("--metric", metavar="NAME", default="accuracy", help=how)
    add("--output", metavar="FOLDER", default="contribution", help="default: contribution")


def _verify(parser: _CommandParser) -> None:
    """Do some rounds of a run again, and compare them with its record.

    Weights, table and timeline are compared bit for bit. The output says what differs. It also says
    which versions, threads or kind of CPU are not those of the record. If one of these differs,
    weights may differ by 0.001 of their norm and scores by 0.01.

    The exit status is 0 if all are equal, or within this tolerance, and 1 if not. Any other status
    says nothing about the record: 2 if the request cannot be met, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run, or a file of flsuite pack")
    add("--at", metavar="ROUND", type=int, help="the kept round to begin at; default: a random one")
    add("--rounds", metavar="N", type=int, default=3, help="the number of rounds; default 3")
    how = (
        "let the config of a pack name any class, function or plugin, which runs code of its author"
    )
    add("--trust", action="store_true", help=how)
    _add_json(parser)


def _debug(parser: _CommandParser) -> None:
    """Do the fit of one client in one round of RUN again, in this process and bit for bit, and
    print the client's classes, the loss and the gradient of each step, and the batch at fault. If
    the fit raises an exception, Python's debugger (pdb) opens there. If a number is not finite, the
    training_step of that batch runs in the debugger from its first line.

    The state before the round is needed. If RUN has not kept it (trainer.keep_rounds), the rounds
    before are done again first, and the state is then kept. The exit status is 0 if the fit is
    sound, 1 if not, and 2 if the request cannot be met.
    """
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run, finished or failed; flsuite ls lists them")
    add("--at", metavar="ROUND", type=int, required=True, help="the round of the fit, from 1")
    add("--client", metavar="CLIENT", type=int, required=True, help="the number of the client")
    how = "run this step's training_step in the debugger; default: that of the batch at fault"
    add("--step", metavar="N", type=int, help=how)
    add("--no-pdb", action="store_true", help="only print, and open no debugger")


def _pack(parser: _CommandParser) -> None:
    """Write what is needed to verify a run into one file: config, settings, tables, versions, kept
    checkpoints, and digests of all of them and of the data. A run that was interrupted is named.
    """
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    how = "default: RUN.zip in the working folder"
    parser.add_argument("--output", metavar="FILE", help=how)


def _ls(parser: _CommandParser) -> None:
    """List the runs in or below a FOLDER: method, data, rounds done, the score on test data in the
    last round and in the round picked on validation data, and the time since they last wrote a
    file. Part of a name is enough for a filter if no run has exactly that name.
    """
    add = parser.add_argument
    add("folders", metavar="FOLDER", nargs="*", default=["runs"], help="default: runs")
    add("--method", metavar="NAME", help="only runs with this aggregator")
    add("--data", metavar="NAME", help="only runs on this data")
    add("--partition", metavar="NAME", help="only runs with this partition")
    states = "finished", "interrupted", "running", "failed", "broken"
    add("--state", choices=states, help="only runs in this state; failed is a run of a sweep")
    keys = "run", "score", "rounds", "age"
    add("--sort", choices=keys, default="run", help="default: run. The best score comes first")
    output = parser.add_mutually_exclusive_group()
    _add_json(output)
    output.add_argument("--csv", action="store_true", help="write the list as CSV")


def _partition(parser: _CommandParser) -> None:
    """Draw how a config splits the data (class by client), without training.

    Writes NAME-partition.png, and the same numbers to NAME-partition.csv with the columns client,
    split, class, samples. NAME-samples.csv says which client has which sample, in the columns
    sample, client, split. FromFile reads it. NAME is the name of the config.

    --data.KEY VALUE overrides a key of the data, e.g. --data.partition.alpha 0.1. --plugins LIST
    names modules to import first, e.g. '[my_package]', for short class names.
    """
    add = parser.add_argument
    how = "a config as for flsuite fit; its model and trainer are not used"
    add(*_CONFIG, metavar="FILE", required=True, help=how)
    add("--output", metavar="FOLDER", help="where to write; default: the working folder")
    how = "the run's seed, which decides the partition unless data.seed is given"
    add("--seed_everything", metavar="SEED", help=how)


def _schedule(parser: _CommandParser) -> None:
    """Draw which clients train when on the virtual clock, without training.

    Writes NAME-timeline.png, and the same fits to NAME-timeline.csv with the columns fit, client,
    version, started_s, ended_s, outcome, round, merged_s, staleness, weight. NAME is the name of
    the config.

    --KEY VALUE overrides a key of the config, e.g. --trainer.rounds 20.
    """
    add = parser.add_argument
    how = "a config as for flsuite fit"
    add(*_CONFIG, metavar="FILE", action="append", default=[], help=how)
    how = "where to write; default: the working folder"
    add("--output", metavar="FOLDER", default=".", help=how)


def _schema(parser: _CommandParser) -> None:
    """Print the JSON schema of a config, by which an editor completes keys and marks mistakes.

    Save it next to your configs, and begin each of them with the line
    # yaml-language-server: $schema=schema.json
    """


def _sweep(parser: _CommandParser) -> None:
    """Run methods x grid x seeds.

    Each cell is an ordinary run folder, FOLDER/METHOD-GRID-HASH/seed-N. Run the same command again
    after a kill or an error: it skips finished cells, resumes interrupted ones and retries failed
    ones. Several of these commands may share one folder. If FILE has changed, the new cells are
    run. Cells that fail are listed at the end and do not stop the others.

    --KEY VALUE overrides a key of the config in all cells, e.g. --trainer.rounds 2. The exit status
    is 0 if all cells are done, 1 if some have failed, 2 if FILE has an error, 130 after Ctrl-C, 129
    after SIGHUP, or 143 after SIGTERM.
    """
    add = parser.add_argument
    add(*_CONFIG, metavar="FILE", required=True, help="a sweep, see configs/guide/sweeps.md")
    how = "the sweep's folder; default: runs/NAME, with the name of FILE"
    add("--folder", metavar="FOLDER", help=how)
    how = "cells that run at the same time; default: workers of FILE, else 1"
    add("--workers", metavar="N", type=int, help=how)
    how = (
        "add seeds after those of FILE until every method's paired difference from the first one "
        "is clear: its interval, corrected for looking (alpha spending), excludes zero, or is at "
        "most until.width of FILE wide, or there are until.seeds of FILE (20)"
    )
    add("--until", choices=("decided",), help=how)
    how = "print each cell's score or state, failures and the time left; run nothing"
    add("--status", action="store_true", help=how)
    how = "build every method once, print the cells and the time left; run nothing"
    add("--dry-run", action="store_true", help=how)


def _report(parser: _CommandParser) -> None:
    """Compare all runs in or below the FOLDERs.

    Unfinished runs are left out, and a note names them, unless no run is finished. Runs whose
    settings (settings.yaml) differ in nothing but the seed form one row, named by the settings that
    differ from the other rows. Each row has the mean and standard deviation of the test score in
    the last round, in the round picked on validation data, averaged over the last rounds, and the
    best on test data (not an honest choice; for comparison with published tables that report it).
    Methods that share seeds are compared in pairs within the same partition: mean difference, 95 %
    interval and p-value of the paired t-test, and the p-value with Holm's correction over all
    pairs. For a sweep, the tuning budget is shown too.

    The numbers of target.csv are in the units of metrics.csv. On every axis but round, the runs of
    a row have different points. The picture then shows the range that all of them cover, with the
    last score at or before each point.
    """
    add = parser.add_argument
    add("folders", metavar="FOLDER", nargs="+", help="folders of runs or sweeps")
    how = (
        "scores of metrics.csv, e.g. accuracy f1_macro; default: the score by which the runs pick "
        "a round, and for a single experiment the other main scores"
    )
    add("--metric", metavar="NAME", nargs="+", help=how)
    how = "number of last rounds to average over; default 10"
    add("--last", metavar="N", type=int, default=10, help=how)
    how = "axis of the picture and of --target (bytes in MB); default round"
    axes = "round", "virtual_s", "wall_s", "client_updates", "bytes"
    add("--x", choices=axes, default="round", help=how)
    how = (
        "band around the mean curves: the range of the seeds (default), std (one standard "
        "deviation), 95 (the 95 %% interval of the mean) or none"
    )
    add("--band", choices=("range", "std", "95", "none"), default="range", help=how)
    how = "data of the picture and of --target; default test"
    add("--split", choices=("test", "val"), default="test", help=how)
    how = (
        "show when the score first reaches VALUE (a loss from above), on every axis: mean and "
        "standard deviation over the runs that reach it, and how many do not; also names the "
        "method that gets there first on the axis of --x"
    )
    add("--target", metavar="VALUE", type=float, help=how)
    how = "compare all others with this method instead of all pairs"
    add("--against", metavar="METHOD", help=how)
    how = (
        "with --columns: print cross tables instead, e.g. --rows aggregator --columns attack: the "
        "scores of the last round by two settings, one table per combination of the others; "
        "--output writes cross.csv, cross.md (with spreads, and the round picked on validation "
        "data) and a heat map per metric"
    )
    add("--rows", metavar="SETTING", help=how)
    add("--columns", metavar="SETTING", help="see --rows")
    how = (
        "write report.csv, report.md (with the pairs), report.tex (a table for a paper), "
        "report.png and report.pdf (curves), comparison.csv (pairs) and target.csv there"
    )
    add("--output", metavar="FOLDER", help=how)
    how = (
        "write one page that needs no other file and no network: sortable tables, curves with "
        "bands, clients, partition, and how to run each row again; needs pip install "
        "'flsuite[report]'"
    )
    add("--html", metavar="FILE", help=how)
    how = (
        "create a report with the table and charts in Weights & Biases; PROJECT or ENTITY/PROJECT; "
        "needs pip install 'flsuite[workspaces]'"
    )
    add("--wandb", metavar="PROJECT", help=how)
    _add_json(parser)


def _workspace(parser: _CommandParser) -> None:
    """Create the charts of a project in Weights & Biases: the score by round, bytes, virtual
    seconds and client updates, as mean and band over the seeds of a group; last and picked
    round; gamma and its parts; clients; partition; comparison of runs. Needs pip install
    'flsuite[workspaces]'.
    """
    add = parser.add_argument
    add("--project", metavar="PROJECT", required=True, help="the project of the runs")
    how = "the user or team that owns it; default: $WANDB_ENTITY, else yours"
    add("--entity", metavar="ENTITY", help=how)
    how = "the title of the workspace; default flsuite"
    add("--name", metavar="NAME", default="flsuite", help=how)
    add("--metric", metavar="NAME", default="accuracy", help="the score; default accuracy")
    how = "print what would be created, without contacting W&B"
    add("--dry-run", action="store_true", help=how)


PARSERS: dict[str, Callable[[_CommandParser], None]] = {
    "new": _new,
    "resume": _resume,
    "fork": _fork,
    "contribution": _contribution,
    "verify": _verify,
    "debug": _debug,
    "pack": _pack,
    "ls": _ls,
    "partition": _partition,
    "schedule": _schedule,
    "schema": _schema,
    "sweep": _sweep,
    "report": _report,
    "workspace": _workspace,
}
