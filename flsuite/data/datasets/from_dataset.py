"""Wraps map-style torch datasets, and plain Lightning data modules, as federated data."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flsuite.common.arguments import NonNegativeInt, PositiveInt, at_least, check_init
from flsuite.common.errors import FlsuiteError, log, require_instance
from flsuite.common.lightning_internals import hooks_with
from flsuite.common.random import seed_process
from flsuite.data.digest import described
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits, Task
from flsuite.data.images import Scaling
from flsuite.data.map_style import (
    Field,
    fetch,
    is_pair,
    listed,
    read_field,
    read_split,
    readable,
    require_map_style,
)
from flsuite.data.module import FederatedDataModule

_ATTRIBUTES = ("clients", "partition", "labels", "ids", "bins", "val_fraction")


class MapStyleModule(FederatedDataModule):
    """A base class of data modules with map-style datasets.

    Args:
        labels: One class per sample, for the partition and the class counts: the name of a field, a
            function of a sample, or the values of the training samples. Default: the datasets'
            ``targets`` or ``labels``, or second entries of samples that are integers.
        ids: The natural owner of each sample, given like ``labels``, for ``Natural``.
        bins: Number of quantiles into which numeric labels, or else the targets, are cut, as
            classes for the partition.
        workers: Processes that prefetch samples that do not fit into memory. Worker processes of an
            engine read without them.
        in_memory: Whether to read each sample once and keep it. Default: if each is a pair of a
            tensor or array and a number, tensor or array, all have one shape and are the same on
            every reading, and they take less than 2 GiB. ``True`` keeps other samples too, and
            reads an ``IterableDataset`` that ends. It refuses random samples.
        **kwargs: Arguments of ``FederatedDataModule``. ``resize`` and ``rgb`` are refused, and
            ``standardize`` has no effect: the datasets transform their samples themselves.
    """

    def __init__(
        self,
        labels: Field | None = None,
        ids: Field | None = None,
        bins: Annotated[int, at_least(2)] | None = None,
        workers: NonNegativeInt = 0,
        in_memory: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.resize is not None or self.rgb:
            name = "rgb" if self.resize is None else "resize"
            raise FlsuiteError(
                f"{type(self).__name__}: {name} is for flsuite's own image data; leave data.{name} "
                "out, and transform the images in the dataset"
            )
        self.labels = labels
        self.ids = ids
        self.bins = bins
        self.workers = workers
        self.in_memory = in_memory
        check_init(self, MapStyleModule)

    def described(self) -> dict[str, Any]:
        """Return the arguments for a run's settings, with datasets identified by content."""
        return described(self)

    def _published(
        self, given: Mapping[str, Any], collate: Callable[[list[Any]], Any] | None
    ) -> PublishedSplits:
        """Return the splits of the datasets. Without ``test``, that split is empty."""
        datasets = {name: dataset for name, dataset in given.items() if dataset is not None}
        if self.in_memory:
            datasets = {name: listed(dataset) for name, dataset in datasets.items()}
        require_map_style(type(self).__name__, **datasets)
        splits = {
            name: read_split(dataset, collate, self.workers, self.in_memory)
            for name, dataset in datasets.items()
        }

        if splits["train"].x.dtype == torch.float64 != torch.get_default_dtype():
            log.warning(
                "data: the samples are float64, and the layers of a model are float32 by default; "
                "convert the datasets to float32"
            )
        values = {name: self._values(one, name, splits[name]) for name, one in datasets.items()}
        if self.bins is not None and values["train"] is None:
            values = {name: _numbers(split) for name, split in splits.items()}
        classes, names, task = self._classes(splits, values)
        done = {
            name: _with(split, classes[name], self._owners(datasets[name], name), task)
            for name, split in splits.items()
        }
        done.setdefault("test", done["train"].take(torch.arange(0)))

        spec = DataSpec(_shape(splits["train"]), len(names), task, names)
        return PublishedSplits(spec, **done)

    def _values(self, dataset: Any, name: str, split: DataSplit) -> np.ndarray | None:
        """Return the label of each sample, or ``None`` if there are none."""
        if self.labels is None and _holds_classes(split):
            return split.y.numpy()
        return read_field(dataset, self.labels if _covers(self.labels, name) else None, "labels")

    def _owners(self, dataset: Any, split: str) -> Tensor | None:
        """Return the owner of each sample as a number, or ``None`` if there are none."""
        if self.ids is None or not _covers(self.ids, split):
            return None
        owners = read_field(dataset, self.ids, "ids")
        assert owners is not None
        if not np.issubdtype(owners.dtype, np.integer):
            # A name has the same number in every split, whichever owners it contains.
            owners = np.array([_number(str(owner)) for owner in owners])
        return torch.from_numpy(owners.astype(np.int64))

    def _classes(
        self, splits: dict[str, DataSplit], values: dict[str, np.ndarray | None]
    ) -> tuple[dict[str, Tensor | None], tuple[str, ...], Task]:
        """Return each split's classes, the names of the classes, and the task.

        The task is a classification only if the targets of the samples are the classes.
        """
        held = all(_holds_classes(split) for split in splits.values())
        if self.labels is None and self.bins is None and held:
            targets = torch.cat([split.y for split in splits.values()])
            if targets.min() < 0:
                raise FlsuiteError(
                    f"{type(self).__name__}: targets of classes must be 0 or above; number them "
                    "from 0, make them floats if they are not classes, or give data.labels"
                )
            names = tuple(map(str, range(int(targets.max()) + 1)))
            return dict.fromkeys(splits), names, "multiclass"

        labels = {name: own for name, own in values.items() if own is not None}
        own = labels.get("train")
        if own is None or (np.issubdtype(own.dtype, np.floating) and self.bins is None):
            # A single class, so counts per client still exist.
            return _coded({}, splits, np.zeros(0)), ("all",), "other"
        if self.bins is not None:
            numbers = {name: own.astype(np.float64) for name, own in labels.items()}
            edges = np.quantile(numbers["train"], np.arange(1, self.bins) / self.bins)
            cuts = ["-inf", *(f"{edge:.4g}" for edge in edges), "inf"]
            names = tuple(f"{a} to {b}" for a, b in pairwise(cuts))
            return _coded(numbers, splits, edges, "right"), names, "other"
        known = np.unique(np.concatenate(list(labels.values())))
        classes = _coded(labels, splits, known)
        return classes, tuple(map(str, known)), _task(classes, splits)

    def _scaling(self, train: DataSplit, spec: DataSpec) -> tuple[Scaling, tuple[int, ...]]:
        # The datasets transform their samples themselves.
        return Scaling(is_identity=True), spec.shape


