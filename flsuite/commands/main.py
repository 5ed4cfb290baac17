"""The command ``flsuite``: its subcommands, their help, and the exit status.

Importing torch and Lightning takes seconds, so they are imported only for subcommands that need
them.
"""

import atexit
import errno
import gc
import importlib
import logging
import os
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from flsuite import __version__
from flsuite.commands.parser_help import HELP, SUMMARIES
from flsuite.commands.parsers import PARSERS, parser_of
from flsuite.commands.process import (
    Ending,
    answering,
    complain,
    end_process,
    ending_on_signals,
    open_streams,
    output_fault,
    waiting,
)
from flsuite.commands.request import (
    help_topic,
    import_plugins,
    option_values,
    read_configs,
    require_config,
    with_run_folder,
)
from flsuite.commands.typos import refuse_typos
from flsuite.common.errors import (
    FederationError,
    FlsuiteError,
    is_out_of_memory,
    likeliest,
    log,
    notes_of,
    one_line,
    place_of,
    with_place,
)

_BY_LIGHTNING = ("fit", "validate", "test", "predict")  # as methods of the trainer
_READING_CONFIG = (*_BY_LIGHTNING, "partition", "schedule")  # the --config of an experiment
# Each other one is a function in the module of the same name, which takes the arguments.
_COMMANDS = (*_BY_LIGHTNING, *PARSERS)

_ANSWERING = ("fit", "resume", "ls", "report", "verify")  # these take --json

# How to continue after Ctrl-C, unless a run in its folder says it.
_AFTER_INTERRUPT = {
    "fit": "the same command starts again",
    "resume": "the same command continues the run",
    "fork": "nothing was written, and the same command starts again",
    "contribution": "the same command continues",
    "sweep": "the same command continues the sweep",
}

# What to do about an error of the system. The user can change the request in the first case, and
# something has failed in the second.
_BY_REQUEST = {
    errno.ENOENT: "name an existing file or folder",
    errno.ENOTDIR: "a file is in the way; name another folder",
    errno.EISDIR: "this is a folder; name a file",
    errno.EEXIST: "name another place",
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions, or name another place",
    errno.EROFS: "it is read-only; name another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "the link leads to itself; name another place",
}
_REMEDIES = _BY_REQUEST | {
    errno.ENOSPC: "free some space, or name another place",
    errno.EDQUOT: "free some space, or name another place",
    errno.EFBIG: "raise the limit on the size of files, see ulimit -f",
    errno.EMFILE: "raise the limit on open files, see ulimit -n",
}


def console() -> None:
    """Run the command, and end the process."""
    open_streams()
    status: int | str | None = None
    try:
        main()
    except SystemExit as end:
        status = end.code
    except OSError as error:  # from the output of --help, say
        if not (status := output_fault(error)):
            raise
    status = output_fault() or status
    if isinstance(status, int):
        end_process(status)
    if status is not None:
        sys.exit(status)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 129 after SIGHUP, 130
    after Ctrl-C, or 143 after SIGTERM. If the reader of the output has ended, it is 1 without a
    message.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    command = args[0] if args else "--help"
    try:
        "".join(args).encode()
    except UnicodeEncodeError as error:  # bytes of a file's name, say
        sys.exit(complain(f"the arguments are not UTF-8 text ({error.reason})", 2))
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
    elif command == "--version":
        print(_versions())
    elif command in _COMMANDS and (topic := help_topic(args)) is not None:
        if command in PARSERS and not (topic and command in _READING_CONFIG):
            print(parser_of(command).format_help(), end="")
        else:
            sys.exit(_help(command, topic, args))
    elif command in _COMMANDS:
        sys.exit(run_command(command, args[1:]))
    else:
        near = likeliest(command, _COMMANDS)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(_COMMANDS)}"
        sys.exit(complain(f"unknown command {command!r}; {hint}", 2))


def run_command(command: str, args: list[str]) -> int:
    """Run one subcommand, print its errors as one line each, and return the exit status.

    With ``--json``, the standard output is one object.
    """
    if command in _ANSWERING and (valued := [a for a in args if a.startswith("--json=")]):
        return complain(f"--json takes no value; write --json instead of {valued[0]}", 2)
    is_asked = command in _ANSWERING and "--json" in args
    output: AbstractContextManager[dict[str, Any]] = nullcontext({})
    with answering(command) if is_asked else output as answer:
        ending = _ended(command, args)
        for line in ending.lines:
            complain(line, ending.status)
        message = "\n".join(ending.lines)
        answer.update({"status": ending.status, "message": message, **ending.result})
    return ending.status


