"""Reading the rows of W&B's local files."""

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flsuite.callbacks.round_numbers import LAST_NUMBER

_BLOCK = 32768  # bytes
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_ENDS_RECORD = (1, 4)  # kinds of parts: a whole record, and the last part of a record


def logged_rounds(files: Iterable[Path]) -> tuple[set[int], int]:
    """Return the rounds in the files of one run, and W&B's next step.

    Round 0 is everything sent before the first round.
    """
    rows = [row for path in files for row in logged_rows(path)]
    rounds = {int(row["round"]) for _, row in rows if LAST_NUMBER in row or row.get("round") == 0}
    return rounds, max((step for step, _ in rows), default=-1) + 1


def logged_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield W&B's step and the content of each row in a file ``run-ID.wandb``.

    The file of a killed run may end in the middle of a row.
    """
    from wandb.proto import wandb_internal_pb2

    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            yield record.history.step.num, {name: json.loads(text) for name, text in row.items()}


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file with W&B's header and the framing of LevelDB's log."""
    position, parts = _HEADER.size, b""
    while position + _HEADER.size <= len(data):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _HEADER.size:
            position += left_in_block
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        start, position = position + _HEADER.size, position + _HEADER.size + length
        if position > len(data):
            return
        parts += data[start:position]
        if kind in _ENDS_RECORD:
            yield parts
            parts = b""
