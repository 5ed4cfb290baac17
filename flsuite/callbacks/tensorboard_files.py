"""Reading the logged steps from TensorBoard's event files."""

import struct
from collections.abc import Iterator, Set
from pathlib import Path

_LENGTH = struct.Struct("<Q")  # before each record, with a checksum of 4 bytes
_BEFORE, _AFTER = 12, 4  # bytes around a record


def logged_steps(folder: Path, tag: str) -> Set[int] | None:
    """Return the steps logged for a tag in the event files of a version.

    The result is ``None`` if TensorBoard, which parses the events, is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        return None
    name = tag.encode()
    files = folder.glob("events.out.tfevents.*")
    # Most records have other tags, and parsing them takes long.
    matching = (record for path in files for record in _records(path) if name in record)
    events = map(Event.FromString, matching)
    return {event.step for event in events for value in event.summary.value if value.tag == tag}


def _records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of a file, which may end in the middle of one."""
    data, position = path.read_bytes(), 0
    while position + _BEFORE <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        start, position = position + _BEFORE, position + _BEFORE + length + _AFTER
        if position > len(data):
            return
        yield data[start : start + length]
