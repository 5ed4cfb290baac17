"""Conversion of tensors and nested plain data to Flower records and back, bit for bit.

A tree of dicts, lists, tuples, tensors, numbers, strings, booleans and ``None`` becomes two
records: the numbered tensors, and a JSON text that says where each belongs. Nothing is pickled, so
reading an untrusted message executes nothing.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State

ARRAYS, METRICS = "arrays", "metrics"
"""The keys under which Flower's strategies and mods expect a model and metrics."""
SAMPLES = "num-examples"
"""Flower's name for the number of training samples."""
_RAW = "flsuite.raw"
_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_WITHOUT_NUMPY = [getattr(torch, name) for name in _FLOATS if hasattr(torch, name)]
_WHOLE = ("client", "round", "samples", "steps", "bytes_up", "bytes_down")
_OWN = (*_WHOLE, "class_counts", "extras", "seconds")


def to_arrays(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a state as a Flower record.

    Flower's ``to_torch_state_dict`` reads it, except for types that NumPy does not have.
    """
    return ArrayRecord({name: _array(value) for name, value in state.items()})


def to_state(record: ArrayRecord) -> State:
    """Return the state of a record, as new tensors on the CPU.

    Raises:
        TypeError, ValueError: If the record is not a state.
    """
    return {name: _tensor(array) for name, array in record.items()}


def pack(name: str, tree: Any) -> dict[str, ArrayRecord | ConfigRecord]:
    """Return plain data as the records ``<name>`` and ``<name>.tensors``.

    Raises:
        FlsuiteError: If it contains anything but plain data.
    """
    tensors: State = {}
    text = json.dumps(_encoded(tree, tensors, name))
    return {name: ConfigRecord({"tree": text}), f"{name}.tensors": to_arrays(tensors)}


def unpack(name: str, records: RecordDict) -> Any:
    """Return the plain data that :func:`pack` converted to records.

    Raises:
        KeyError, TypeError, ValueError: If it is missing or incomplete.
    """
    return _decoded(
        json.loads(str(records.config_records[name]["tree"])),
        to_state(records.array_records[f"{name}.tensors"]),
    )


def write_update(update: ClientUpdate) -> RecordDict:
    """Return an update as the content of a message."""
    rest = pack("update", {name: getattr(update, name) for name in _OWN})
    numbers = {name: float(value) for name, value in update.metrics.items()}
    metrics = MetricRecord({SAMPLES: update.samples, **numbers})
    return RecordDict({ARRAYS: to_arrays(update.state), METRICS: metrics, **rest})


def read_update(records: RecordDict) -> ClientUpdate:
    """Return the update in the content of a message.

    Raises:
        KeyError, TypeError, ValueError: If there is no valid update.
    """
    rest = unpack("update", records)
    numbers: dict[str, Any] = {name: int(rest[name]) for name in _WHOLE}
    metrics = numbers_in(records.metric_records[METRICS])
    metrics.pop(SAMPLES, None)
    if not isinstance(rest["class_counts"], Tensor) or not isinstance(rest["extras"], dict):
        raise TypeError("class counts must be a tensor, extras a dict")
    return ClientUpdate(
        **numbers,
        class_counts=rest["class_counts"],
        state=to_state(records.array_records[ARRAYS]),
        extras=rest["extras"],
        metrics=metrics,
        seconds=float(rest["seconds"]),
    )


def numbers_in(record: MetricRecord) -> dict[str, float]:
    """Return the numbers of a record.

    Raises:
        TypeError: If one of them is a list.
    """
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            raise TypeError(f"{name} must be one number")
        numbers[name] = float(value)
    return numbers


def _encoded(value: Any, tensors: State, where: str) -> Any:
    """Return a tree as JSON can hold it, and move its tensors into ``tensors``."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            number = str(len(tensors))
            tensors[number] = value
            return {"tensor": number}
        case list():
            return [_encoded(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {"tuple": _encoded(list(value), tensors, where)}
        case Mapping() if all(isinstance(key, (str, int)) for key in value):
            # Pairs, because JSON keys are text, but optimizer states have integer keys.
            pairs = value.items()
            return {"dict": [[k, _encoded(item, tensors, f"{where}.{k}")] for k, item in pairs]}
    raise FlsuiteError(
        f"{where} is a {type(value).__name__}: only tensors, numbers, text, lists and dicts can be "
        "kept or sent"
    )


def _decoded(value: Any, tensors: State) -> Any:
    """Return the tree that :func:`_encoded` encoded."""
    match value:
        case list():
            return [_decoded(item, tensors) for item in value]
        case {"tensor": number, **rest} if not rest:
            return tensors[number]
        case {"tuple": items, **rest} if not rest:
            return tuple(_decoded(item, tensors) for item in items)
        case {"dict": pairs, **rest} if not rest:
            return {key: _decoded(item, tensors) for key, item in pairs}
        case dict():
            raise ValueError(f"unknown kind of data {', '.join(value)!r}")
    return value


def _array(value: Tensor) -> Array:
    value = value.detach().cpu().contiguous()
    if value.dtype in _WITHOUT_NUMPY:
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        name = str(value.dtype).removeprefix("torch.")
        return Array(dtype=name, shape=tuple(value.shape), stype=_RAW, data=data)
    return Array(np.asarray(value.numpy()))


def _tensor(array: Array) -> Tensor:
    if array.stype != _RAW:
        return torch.from_numpy(array.numpy())
    (dtype,) = (dtype for dtype in _WITHOUT_NUMPY if str(dtype) == f"torch.{array.dtype}")
    empty = torch.empty(0, dtype=dtype)  # frombuffer rejects an empty buffer
    flat = torch.frombuffer(bytearray(array.data), dtype=dtype) if array.data else empty
    return flat.reshape(tuple(array.shape))
