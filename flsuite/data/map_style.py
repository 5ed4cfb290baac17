"""Map-style torch datasets as splits: in memory if possible, else read batch by batch."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from flsuite.common.errors import FlsuiteError, log, one_line
from flsuite.common.random import seed_cpu, torch_generator
from flsuite.common.state import raw_bytes
from flsuite.data.federated import DataSplit, unchanged


@dataclass
class _StoredSplit(DataSplit):
    """A split of a map-style dataset, for samples of any structure.

    Attributes:
        x: int64 ``(n,)``, the indices of the samples in the dataset.
        y: int64 ``(n,)``, one class per sample, for partitions.
        dataset: An object with ``__getitem__``, and optionally ``__getitems__``.
        collate: The function from a list of samples to a batch.
        workers: Processes that prefetch. A process that is itself a worker does not use them.
    """

    in_memory = False

    dataset: Any = None
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0

    def batches(
        self,
        batch_rows: Iterable[Tensor],
        to_inputs: Callable[[Tensor], Tensor] = unchanged,
        generator: torch.Generator | None = None,
    ) -> Iterator[Any]:
        """Return the batches of these rows. The samples are model inputs already.

        A dataset's own randomness depends only on the batch's seed, whichever process reads it.
        The default of ``generator`` gives the same seeds every time.
        """
        generator = generator or torch_generator(0, "samples")
        orders = [
            (int(torch.randint(1 << 62, (), generator=generator)), self.x[rows].tolist())
            for rows in batch_rows
        ]
        # A worker process of an engine may not have processes of its own.
        is_worker = multiprocessing.current_process().daemon
        loader = DataLoader(
            _Reader(self.dataset, self.collate),
            batch_size=None,
            sampler=orders,
            num_workers=0 if is_worker else min(self.workers, len(orders)),
            collate_fn=unchanged,
            generator=torch.Generator(),  # otherwise it would draw from the fit's generator
        )
        return iter(loader)

    def to(self, device: torch.device) -> "_StoredSplit":
        """Return the split itself, because batches are moved one by one."""
        return self


class _Reader(Dataset[Any]):
    """Reads a batch, given its seed and the indices of its samples."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, order: tuple[int, list[int]]) -> Any:
        seed, numbers = order
        with isolate_rng(include_cuda=False):
            seed_cpu(seed)
            return self._collated(numbers)

    def _collated(self, numbers: list[int]) -> Any:
        samples = fetch(self.dataset, numbers)
        try:
            return self.collate(samples)
        except (RuntimeError, TypeError):
            if self.collate is default_collate:
                _refuse_to_collate(numbers, samples)
            raise


def _refuse_to_collate(numbers: list[int], samples: list[Any]) -> None:
    """Name the first sample that makes no batch with the first one.

    Raises:
        _UnreadableSampleError: If there is one.
    """
    for number, sample in zip(numbers, samples, strict=True):
        try:
            default_collate([samples[0], sample])
        except (RuntimeError, TypeError) as error:
            pair = " and ".join(map(str, dict.fromkeys([numbers[0], number])))
            raise _UnreadableSampleError(
                f"data: samples do not make a batch: {pair} ({one_line(error, 150)}); return "
                "tensors of one shape, or give FromDataset or your DataLoader a collate function"
            ) from error


class _UnreadableSampleError(Exception):
    """Names an unreadable sample. During a fit, it fails the client. Earlier, it is fatal."""


def fetch(dataset: Any, numbers: list[int]) -> list[Any]:
    """Return these samples, in one call if the dataset supports it.

    Raises:
        _UnreadableSampleError: If reading a sample raises.
    """
    if hasattr(dataset, "__getitems__"):
        with suppress(Exception):  # reading one by one shows which sample it is
            return list(dataset.__getitems__(numbers))
    return [_sample(dataset, number) for number in numbers]


def _sample(dataset: Any, number: int) -> Any:
    try:
        return dataset[number]
    except Exception as error:
        raise _UnreadableSampleError(
            f"data: sample {number} of {len(dataset)} in {type(dataset).__name__} cannot be read "
            f"({type(error).__name__}: {one_line(error, 200)})"
        ) from error


Field = str | Callable[[Any], Any] | Sequence[Any]
"""One value per sample: the name of a field, a function of a sample, or the values themselves."""

_LABELS = ("targets", "labels")  # attributes of torchvision datasets
_LONGEST = 1_000_000  # maximum samples of an IterableDataset
_LIMIT = 2 << 30  # maximum bytes of a split in memory
_PROBED = 16  # samples read twice, to detect random transforms
_CHUNK = 64  # samples read in one call


