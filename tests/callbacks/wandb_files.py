"""Offline runs of Weights & Biases, read back."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Recorded", "recorded"]


def records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run.

    They are protobuf messages in the framing of LevelDB's log, in blocks of 32 KiB.
    """
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            return  # W&B is still writing it
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def items(entries: Any) -> dict[str, Any]:
    return {
        entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries
    }


def finished(path: Path) -> list[Any]:
    """Return all records of an offline run, when its last one has been written.

    W&B's own process writes the file, and may do so a moment after ``finish()`` has returned.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        everything = list(records(path))
        if everything and everything[-1].WhichOneof("record_type") == "exit":
            return everything
        time.sleep(0.05)
    raise AssertionError(f"{path} has no end")


class Recorded:
    """An offline run.

    Attributes:
        id, group, name, job_type, tags: As W&B has them.
        rows: The rows, without W&B's own columns.
        steps: W&B's own step of each row.
        config, summary: As W&B has them at the end.
        step_metrics: The axis of a metric, or of a pattern.
    """

    def __init__(self, path: Path) -> None:
        self.id = path.stem.removeprefix("run-")
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.step_metrics: dict[str, str] = {}
        for record in finished(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = items(record.history.item)
                self.rows.append({k: v for k, v in row.items() if not k.startswith("_")})
                self.steps.append(record.history.step.num)
            elif kind == "config":
                self.config |= items(record.config.update)
            elif kind == "summary":
                self.summary |= items(record.summary.update)
            elif kind == "metric":
                name = record.metric.glob_name or record.metric.name
                self.step_metrics[name] = record.metric.step_metric
            elif kind == "run":
                self.group, self.name = record.run.run_group, record.run.display_name
                self.job_type, self.tags = record.run.job_type, list(record.run.tags)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Return the rows with the numbers of a round."""
        return [row for row in self.rows if "train/loss" in row]


def recorded(folder: Path) -> list[Recorded]:
    """Return the offline runs below a folder, the first one first."""
    return [Recorded(path) for path in sorted(folder.glob("**/offline-run-*/*.wandb"))]
