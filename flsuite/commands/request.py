"""The raw command line, before a parser has read it: its configs, its plugins, its run folder."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flsuite.common.errors import FlsuiteError, likeliest, one_line, refused_as
from flsuite.common.files import parse_yaml, read_yaml

_RUN_FILES = ("config.yaml", "metrics.csv")  # of a run from the command line
_MOST_RUNS = 3  # suggestions


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the content of a config or a sweep.

    Raises:
        FlsuiteError: If the file does not exist or is not a YAML mapping.
    """
    if not Path(path).is_file():
        here = [*Path(path).parent.glob("*.y*ml"), *Path("configs").rglob("*.yaml")]
        near = likeliest(str(path), map(str, here))
        hint = f"did you mean {near[0]}?" if near else "flsuite new NAME writes one"
        raise FlsuiteError(f"there is no config file {path}; {hint}")
    content = read_yaml(Path(path))
    if not isinstance(content, dict):
        raise FlsuiteError(
            f"{path} is not a config: it must be a mapping, as configs/quickstart.yaml is"
        )
    return content


def options(args: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a command line, without their dashes, and their values."""
    args = [f"--config{a[2:]}" if a.partition("=")[0] == "-c" else a for a in args]
    index = 0
    while index < len(args):
        name, equals, value = args[index].partition("=")
        index += 1
        if not name.startswith("--"):
            continue
        if equals:
            yield name[2:], value
        elif index < len(args) and not args[index].startswith("--"):
            yield name[2:], args[index]
            index += 1
        else:
            yield name[2:], None


def option_values(args: list[str], option: str) -> list[str]:
    """Return the values of an option, without its dashes, in their order."""
    return [value for name, value in options(args) if name == option and value is not None]


def read_configs(args: list[str]) -> list[dict[str, Any]]:
    """Return the contents of the configs that a command line names."""
    return [read_config(path) for path in option_values(args, "config")]


def read_value(text: str) -> Any:
    """Return the text parsed as YAML, or the text itself if that fails."""
    import yaml

    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def require_config(command: str, args: list[str]) -> None:
    """Refuse a command line without a config, a model or data.

    Raises:
        FlsuiteError: If all three are missing.
    """
    keys = [key for key, _ in options(args)]
    first = {key.partition(".")[0] for key in keys}
    asks = any(key.endswith(".help") or key == "print_config" for key in keys)
    if asks or first & {"config", "model", "data"}:
        return
    if command in ("validate", "test", "predict"):
        raise FlsuiteError(f"{command}: give a run, as --config runs/NAME/TIME-SEED/config.yaml")
    raise FlsuiteError(
        f"{command}: give a config, as --config configs/quickstart.yaml; "
        "flsuite new NAME writes one for your own model and data"
    )


def help_topic(args: list[str]) -> str | None:
    """Return the topic of ``--help``: empty for the whole command, ``None`` without ``--help``."""
    for index, arg in enumerate(args):
        if arg.startswith("--help="):
            return arg.removeprefix("--help=")
        if arg in ("-h", "--help"):
            after = args[index + 1 : index + 2]
            return after[0] if after and not after[0].startswith("-") else ""
    return None


def import_plugins(args: list[str]) -> None:
    """Import the modules that ``--plugins`` and the configs name.

    Their classes then have short names.

    Raises:
        FlsuiteError: If an import fails, or a config cannot be read.
    """
    import yaml

    try:
        typed = [parse_yaml(value) for value in option_values(args, "plugins")]
    except yaml.YAMLError as error:
        raise FlsuiteError(f"plugins: not a list of modules ({one_line(error)})") from error
    for plugins in [*typed, *(config.get("plugins") for config in read_configs(args))]:
        names = plugins if isinstance(plugins, list) else [plugins] * (plugins is not None)
        if not all(isinstance(name, str) for name in names):
            raise FlsuiteError(f"plugins: expected a list of modules, got {plugins!r}")
        for plugin in names:
            remedy = "fix or install it, or run the command in the folder that contains it"
            if plugin.endswith(".py"):
                remedy = f"a module has no .py: {plugin[:-3].replace('/', '.')}"
            with refused_as(f"plugins: cannot import {plugin!r}", remedy):
                importlib.import_module(plugin)


def with_run_folder(command: str, args: list[str]) -> tuple[str, list[str]]:
    """Return the command and its arguments, with a leading run folder expanded to options.

    ``resume RUN`` becomes a fit that continues from the last checkpoint. Later options win, so
    ``--ckpt_path best`` still works.

    Raises:
        FlsuiteError: If the command cannot read the folder as a run.
    """
    named = args[:1] if args and not args[0].startswith("-") else []
    if command == "resume" and not named:
        raise FlsuiteError("resume: name the folder of a run, e.g. runs/quickstart/TIME-SEED")
    if not named:
        return command, args

    folder = require_run(command, Path(named[0]))
    if command == "fit":
        raise FlsuiteError(f"fit: {folder} is a run; continue it with flsuite resume {folder}")
    options = ["--config", str(folder / "config.yaml"), "--run_dir", str(folder)]
    if command == "resume":
        return "fit", [*options, "--ckpt_path", "last", *args[1:]]
    return command, [*options, *args[1:]]


def require_run(command: str, folder: Path) -> Path:
    """Return the folder if it holds a run started from the command line.

    Raises:
        FlsuiteError: If it does not. The message names the nearest runs.
    """
    if not _is_run(folder):
        lacking = " and ".join(name for name in _RUN_FILES if not (folder / name).is_file())
        fault = f"has no {lacking}" if folder.is_dir() else "is not a folder"
        runs = _nearest(folder)
        hint = f"; did you mean {' or '.join(runs)}?" if runs else "; see flsuite ls"
        if folder.is_file() and folder.suffix in (".yaml", ".yml"):
            hint = f"; did you mean --config {folder}?"
        if lacking == "config.yaml":
            hint = "; if it was killed at its start, remove it and start the run again"
        raise FlsuiteError(f"{command}: {folder} is not a run, it {fault}{hint}")
    config = read_yaml(folder / "config.yaml")
    if not isinstance(config, dict):
        raise FlsuiteError(f"{command}: {folder / 'config.yaml'} is empty or damaged; restore it")
    if not {"model", "data", "trainer"} <= config.keys():
        raise FlsuiteError(
            f"{command}: {folder} was run from Python, so its config.yaml cannot build the "
            "model; use trainer.fit or trainer.test with run_dir and ckpt_path there"
        )
    return folder


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _RUN_FILES)


def _nearest(folder: Path) -> list[str]:
    """Return the newest runs below a folder, or runs with similar paths if it does not exist."""
    if folder.is_dir():
        newest = sorted(_runs_below(folder), key=lambda run: run.stat().st_mtime, reverse=True)
        return [str(run) for run in newest[:_MOST_RUNS]]
    # Searching the whole working folder would take long, and runs are in runs/ by default.
    above = next(parent for parent in folder.parents if parent.is_dir())
    root = Path("runs") if above.resolve() == Path.cwd() else above
    return likeliest(str(folder), map(str, _runs_below(root)), _MOST_RUNS, cutoff=0.5)


def _runs_below(root: Path) -> list[Path]:
    return [table.parent for table in root.rglob("metrics.csv") if _is_run(table.parent)]
