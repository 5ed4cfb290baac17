"""The raw command line, before any parser has read it, and the plugins that it names."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import parse_yaml, read_yaml


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a config.

    Raises:
        FlsuiteError: If the file does not exist or is not a YAML mapping.
    """
    if not Path(path).is_file():
        raise FlsuiteError(f"there is no config file {path}")
    content = read_yaml(Path(path))
    if not isinstance(content, dict):
        raise FlsuiteError(
            f"{path} is not a config: it must be a mapping with model, data and trainer"
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
                    "run the command in the folder that contains it"
                ) from error
