"""The two halves of a Flower app, built from a flsuite config.

Flower's ``pyproject.toml`` names them and the config. The config is in the same folder, and is sent
to the nodes with the app::

    [tool.flwr.app.components]
    serverapp = "flsuite.flower.app:server_app"
    clientapp = "flsuite.flower.app:client_app"

    [tool.flwr.app.config]
    flsuite-config = "digits.yaml"
    flsuite-args = "--trainer.rounds 3"   # arguments of flsuite fit, after --config digits.yaml
    flsuite-timeout = 3600                # seconds that a round waits for the nodes

torch and Lightning are imported only where they are needed, because a node starts a process per
message.
"""

import shlex
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.flower.nodes import REFUSED, introduce

if TYPE_CHECKING:
    from flsuite.flower.client import Site

_ON_A_NODE = (
    *("--trainer.logger", "false", "--trainer.enable_checkpointing", "false"),
    *("--trainer.enable_progress_bar", "false"),
)


def _arguments(context: Context) -> tuple[str, ...]:
    """Return the run config as arguments of ``flsuite fit``."""
    name = context.run_config.get("flsuite-config")
    if not name:
        raise FlsuiteError(
            "the run config names no config: set flsuite-config under [tool.flwr.app.config], e.g. "
            '"digits.yaml"'
        )
    others = shlex.split(str(context.run_config.get("flsuite-args", "")))
    return "--config", str(_find(str(name))), *others


def _find(name: str) -> Path:
    """Return the path of the config, in the app's folder or in the working directory."""
    # Flower adds the app's folder to the import path.
    places = [Path(folder or ".", name) for folder in (*sys.path, ".")]
    config = next((place for place in places if place.is_file()), None)
    if config is None:
        raise FlsuiteError(
            f"flsuite-config: {name} is neither in the folder of the app nor in {Path.cwd()}"
        )
    return config


def _build(arguments: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Return the trainer, the model and the data module of these arguments."""
    from flsuite.commands.fit import build
    from flsuite.commands.request import import_plugins

    import_plugins(list(arguments))
    return build(list(arguments))


@lru_cache(maxsize=1)
def _kept_site(arguments: tuple[str, ...]) -> "Site":
    """Return the cached site. Flower's simulation uses it for many messages in one process."""
    from flsuite.flower.client import Site

    return Site(*_build((*arguments, *_ON_A_NODE)))


def _serve(grid: Grid, context: Context) -> None:
    """Run all rounds, on the server."""
    from flsuite.flower.server import serve

    timeout = float(context.run_config.get("flsuite-timeout", 3600))
    serve(grid, *_build(_arguments(context)), timeout=timeout)


def make_client_app(site: Callable[[Context], "Site"]) -> ClientApp:
    """Return a Flower app for nodes that are one client each, identified by ``partition-id``.

    Args:
        site: Returns the site of a node, new or cached. Called when there is work.
    """
    app = ClientApp()
    app.query()(introduce)
    app.train()(_answering(lambda message, context: site(context).train(message, context)))
    app.evaluate()(_answering(lambda message, context: site(context).evaluate(message, context)))
    return app


def _answering(
    work: Callable[[Message, Context], Message],
) -> Callable[[Message, Context], Message]:
    """Convert a request that cannot be fulfilled into an answer with the reason."""

    def answer(message: Message, context: Context) -> Message:
        try:
            return work(message, context)
        except FlsuiteError as error:
            return Message(Error(REFUSED, one_line(error)), reply_to=message)

    return answer


client_app = make_client_app(lambda context: _kept_site(_arguments(context)))
server_app = ServerApp()
server_app.main()(_serve)