class FromDataset(MapStyleModule):
    """Map-style datasets: torchvision, Hugging Face with torch format, or your own.

    Args:
        train: The training samples, which the clients share.
        test: The test samples.
        val: Validation samples for all clients. Default: each client holds out some of its samples.
        collate: The function from a list of samples to a batch, for samples of variable length or
            another structure. Default: torch's own.
        **kwargs: Arguments of ``MapStyleModule`` and ``FederatedDataModule``. Arguments about
            files have no effect. A partition by class needs ``labels``.
    """

    def __init__(
        self,
        train: Dataset,
        test: Dataset,
        val: Dataset | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.train = train
        self.test = test
        self.val = val
        self.collate = collate

    def load(self) -> PublishedSplits:
        datasets = {"train": self.train, "test": self.test, "val": self.val}
        return self._published(datasets, self.collate)


class FromDataModule(MapStyleModule):
    """Federated data from the loaders of a plain data module.

    The collate function and the number of workers come from its training loader. Its samplers are
    not used, because every client shuffles its own samples. Without a ``test_dataloader``, the
    samples of ``val_dataloader`` are the test data, and clients hold out samples for validation.
    Without both, there are no test data.

    Args:
        data: The data module.
        batch_size: Samples per training batch. Default: as in its training loader.
        **kwargs: Arguments of ``MapStyleModule`` and ``FederatedDataModule``. Arguments about files
            have no effect. A partition by class needs ``labels``.
    """

    def __init__(
        self, data: LightningDataModule, batch_size: PositiveInt | None = None, **kwargs: Any
    ) -> None:
        kwargs |= {} if batch_size is None else {"batch_size": batch_size}
        super().__init__(**kwargs)
        self.data, self._takes_batch_size = data, batch_size is None

    def load(self) -> PublishedSplits:
        kind = type(self.data).__name__
        for hook in hooks_with("batch"):
            if is_overridden(hook, self.data, LightningDataModule):
                raise FlsuiteError(
                    f"data: {hook} of {kind} is not called by clients; move it into the model"
                )
        with isolate_rng():
            # A data module may split at random, as random_split does.
            seed_process(self.partition_seed, "data")
            self.data.prepare_data()
            self.data.setup("fit")
            self.data.setup("test")
            loaders = {name: self._loader(name) for name in ("train", "val", "test")}

        train = loaders["train"]
        if train is None:
            raise FlsuiteError(f"data: {kind} has no train_dataloader; add one")
        if loaders["test"] is None and loaders["val"] is not None:
            log.warning(
                "%s has no test_dataloader: the samples of its val_dataloader are the test data; "
                "a part of each client's training samples is for validation",
                kind,
            )
            loaders["test"], loaders["val"] = loaders["val"], None

        size = train.batch_size or getattr(train.batch_sampler, "batch_size", None)
        if size and self._takes_batch_size:
            self.batch_size = size
        self.workers = self.workers or train.num_workers
        datasets = {name: one.dataset for name, one in loaders.items() if one is not None}
        return self._published(datasets, train.collate_fn)

    def _loader(self, split: str) -> DataLoader | None:
        """Return the loader of a split, or ``None`` where the data module has none."""
        name = f"{split}_dataloader"
        if not is_overridden(name, self.data, LightningDataModule):
            return None
        try:
            loader = getattr(self.data, name)()
        except NotImplementedError as error:
            place = error.__traceback__ and error.__traceback__.tb_next
            if place and place.tb_next:  # raised by what the method calls
                raise
            return None
        if isinstance(loader, (list, tuple)) and len(loader) < 2:
            loader = loader[0] if loader else None
        if loader is None:
            return None
        if not isinstance(loader, DataLoader):
            raise FlsuiteError(
                f"data: {name} of {type(self.data).__name__} must return one torch DataLoader of a "
                f"map-style dataset, got {type(loader).__name__}; join the datasets of sites with "
                "a ConcatDataset, and give data.ids and data.partition Natural"
            )
        return loader


def as_federated(datamodule: LightningDataModule) -> FederatedDataModule:
    """Return the data module itself if it is federated, else a wrapper that splits its samples.

    A plain data module may provide arguments of :class:`~flsuite.data.FromDataModule` as
    attributes.
    """
    if isinstance(datamodule, FederatedDataModule):
        return datamodule
    require_instance("fit", LightningDataModule, datamodule=datamodule)
    given = {name: getattr(datamodule, name) for name in _ATTRIBUTES if hasattr(datamodule, name)}
    made = FromDataModule(datamodule, **given)
    if "clients" not in given:
        log.info(
            "%s is split over %d clients by %s; for another split give it attributes clients and "
            "partition, or wrap it in FromDataModule",
            type(datamodule).__name__,
            made.clients,
            type(made.partition).__name__ if made.partition else "IID",
        )
    return made


def _covers(field: Field | None, split: str) -> bool:
    """Return whether a field covers a split. Given values cover the training samples alone."""
    return split == "train" or field is None or isinstance(field, str) or callable(field)


def _with(split: DataSplit, classes: Tensor | None, ids: Tensor | None, task: Task) -> DataSplit:
    """Return a split with its classes and its owners."""
    if not split.in_memory:
        assert classes is not None
        return replace(split, y=classes, ids=ids)
    y = split.y.long() if task == "multiclass" else split.y
    return replace(split, y=y, labels=classes, ids=ids)


def _shape(split: DataSplit) -> tuple[int, ...]:
    """Return the shape of the first sample's input, ``()`` if samples are not pairs."""
    if split.in_memory:
        return tuple(split.x.shape[1:])
    with readable():
        (first,) = fetch(vars(split)["dataset"], [0])
    return tuple(getattr(first[0], "shape", ())) if is_pair(first) else ()


def _numbers(split: DataSplit) -> np.ndarray | None:
    """Return the targets if they are in memory and have one number per sample, or ``None``."""
    return split.y.numpy() if split.in_memory and split.y.ndim == 1 else None


def _holds_classes(split: DataSplit) -> bool:
    """Return whether the targets are in memory and may be classes."""
    return _numbers(split) is not None and not split.y.is_floating_point()


def _coded(
    values: dict[str, np.ndarray],
    splits: dict[str, DataSplit],
    edges: np.ndarray,
    side: Literal["left", "right"] = "left",
) -> dict[str, Tensor | None]:
    """Return each value's index among the edges as its class, 0 in a split without values."""
    return {
        name: torch.from_numpy(np.searchsorted(edges, values[name], side).astype(np.int64))
        if name in values
        else torch.zeros(len(split), dtype=torch.int64)
        for name, split in splits.items()
    }


def _task(classes: dict[str, Tensor | None], splits: dict[str, DataSplit]) -> Task:
    """Return the task: a classification if the targets are the numbered labels."""
    for name, split in splits.items():
        labels = classes[name]
        assert labels is not None
        if split.in_memory:
            if split.y.ndim != 1 or not torch.equal(split.y.long(), labels):
                return "other"
            continue
        # Enough samples to see whether the labels are the targets.
        probed = torch.arange(min(16, len(split)))
        with readable():
            batch = next(split.batches([probed]))
        y = batch[1] if is_pair(batch) else None
        # The dtypes that torch's cross-entropy takes.
        if not isinstance(y, Tensor) or y.dtype not in (torch.int64, torch.uint8) or y.ndim != 1:
            return "other"
        if not torch.equal(y, labels[probed]):
            return "other"
    return "multiclass"


def _number(name: str) -> int:
    """Return a number that stands for a name, the same in every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
