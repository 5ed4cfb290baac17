"""A plain parser for commands that need neither model nor trainer."""

import argparse
from typing import NoReturn

from flsuite.errors import FlsuiteError


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line.

    Args:
        command: Name of the command.
    """

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"flsuite {command}", add_help=False, allow_abbrev=False)
        self.command = command

    def error(self, message: str) -> NoReturn:
        raise FlsuiteError(f"{self.command}: {message}; see flsuite {self.command} --help")
