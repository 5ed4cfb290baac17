"""A server on this machine that the real client of Weights & Biases accepts.

It keeps runs, history, summaries, files and views in memory. It answers just enough of the API for
runs online, their resume, and for saving a workspace or a report. Nothing leaves the machine.
"""

import gzip
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["WandbServer"]

_OPERATION = re.compile(r"\b(?:query|mutation)\s+(\w+)")
_PROJECT = {"id": "p1", "internalId": "UHI6MQ==", "name": "flsuite", "entityName": "lab"}

_PROJECTS = {
    "edges": [
        {
            "node": {**_PROJECT, "createdAt": "2026-01-01", "isBenchmark": False, "user": None},
            "cursor": "c1",
        }
    ],
    "pageInfo": {"endCursor": "c1", "hasNextPage": False},
}
_ARTIFACT = {  # of a table; it is not uploaded, because the server has it already
    "id": "a1",
    "state": "COMMITTED",
    "artifactSequence": {"id": "s1", "latestArtifact": {"id": "a1", "versionIndex": 0}},
}


class WandbServer:
    """The server, which runs in a thread until it is closed.

    Attributes:
        environment: Variables that make a client use this server, and nothing else.
        runs: Name of a run to all that the client has said of it: group, tags, config, ...
        history: Name of a run to its rows.
        summaries: Name of a run to its summary.
        views: Saved workspaces and reports, as the variables of the request.
        operations: Names of all requests, in their order.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.summaries: dict[str, dict[str, Any]] = {}
        self.views: list[dict[str, Any]] = []
        self.operations: list[str] = []
        self._lock = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  # killed clients
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self.environment = {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_MODE": "online",
            "WANDB_SILENT": "true",
            "WANDB_X_DISABLE_STATS": "true",
            "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.5",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def steps(self, run: str) -> list[int]:
        """Return W&B's own step of each row of a run."""
        with self._lock:
            return [row["_step"] for row in self.history.get(run, [])]

    def wait_for_rows(self, count: int, timeout: float = 120) -> bool:
        """Wait until some run has that many rows, and return whether it has."""
        with self._lock:
            return self._lock.wait_for(
                lambda: any(len(rows) >= count for rows in self.history.values()), timeout
            )

    # What the client sends

    def stream(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """Take lines of a run's files. A chunk replaces what is at its offset and after it."""
        run = path.rstrip("/").split("/")[-2]
        with self._lock:
            for name, chunk in (content.get("files") or {}).items():
                lines = [json.loads(line) for line in chunk["content"] if line.startswith("{")]
                if name == "wandb-history.jsonl":
                    rows = self.history.setdefault(run, [])
                    rows[chunk["offset"] : chunk["offset"] + len(lines)] = lines
                elif name == "wandb-summary.json" and lines:
                    self.summaries[run] = lines[-1]
            self._lock.notify_all()
        return {"exitcode": None, "limits": {}}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL request."""
        found = _OPERATION.search(query)
        self.operations.append(found[1] if found else "?")
        answers: tuple[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]], ...] = (
            ("upsertBucket", self._upsert_run),
            ("historyTail", self._resume),
            ("createRunFiles", self._offer_uploads),
            ("upsertView", self._save_view),
            ("models(", lambda _: {"models": _PROJECTS}),
            ("artifactType", lambda _: {"project": None}),
            ("createArtifact(", lambda _: {"createArtifact": {"artifact": _ARTIFACT}}),
            ("viewer", lambda _: {"viewer": _viewer()}),
            ("serverInfo", lambda _: {"serverInfo": {"features": [], "cliVersionInfo": {}}}),
            ("internalId", lambda _: {"project": _PROJECT}),
        )
        with self._lock:
            for word, reply in answers:
                if word in query:
                    return reply(variables)
        return {}

    def _upsert_run(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        is_new = name not in self.runs
        run = self.runs.setdefault(name, {})
        run.update({key: value for key, value in variables.items() if value is not None})
        bucket = {
            "id": f"id-{name}",
            "name": name,
            "displayName": run.get("displayName") or "unnamed",
            "config": run.get("config") or "{}",
            "sweepName": None,
            "historyLineCount": len(self.history.get(name, [])),
            "project": {**_PROJECT, "entity": {"id": "e1", "name": "lab"}},
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _resume(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Tell a client that resumes a run how far the run has come."""
        name = variables["name"]
        model: dict[str, Any] = {**_PROJECT, "entity": {"id": "e1", "name": "lab"}, "bucket": None}
        if name in self.runs:
            rows = self.history.get(name, [])
            model["bucket"] = {
                "id": f"id-{name}",
                "name": name,
                "displayName": self.runs[name].get("displayName"),
                "summaryMetrics": json.dumps(self.summaries.get(name, {})),
                "historyLineCount": len(rows),
                "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
                "eventsLineCount": 0,
                "eventsTail": "[]",
                "logLineCount": 0,
                "config": self.runs[name].get("config") or "{}",
                "tags": self.runs[name].get("tags") or [],
                "wandbConfig": '{"t": 1}',
            }
        return {"model": model}

    def _offer_uploads(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/up/{name}"} for name in variables["files"]
        ]
        offer = {"runID": variables.get("run"), "uploadHeaders": [], "files": files}
        return {"createRunFiles": offer}

    def _save_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.views.append(variables)
        view = {
            "id": "Vmlldzox",
            "type": variables.get("type"),
            "name": variables.get("name") or "nw-view",
            "displayName": variables.get("displayName"),
            "description": variables.get("description"),
            "project": {
                **_PROJECT,
                "name": variables.get("projectName"),
                "entityName": variables.get("entityName"),
            },
            "spec": variables.get("spec"),
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": "2026-01-01T00:00:00Z",
            "user": {"name": "u", "username": "u", "userInfo": {}},
        }
        return {"upsertView": {"view": view, "inserted": True}}


def _viewer() -> dict[str, Any]:
    return {
        "id": "u1",
        "username": "u",
        "name": "u",
        "email": "u@example.org",
        "entity": "lab",
        "admin": False,
        "flags": "{}",
        "teams": {"edges": []},
        "apiKeys": {"edges": []},
    }


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            self._reply({})

        def do_PUT(self) -> None:
            self._content()
            self._reply({})

        def do_POST(self) -> None:
            request = json.loads(self._content() or b"{}")
            if "file_stream" in self.path:
                self._reply(server.stream(self.path, request))
            else:
                variables = request.get("variables") or {}
                self._reply({"data": server.answer(request.get("query", ""), variables)})

        def _content(self) -> bytes:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            is_packed = self.headers.get("content-encoding") == "gzip"
            return gzip.decompress(content) if is_packed else content

        def _reply(self, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler
