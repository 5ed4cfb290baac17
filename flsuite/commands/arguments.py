"""A plain parser for commands that need neither model nor trainer."""

import argparse
from typing import NoReturn

from flsuite.errors import FlsuiteError, likeliest


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line.

    Args:
        command: Name of the command.
    """

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"flsuite {command}", add_help=False, allow_abbrev=False)
        self.command = command

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        known = [name for action in self._actions for name in action.option_strings]
        near = likeliest(unknown[0], known) if unknown else []
        hint = f"did you mean {near[0]}?" if near else f"see flsuite {self.command} --help"
        raise FlsuiteError(f"{self.command}: {message}; {hint}")
