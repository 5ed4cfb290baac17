"""A parser whose errors are one line."""

import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from flsuite.errors import FlsuiteError

__all__ = ["OneLineParser", "config_name"]


class OneLineParser(LightningArgumentParser):
    """LightningCLI's parser, but an error is a :class:`FlsuiteError` with what matters of jsonargparse's account."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        raise FlsuiteError(_essence(message)) from ex


def _essence(message: str) -> str:
    """jsonargparse explains every alternative that it tried, over many lines; the last reason of the deepest key is the one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines)
    text = re.sub(r"(Given value type|Got value): .*", "", text) if len(text) > 600 else text
    return text if len(text) <= 500 else text[:497] + "..."


def config_name(paths: Any, default: str) -> str:
    """The name of the last config file given; a run folder's own ``config.yaml`` goes by the run's name."""
    from pathlib import Path

    last = [Path(str(path)) for path in paths or []][-1:]
    if not last:
        return default
    return last[0].resolve().parent.parent.name if last[0].name == "config.yaml" else last[0].stem
