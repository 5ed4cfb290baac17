"""The modules that ``--plugins`` and a config name, imported before the parser is built."""

import importlib

from flsuite.commands.request import option_values, read_configs
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import parse_yaml


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
