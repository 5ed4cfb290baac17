"""Describes data modules with user datasets by the content of their samples."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flsuite.common.arguments import arguments
from flsuite.common.errors import path_of
from flsuite.common.state import raw_bytes
from flsuite.data.federated import DataSplit, FederatedData
from flsuite.data.map_style import readable
from flsuite.data.module import FederatedDataModule

_PLAIN = (str, int, float, bool, type(None))
_PROBED = 32  # samples hashed of a split that is not in memory
_LONGEST = 20  # items of a list that is stored in full


def described(module: FederatedDataModule) -> dict[str, Any]:
    """Return a data module's arguments, with datasets and long lists identified by their content.

    A resume must detect changed samples, and nothing else shows them.
    """
    values = {name: _described(value) for name, value in arguments(module, inherited=True).items()}
    return values | {"content": _content(module.federated)}


def _described(value: Any) -> Any:
    if isinstance(value, (np.ndarray, Tensor)) and (value.ndim == 0 or len(value) <= _LONGEST):
        return value.tolist()
    if isinstance(value, (list, tuple, np.ndarray, Tensor)) and len(value) > _LONGEST:
        digest = hashlib.sha256()
        _add(digest, value)
        return f"{len(value)} values, content {digest.hexdigest()[:12]}"
    is_dataset = isinstance(value, Dataset) or hasattr(value, "train_dataloader")
    if not is_dataset and not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
        return value
    if isinstance(value, (str, list, tuple, Mapping)):
        return value

    # Arguments of datasets may be whole arrays, which the digest represents.
    given = arguments(value, inherited=True)
    plain = {name: item for name, item in given.items() if isinstance(item, _PLAIN)}
    return {"class_path": path_of(type(value)), "init_args": plain}


def _content(data: FederatedData) -> str:
    """Return a digest of all samples in memory, and of some samples that are not."""
    digest = hashlib.sha256()
    # Samples held out by clients are in the training split.
    val = None if data.val is None or len(data.val.rows) else data.val
    for split in (data.train, data.test, val, data.server):
        if split is None or not len(split):
            continue
        _add(digest, [len(split), split.classes])
        _add(digest, [split.x, split.y] if split.in_memory else _probe(split))
    return digest.hexdigest()[:12]


def _probe(split: DataSplit) -> Any:
    step = max(1, len(split) // _PROBED)
    with readable():
        return list(split.batches(torch.arange(0, len(split), step).split(1)))


def _add(digest: Any, value: Any) -> None:
    """Add nested data to a digest."""
    if isinstance(value, Tensor):
        digest.update(raw_bytes(value))
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _add(digest, str(key))
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
    else:
        is_plain = isinstance(value, (*_PLAIN, np.generic))
        digest.update((repr(value) if is_plain else type(value).__qualname__).encode())
