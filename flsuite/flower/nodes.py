"""Which node is which client. Imports neither torch nor Lightning: a node answers this in a fresh process, once a run."""

import logging
import time

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flsuite.errors import FlsuiteError

__all__ = ["FAILED", "REFUSED", "Nodes", "introduce", "own_client"]

log = logging.getLogger("flsuite")

FAILED = 1000
"""The code of an error that costs the round this client."""
REFUSED = 1001
"""The code of a request that cannot be met as it stands: in the first round it ends the run, as on our own engines."""
_ANSWER_WITHIN = 300.0  # seconds; a SuperNode starts a process for it


def own_client(context: Context) -> int:
    """The client that a node is.

    Raises:
        FlsuiteError: If its configuration does not say.
    """
    client = context.node_config.get("partition-id")
    if isinstance(client, bool) or not isinstance(client, int):
        raise FlsuiteError(
            f"node {context.node_id}: partition-id says which client a node is, and it is {client!r} here; "
            "start the SuperNode with --node-config 'partition-id=0 num-partitions=2'"
        )
    return client


def introduce(message: Message, context: Context) -> Message:
    """A node's answer to who it is."""
    number = context.node_config.get("num-partitions", -1)
    return Message(
        RecordDict({"node": ConfigRecord({"client": own_client(context), "clients": number})}),
        reply_to=message,
    )


class Nodes:
    """Asks every node of a grid, once, which client it is.

    Args:
        clients: How many there are.
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._known: dict[int, int | None] = {}

    def all(self, grid: Grid) -> dict[int, int]:
        """Client to node, as soon as every client is there; Flower's own strategies wait likewise, without end.

        Raises:
            FlsuiteError: If a node is none of the clients.
        """
        told = 0.0
        while len(found := self.online(grid, strict=True)) < self.clients:
            if time.monotonic() - told > 10:
                told = time.monotonic()
                missing = [str(client) for client in range(self.clients) if client not in found]
                log.info(
                    "waiting for client %s (%d of %d are here)",
                    ", ".join(missing[:10]),
                    len(found),
                    self.clients,
                )
            time.sleep(1)
        return found

    def online(self, grid: Grid, strict: bool = False) -> dict[int, int]:
        """Client to node, of those that are connected now; a node that is none of the clients is left out, or an error."""
        here = set(grid.get_node_ids())
        self._ask(grid, sorted(here - self._known.keys()), strict)
        found: dict[int, int] = {}
        for node, client in self._known.items():
            if node not in here or client is None:
                continue
            if client in found:
                log.warning(
                    "node %d says that it is client %d, and so does node %d, which stays it",
                    node,
                    client,
                    found[client],
                )
            found.setdefault(client, node)
        return found

    def _ask(self, grid: Grid, nodes: list[int], strict: bool) -> None:
        if not nodes:
            return
        questions = [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]
        for answer in grid.send_and_receive(questions, timeout=_ANSWER_WITHIN):
            node = answer.metadata.src_node_id
            client, fault = self._read(answer)
            if fault is not None and strict:
                raise FlsuiteError(f"node {node} {fault}")
            if fault is not None:
                log.warning("node %d %s; it is left out", node, fault)
            if not answer.has_error():  # an error may pass: it is asked again
                self._known[node] = client

    def _read(self, answer: Message) -> tuple[int | None, str | None]:
        """The client, or what is wrong."""
        if answer.has_error():
            return None, f"cannot say which client it is: {answer.error.reason}"
        record = answer.content.config_records.get("node", ConfigRecord())
        client, clients = record.get("client"), record.get("clients", -1)
        if not isinstance(client, int) or not 0 <= client < self.clients:
            return (
                None,
                f"is client {client!r} (its partition-id), and data.clients is {self.clients}",
            )
        if clients not in (-1, self.clients):
            return None, (
                f"is told of {clients!r} clients (num-partitions), and data.clients is {self.clients}; "
                "start as many nodes as data.clients says, e.g. flwr run --federation-config num-supernodes"
            )
        return client, None