def _ended(command: str, args: list[str]) -> Ending:
    """Run one subcommand, and return how it ended."""
    is_debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    with ending_on_signals() as termination, _details(is_debug):
        try:
            return Ending(result=dispatch(command, args))
        except (KeyboardInterrupt, BdbQuit) as error:
            own = str(error) if command in ("fit", "fork", "verify") else ""
            how = own or _AFTER_INTERRUPT.get(command, "")
            what = "terminated" if termination.status else "interrupted"
            what += " in the debugger" if isinstance(error, BdbQuit) else ""
            line = f"{what}; {how}" if how else what
            return Ending(termination.status or 130, [line], getattr(error, "result", {}))
        except Exception as error:
            if is_debug:
                traceback.print_exception(error)
            if (ending := _ending_of(error)) is None:
                raise
            return ending._replace(result=getattr(error, "result", {}))


def _ending_of(error: Exception) -> Ending | None:
    """Return one line about an error, and the exit status. ``None`` if flsuite is to blame.

    A user's request, a user's own code, or the machine may be at fault.
    """
    notes = notes_of(error)
    if isinstance(error, FlsuiteError):
        *lines, last = map(one_line, error.args or [error])
        return Ending(2, [*lines, "; ".join([last, *notes])])
    if isinstance(error, FederationError):
        return Ending(1, ["; ".join([one_line(error), *notes])])
    if isinstance(error, OSError):  # a full or read-only disk, a missing folder
        status = output_fault(error)
        return Ending(status) if status else _disk_fault(error)
    if is_out_of_memory(error):
        advice = "choose a smaller model or smaller batches"
        return Ending(1, [f"out of memory ({one_line(error, 200)}); {advice}"])
    if not place_of(error):
        return None
    line = with_place(error, f"{type(error).__name__}: {one_line(error, 300)}")
    return Ending(1, ["; ".join([line, *(notes or ["--debug prints the traceback"])])])


@contextmanager
def _details(are_shown: bool) -> Iterator[None]:
    """Print the details of what the federation says, such as the tracebacks of its clients."""
    level = log.level
    if are_shown:
        log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        if are_shown:
            log.setLevel(level)


def _disk_fault(error: OSError) -> Ending:
    """Return which file the system refuses, what to do, and the exit status."""
    if error.errno is None or not error.strerror:
        return Ending(1, [with_place(error)])
    # A name that is too long would fill the screen.
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = " to ".join(name if len(name) <= 200 else f"{name[:60]}..." for name in names)
    text = ": ".join([*([where] if where else []), error.strerror])
    remedy = _REMEDIES.get(error.errno)
    text += f"; {remedy}" if remedy else ""
    return Ending(2 if error.errno in _BY_REQUEST else 1, [with_place(error, text)])


def _versions() -> str:
    """Return the versions of flsuite, torch and Lightning in one line, without importing them."""
    from importlib.metadata import version

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    return f"flsuite {__version__} ({packages})"


def _help(command: str, topic: str, args: list[str]) -> int:
    from flsuite.commands.parser_help import help_of

    try:
        work_here()
        import_plugins(args if topic else [])
        print(help_of(command, SUMMARIES.get(command, ""), topic), end="")
    except FlsuiteError as error:
        return complain(one_line(error), 2)
    return 0


def dispatch(command: str, args: list[str]) -> dict[str, Any]:
    """Run one subcommand, raise its errors, and return its result for other programs."""
    work_here()
    if command == "resume" or command in _BY_LIGHTNING:
        args = [arg for arg in args if arg != "--json" or command not in _ANSWERING]
        command, args = with_run_folder(command, args)
    home = f"flsuite.commands.{'fit' if command in _BY_LIGHTNING else command}"
    if command in _READING_CONFIG:
        require_config(command, args)
        needs_imports = refuse_typos(command, args)
        with waiting("loading PyTorch and Lightning"), _collecting_later():
            _prepare_engine(args)
            import_plugins(args)
            importlib.import_module(home)
            if needs_imports:
                refuse_typos(command, args, imports=True)

    module = importlib.import_module(home)
    if command in _BY_LIGHTNING:
        return module.run(command, args) or {}
    return getattr(module, command)(args) or {}


def _prepare_engine(args: list[str]) -> None:
    """Start the process that workers are forked from, unless this process can be forked later.

    It imports torch in parallel to this process. A fork happens when the engine is constructed.
    """
    trainers = [config.get("trainer") for config in read_configs(args)]
    configured = [trainer.get("engine") for trainer in trainers if isinstance(trainer, dict)]
    engines = option_values(args, "trainer.engine") or configured
    if "Processes" in str(engines) and "--print_config" not in args:
        from flsuite.federation.engines.forkserver import can_fork_later, prepare_workers

        if not can_fork_later():
            prepare_workers()


def work_here() -> None:
    """Add the working folder to the module search path, as ``python -m`` does.

    The path is absolute, because the parser changes to a config's folder while it reads it.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FlsuiteError(
            "the working folder does not exist any more; change to another one"
        ) from None
    if here not in sys.path:
        sys.path.insert(0, here)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Import without garbage collection, and exclude the imported objects from later collections.

    None of them is garbage, and a collection over them takes half a second.
    """
    if "torch" in sys.modules:  # this process also does other work
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # some libraries report objects left at exit


if __name__ == "__main__":
    console()