def require_map_style(owner: str, **datasets: Any) -> None:
    """Refuse a dataset that is not map-style, or is empty."""
    for name, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            raise FlsuiteError(
                f"{owner}: {name} is an IterableDataset, whose samples cannot be divided over "
                "clients, because they have no numbers; give a map-style dataset, or set "
                "in_memory: true to read it once, if it ends"
            )
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise FlsuiteError(
                f"{owner}: {name} must be a map-style dataset, with __len__ and __getitem__, got "
                f"{type(dataset).__name__}"
            )
        if not len(dataset):
            raise FlsuiteError(f"{owner}: {name} has no samples")
        if isinstance(dataset, tuple) and isinstance(dataset[0], (Tensor, np.ndarray)):
            raise FlsuiteError(
                f"{owner}: {name} must be a dataset of samples, got a tuple of tensors or arrays; "
                "wrap tensors in torch.utils.data.TensorDataset(x, y)"
            )


def listed(dataset: Any) -> Any:
    """Return the samples of an ``IterableDataset``, which must end, or another dataset as it is.

    Raises:
        FlsuiteError: If it cannot be read, or does not end.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset
    name, samples = type(dataset).__name__, list[Any]()
    with isolate_rng(include_cuda=False):
        seed_cpu(0)
        try:
            samples.extend(islice(dataset, _LONGEST + 1))
        except Exception as error:
            raise FlsuiteError(
                f"data: sample {len(samples)} of {name} cannot be read "
                f"({type(error).__name__}: {one_line(error, 200)})"
            ) from error
    if len(samples) > _LONGEST:
        raise FlsuiteError(
            f"data.in_memory: {name} has more than {_LONGEST:,} samples, or never ends; let its "
            "__iter__ end, or give a map-style dataset"
        )
    return samples


def _read_once(dataset: Any) -> list[Any]:
    """Return all samples. Random ones are refused, because a list would freeze one draw of each."""
    if not _are_equal(*_read_twice(dataset)):
        raise FlsuiteError(
            f"data.in_memory: samples of {type(dataset).__name__} differ from one reading to the "
            "next, as random transforms do, and memory would freeze them; leave in_memory out"
        )
    return list(_samples(dataset))


def _read_twice(dataset: Any) -> list[list[Any]]:
    """Return the first samples, read with two seeds."""
    probed = list(range(min(_PROBED, len(dataset))))
    return [_seeded(dataset, probed, seed) for seed in (0, 1)]


def _are_equal(ours: Any, theirs: Any) -> bool:
    """Return whether nested data are the same, bit for bit."""
    (own, structure), (other, its) = tree_flatten(ours), tree_flatten(theirs)
    return structure == its and all(map(_is_equal, own, other))


def _is_equal(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, (Tensor, np.ndarray)):
        return bool(ours == theirs) or repr(ours) == repr(theirs)  # NaN is not equal to itself
    if type(ours) is not type(theirs) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    both = [raw_bytes(x) if isinstance(x, Tensor) else x.tobytes() for x in (ours, theirs)]
    return both[0] == both[1]


def read_split(
    dataset: Any,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    in_memory: bool | None = None,
) -> DataSplit:
    """Return a dataset's samples, in memory or read on demand.

    Pairs of a tensor or array and a number, tensor or array, all of one shape, become two tensors.
    Other samples that are kept in memory become a list.

    Args:
        dataset: The samples.
        collate: The function from a list of samples to a batch. Default: torch's own.
        workers: Processes that prefetch samples that are not in memory.
        in_memory: Whether to keep samples in memory. Default: if they are such pairs, the same on
            every reading, and take less than 2 GiB.

    Raises:
        FlsuiteError: If samples cannot be kept in memory as requested.
    """
    collate = collate or default_collate
    may_stack = in_memory is not False and collate is default_collate
    if may_stack and isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        return DataSplit(x, y)
    if in_memory:
        dataset = _read_once(dataset)
    is_plain = may_stack and (in_memory or _is_plain(dataset))
    if is_plain and (split := _stacked(list(_samples(dataset)))) is not None:
        return split

    rows = torch.arange(len(dataset))
    workers = 0 if in_memory else workers
    return _StoredSplit(
        rows, torch.zeros_like(rows), dataset=dataset, collate=collate, workers=workers
    )


def read_field(dataset: Any, field: Field | None, name: str) -> np.ndarray | None:
    """Return one value per sample, or ``None`` if there are none.

    Args:
        dataset: The samples.
        field: The source of the values. Default: the attribute ``targets`` or ``labels``, else the
            second entries of samples that are integers.
        name: The argument's name, for messages.

    Raises:
        FlsuiteError: If there is no such field, or not one value per sample.
    """
    if field is None:
        values = _attribute(dataset, _LABELS)
        values = _classes_in_pairs(dataset) if values is None else values
    elif isinstance(field, str):
        values = _named(dataset, field, name)
    elif callable(field):
        values = [field(sample) for sample in _samples(dataset)]
    else:
        values = field
    if values is None:
        return None

    array = np.asarray([v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for v in values])
    if array.ndim == 2 and array.shape[1] == 1:  # as in medmnist
        array = array[:, 0]
    if array.ndim == 1 and len(array) == len(dataset):
        return array
    if field is None:  # not labels, but for example boxes
        return None
    raise FlsuiteError(
        f"data.{name} must give one value per sample: {len(dataset)} are expected, got values of "
        f"shape {array.shape}"
    )


def _named(dataset: Any, field: str, name: str) -> Any:
    """Return the values of a field, from a column or sample by sample."""
    if field in (getattr(dataset, "column_names", None) or ()):  # for Hugging Face datasets
        return list(dataset[field])
    if (values := _attribute(dataset, (field,))) is not None:
        return values
    first = next(_samples(dataset))
    names = first if isinstance(first, dict) else {}
    if field not in names:
        there_are = ", ".join(names) or type(first).__name__
        raise FlsuiteError(
            f"data.{name}: there is no field {field!r} in a sample, which has {there_are}; give a "
            "function of a sample, or the values themselves"
        )
    return [sample[field] for sample in _samples(dataset)]


def _samples(dataset: Any) -> Iterator[Any]:
    """Yield all samples."""
    for first in range(0, len(dataset), _CHUNK):
        yield from _seeded(dataset, list(range(first, min(first + _CHUNK, len(dataset)))), 0)


def _classes_in_pairs(dataset: Any) -> list[int] | None:
    """Return the second entries of all samples, or ``None`` if one is not a whole number."""
    values: list[int] = []
    try:
        (first,) = _seeded(dataset, [0], 0)
        if _class_in_pair(first) is None:
            return None  # without reading the others
        for sample in _samples(dataset):
            if (value := _class_in_pair(sample)) is None:
                return None
            values.append(value)
    except FlsuiteError as error:
        log.warning("the classes of the samples are not known: %s", error)
        return None
    return values


def is_pair(sample: Any) -> bool:
    """Return whether a sample or a batch consists of an input and a target."""
    return isinstance(sample, (tuple, list)) and len(sample) == 2


def _class_in_pair(sample: Any) -> int | None:
    """Return the second entry of a pair if it is a whole number, which may be a class."""
    value = sample[1] if is_pair(sample) else None
    if getattr(value, "ndim", None) == 0:  # a tensor, an array or a NumPy number
        value = value.item()  # type: ignore[union-attr]
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _attribute(dataset: Any, names: Sequence[str]) -> Any:
    """Return the values of an attribute of a dataset, or of the datasets that it wraps."""
    if isinstance(dataset, Subset):
        values = _attribute(dataset.dataset, names)
        return None if values is None else [values[number] for number in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        columns = [_attribute(one, names) for one in dataset.datasets]
        if any(column is None for column in columns):
            return None
        return [value for column in columns for value in column]
    for name in names:
        values = getattr(dataset, name, None)
        if values is not None and not callable(values) and hasattr(values, "__len__"):
            return values
    return None


def _is_plain(dataset: Any) -> bool:
    """Return whether the samples are pairs of tensors that can be kept in memory."""
    first, again = _read_twice(dataset)
    split = _stacked(first)
    if split is None or not _are_equal(first, again):  # a random transform must not be frozen
        return False
    return len(dataset) * (split.x[0].nbytes + 8 * split.y[0].numel()) <= _LIMIT


def _is_stackable(sample: Any) -> bool:
    arrays = Tensor, np.ndarray
    if not is_pair(sample) or not isinstance(sample[0], arrays):
        return False
    return isinstance(sample[1], (*arrays, int, float, np.number))


def _tensor(value: Any) -> Tensor:
    """Return a value as a tensor. An array may be flipped, or in another byte order."""
    if isinstance(value, np.ndarray):
        value = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value)


def _stacked(samples: list[Any]) -> DataSplit | None:
    """Return samples as two tensors, or ``None`` if they are not pairs of one shape."""
    if not all(map(_is_stackable, samples)):
        return None
    try:
        x, y = (torch.stack([_tensor(sample[part]) for sample in samples]) for part in (0, 1))
    except (RuntimeError, TypeError, ValueError):  # such as arrays of words
        return None
    # Python's and numpy's numbers are float64, and models are float32.
    return DataSplit(x, y.float() if y.dtype == torch.float64 else y)


def _seeded(dataset: Any, numbers: list[int], seed: int) -> list[Any]:
    with isolate_rng(include_cuda=False), readable():
        seed_cpu(seed)
        return fetch(dataset, numbers)


@contextmanager
def readable() -> Iterator[None]:
    """End the command with one line if a sample cannot be read."""
    try:
        yield
    except _UnreadableSampleError as error:
        raise FlsuiteError(str(error)) from error
