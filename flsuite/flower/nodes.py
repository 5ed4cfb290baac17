"""The mapping between Flower nodes and clients.

This module imports neither torch nor Lightning, because a node answers in a new process.
"""

import time
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from flsuite.common.errors import FlsuiteError, log, one_line

FAILED = 1000
"""The code of an error that loses this client for the round."""
REFUSED = 1001
"""The code of a request that cannot be fulfilled. In the first round, it ends the run."""
_ANSWER_WITHIN = 300.0  # seconds; a SuperNode starts a process for the answer


def own_client(context: Context) -> int:
    """Return the client that a node represents.

    Raises:
        FlsuiteError: If its configuration does not name one.
    """
    client = context.node_config.get("partition-id")
    if isinstance(client, bool) or not isinstance(client, int):
        raise FlsuiteError(
            f"node {context.node_id}: partition-id must be the number of a client, got {client!r}; "
            "start the SuperNode with --node-config 'partition-id=0 num-partitions=2'"
        )
    return client


def introduce(message: Message, context: Context) -> Message:
    """Answer with this node's client, and the number of clients in its configuration."""
    number = context.node_config.get("num-partitions", -1)
    answer = ConfigRecord({"client": own_client(context), "clients": number})
    return Message(RecordDict({"node": answer}), reply_to=message)


class Nodes:
    """The nodes of a grid, which are asked once which client they are.

    Args:
        grid: The grid.
        clients: Number of clients.
        timeout: Seconds to wait for answers.

    Attributes:
        connected: Client to node, for the clients that were connected when they were last asked.
    """

    def __init__(self, grid: Grid, clients: int, timeout: float) -> None:
        self.grid, self.clients, self.timeout = grid, clients, timeout
        self.connected: dict[int, int] = {}
        self._known: dict[int, int | None] = {}

    def ask(
        self, kind: str, round: int, contents: Mapping[int, dict[str, Any]]
    ) -> dict[int, Message]:
        """Send messages to the connected clients, and return their answers by client.

        The first time, all clients must be connected.

        Args:
            kind: Flower's type of message.
            round: The round.
            contents: The records for each client.
        """
        self.connected = self.online() if self.connected else self.all()
        head, nodes = {"config": ConfigRecord({"server-round": round})}, self.connected
        messages = [
            Message(RecordDict({**head, **content}), nodes[client], kind, group_id=str(round))
            for client, content in contents.items()
            if client in nodes
        ]
        answers = self.grid.send_and_receive(messages, timeout=self.timeout)
        of_node = {answer.metadata.src_node_id: answer for answer in answers}
        return {client: of_node[node] for client, node in nodes.items() if node in of_node}

    def all(self) -> dict[int, int]:
        """Wait until every client is connected, without a limit, and return client to node.

        People start the nodes, perhaps hours later. Flower's own strategies also wait.

        Raises:
            FlsuiteError: If a node is not one of the clients.
        """
        last_logged = 0.0
        while len(connected := self.online(strict=True)) < self.clients:
            if time.monotonic() - last_logged > 10:
                last_logged = time.monotonic()
                missing = [str(c) for c in range(self.clients) if c not in connected]
                what = ", ".join(missing[:10]), len(connected), self.clients
                log.info("waiting for client %s (%d of %d are here)", *what)
            time.sleep(1)
        return connected

    def online(self, strict: bool = False) -> dict[int, int]:
        """Return client to node, for clients that are connected now.

        Args:
            strict: Refuse a node that is not one of the clients, instead of ignoring it.

        Raises:
            FlsuiteError: If ``strict``, and a node is not one of the clients.
        """
        online = set(self.grid.get_node_ids())
        self._identify(sorted(online - self._known.keys()), strict)

        connected: dict[int, int] = {}
        for node, client in self._known.items():
            if node not in online or client is None:
                continue
            if client in connected:
                what = connected[client], node, client, node
                log.warning(
                    "nodes %d and %d both say that they are client %d; node %d is left out", *what
                )
            connected.setdefault(client, node)
        return connected

    def _identify(self, nodes: list[int], strict: bool) -> None:
        if not nodes:
            return
        questions = [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]
        for answer in self.grid.send_and_receive(questions, timeout=_ANSWER_WITHIN):
            node = answer.metadata.src_node_id
            client, fault = self._read(answer)
            if fault is not None and strict:
                raise FlsuiteError(f"node {node} {fault}")
            if fault is not None:
                log.warning("node %d %s; it is left out", node, fault)
            if not answer.has_error():  # after an error, it is asked again
                self._known[node] = client

    def _read(self, answer: Message) -> tuple[int | None, str | None]:
        """Return the client that a node represents, or what is wrong with its answer."""
        if answer.has_error():
            return None, f"cannot say which client it is: {one_line(answer.error.reason, 500)}"
        record = answer.content.config_records.get("node", ConfigRecord())
        client, clients = record.get("client"), record.get("clients", -1)
        if not isinstance(client, int) or not 0 <= client < self.clients:
            return None, (
                f"is client {client!r} (its partition-id), but data.clients is {self.clients}; "
                "number the nodes from 0"
            )
        if clients not in (-1, self.clients):
            return None, (
                f"was told of {clients!r} clients (num-partitions), but data.clients is "
                f"{self.clients}; start that many nodes, e.g. flwr run --federation-config "
                f"num-supernodes={self.clients}"
            )
        return client, None
