"""The base class of all data modules, which splits published data over clients."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import LightningDataModule

from flsuite.common.arguments import (
    BelowOne,
    BelowOneOrNumber,
    NonNegativeInt,
    PositiveInt,
    Range,
    Seed,
    arguments,
    check_init,
)
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import POOLED
from flsuite.common.random import numpy_generator
from flsuite.data.arguments import PlainArguments, snapshot
from flsuite.data.federated import DataSpec, DataSplit, FederatedData, PublishedSplits, Rows
from flsuite.data.images import Augment, Scaling, fit_scaling, resize_images
from flsuite.data.loader import TrainLoader
from flsuite.data.partitions.base import Partition, checked_rows, partition_labels
from flsuite.data.partitions.shares import IID
from flsuite.data.skews import Skew, skewed
from flsuite.data.splits import (
    fixed_subset,
    hold_out,
    hold_out_for_server,
    hold_out_named,
    split_test_by_owner,
    split_test_like_train,
)

_BATCH_ARGUMENTS = {"batch_size", "augment"}
"""The arguments that affect only batches."""

_Part = Annotated[
    tuple[float, float],
    Range(
        "a start and an end with 0 <= start < end <= 1",
        lambda part: len(part) == 2 and 0 <= part[0] < part[1] <= 1,
    ),
]


class FederatedDataModule(PlainArguments, LightningDataModule):
    """A dataset in memory that is split over clients.

    A subclass reads the files in :meth:`load`, and stores each parameter of its ``__init__`` under
    the same name.

    Args:
        clients: Number of clients that share the training split.
        partition: The rule that splits it. Default: :class:`~flsuite.data.partitions.IID`.
        batch_size: Samples per training batch.
        val_fraction: The fraction of each client's samples to hold out for validation. Default: 0
            if there is a published validation split, which is then used for all clients, else 0.1.
            With 0, clients train on all their samples.
        root: The folder of the files. Default: ``$FLSUITE_DATA_ROOT``, else the default of the
            library that reads them.
        download: Whether to download missing files, if the library supports it.
        resize: Side in pixels to which images are resized, bilinearly, once. Default: their own.
        rgb: Whether to repeat gray images to three channels.
        standardize: Whether to scale each channel to mean 0 and standard deviation 1 over the
            training split. Otherwise pixels are in [0, 1].
        augment: A random augmentation of training batches.
        train_samples: Number of training samples to keep, the same ones for every seed. Default:
            all.
        test_samples: The same for the test split. Each client's own model is scored on all of it.
        seed: The seed of the partition and the splits. Default: the run's seed.
        server_samples: Number of training samples held by the server, drawn uniformly at random by
            the seed, whatever the partition. Clients share the rest: with the same seed and another
            number, a client has other samples. Default: 0.
        train_part: The part of the training split to use, as start and end in a fixed random order,
            the same for every seed. ``[0.0, 0.2]`` and ``[0.2, 1.0]`` are disjoint: a model can be
            pre-trained on one and federated on the other. ``train_samples`` counts within the part.
            Default: all.
        unseen_clients: The clients, the last ones, that stay outside the federation: a fraction
            below 1.0, at least one client if it is above 0, or their number as an integer.
            After the last round, they are scored on test data of their own class mix, see
            ``trainer.adapt_epochs``. They hold out no samples for validation.
        skew: A change of each client's own samples, such as ``FeatureSkew``. Default: none.

    Attributes:
        federated: The dataset split over clients, after :meth:`setup`.
    """

    def __init__(
        self,
        clients: PositiveInt = 10,
        partition: Partition | None = None,
        batch_size: PositiveInt = 64,
        val_fraction: BelowOne | None = None,
        root: str | Path | None = None,
        download: bool = True,
        resize: PositiveInt | None = None,
        rgb: bool = False,
        standardize: bool = True,
        augment: Augment | None = None,
        train_samples: PositiveInt | None = None,
        test_samples: PositiveInt | None = None,
        seed: Seed | None = None,
        server_samples: NonNegativeInt = 0,
        train_part: _Part | None = None,
        unseen_clients: BelowOneOrNumber = 0.0,
        skew: Skew | None = None,
    ) -> None:
        super().__init__()
        self.clients = clients
        self.partition = partition
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.root = Path(root).expanduser() if root else None
        self.download = download
        self.resize = resize
        self.rgb = rgb
        self.standardize = standardize
        self.augment = augment
        self.train_samples = train_samples
        self.test_samples = test_samples
        self.seed = seed
        self.server_samples = server_samples
        self.train_part = train_part
        self.unseen_clients = unseen_clients
        self.skew = skew

        # The result of setup(), the settings that it was computed with, and the run's seed.
        self._federated: FederatedData | None = None
        self._split_with: dict[str, Any] = {}
        self._default_seed = 0

        FederatedDataModule._check_arguments(self)

    @abstractmethod
    def load(self) -> PublishedSplits:
        """Read the published splits.

        Raises:
            FlsuiteError: If files are missing and cannot be downloaded, or are damaged. The message
                names them and says what to do.
        """

    def data_root(self, default: str | Path = "~/.cache/flsuite") -> Path:
        """Return the folder of the files: ``root``, ``$FLSUITE_DATA_ROOT`` or ``default``."""
        return Path(self.root or os.environ.get("FLSUITE_DATA_ROOT") or default).expanduser()

    @property
    def federated(self) -> FederatedData:
        """Return the dataset split over clients."""
        if self._federated is None:
            raise FlsuiteError(
                "the data is not split over clients yet: call setup() of the data module first"
            )
        return self._federated

    @property
    def spec(self) -> DataSpec:
        """Return the description that a model is built from."""
        return self.federated.spec

    @property
    def partition_seed(self) -> int:
        """Return the seed of the partition and the splits."""
        return self._default_seed if self.seed is None else self.seed

    def use_seed(self, seed: int) -> None:
        """Set the seed of the partition and the splits, unless the argument ``seed`` is given."""
        self._default_seed = seed

    def setup(self, stage: str | None = None) -> None:
        """Read the data and split it, again if an argument or the seed has changed."""
        settings = self._settings()
        before = self._split_with
        changed = {name for name in settings if settings[name] != before.get(name)}
        if changed:
            self._check_arguments()

        if self._federated is None or not changed <= _BATCH_ARGUMENTS:
            self._federated = None  # released first, so only one dataset must fit into memory
            self._federated = self._make()
        elif changed:
            # All clients keep their rows, so the files are not read again.
            self._federated = replace(
                self._federated, batch_size=self.batch_size, augment=self.augment
            )
        self._split_with = self._settings()  # load() may have set an argument

    def _check_arguments(self) -> None:
        """Refuse invalid arguments, at the start and after a change."""
        check_init(self, FederatedDataModule)

    def train_dataloader(self) -> TrainLoader:
        """Return the training samples of all clients together, for a plain Lightning Trainer."""
        return TrainLoader(self.federated, POOLED, self.partition_seed, 0)

    def _settings(self) -> dict[str, Any]:
        """Return a snapshot of everything that the result of :meth:`setup` depends on."""
        values = arguments(self, inherited=True) | {"partition_seed": self.partition_seed}
        return {name: snapshot(value) for name, value in values.items()}

    def _make(self) -> FederatedData:
        """Read the published splits and split them over clients."""
        partition = self.partition or IID()
        published = partition.arranged(self.load().numbered())
        train, server, val, test = self._samples(published)
        rows = self._rows(partition, train, published.spec)
        unseen = self._number_unseen()
        train_rows, val_rows = self._held_out(train, rows, unseen, has_val=val is not None)
        test_rows = self._test_rows(train, test, rows, train_rows)

        if self.skew is not None:
            of_data = self.skew, published.spec, self.partition_seed
            train = skewed(train, train_rows, *of_data, "train")
            # Held-out rows are in the training split too, but their labels are not changed.
            train = skewed(train, val_rows, *of_data, "val")
            test = skewed(test, test_rows, *of_data, "test")
        if val is None or self.val_fraction is not None or train.held is not None:
            own = replace(train, rows=Rows.of(val_rows)).owned()
            val = own if len(own) else None

        scaling, shape = self._scaling(train, published.spec)
        return FederatedData(
            spec=replace(published.spec, shape=shape),
            train=replace(train.shared(), rows=Rows.of(train_rows)),
            test=replace(test.shared(), rows=Rows.of(test_rows)),
            val=val,
            scaling=scaling,
            batch_size=self.batch_size,
            augment=self.augment,
            server=server,
            unseen=unseen,
        )

    def _samples(
        self, published: PublishedSplits
    ) -> tuple[DataSplit, DataSplit | None, DataSplit | None, DataSplit]:
        """Return the training, server, validation and test samples, resized."""
        # Select the subset first, so only its images are resized.
        train = self._resized(fixed_subset(published.train, self.train_samples, self.train_part))
        held = self.server_samples, self.clients, self.partition_seed
        train, server = hold_out_for_server(train, *held)
        test = self._resized(fixed_subset(published.test, self.test_samples))
        val = None if published.val is None else self._resized(published.val)
        _check_shapes(train, {"test": test, "validation": val})
        return train, server, val, test

    def _rows(self, partition: Partition, train: DataSplit, spec: DataSpec) -> Rows:
        """Return the rows that the partition draws for each client."""
        # A partition receives one class per sample and the owners, never the samples themselves.
        labels = partition_labels(train.classes.numpy())
        ids = None if train.ids is None else train.ids.numpy()
        rng = numpy_generator(self.partition_seed, "partition")
        _check_labels(partition, spec)
        rows = partition(labels, self.clients, rng, ids)
        return checked_rows(partition, rows, len(labels), self.clients)

    def _held_out(
        self, train: DataSplit, rows: Rows, unseen: int, has_val: bool
    ) -> tuple[Rows, Rows]:
        """Return each client's training rows and validation rows.

        A published validation split is the default, and an explicit fraction replaces it. Samples
        that are held out by name replace both.
        """
        default = 0.0 if has_val else 0.1
        fraction = default if self.val_fraction is None else self.val_fraction
        inside = self.clients - unseen
        own = rows.part(0, inside)
        if train.held is None:
            train_rows, val_rows = hold_out(own, fraction, self.partition_seed)
        else:
            train_rows, val_rows = hold_out_named(own, train.held)
        if unseen:
            train_rows = Rows.of([*train_rows, *rows.part(inside, self.clients)])
        return train_rows, val_rows

    def _test_rows(self, train: DataSplit, test: DataSplit, rows: Rows, train_rows: Rows) -> Rows:
        """Return the rows of the test split that each client is tested on.

        Clients that are groups of owners are tested on their owners' data. All others are tested on
        their training class mix, because their test data would otherwise be IID.
        """
        if train.ids is not None and test.ids is not None:
            by_owner = split_test_by_owner(train.ids.numpy(), rows, test.ids.numpy())
            if by_owner is not None:
                return by_owner
        labels, test_labels = (partition_labels(split.classes.numpy()) for split in (train, test))
        return split_test_like_train(labels, train_rows, test_labels, self.partition_seed)

    def _number_unseen(self) -> int:
        """Return the number of clients outside the federation."""
        share = unseen = self.unseen_clients
        if isinstance(share, float):
            unseen = max(1, int(share * self.clients + 0.5)) if share else 0
        if unseen >= self.clients:
            raise FlsuiteError(
                f"data.unseen_clients: {share} of {self.clients} clients leaves none "
                "in the federation; lower it, or set more data.clients"
            )
        return int(unseen)

    def _scaling(self, train: DataSplit, spec: DataSpec) -> tuple[Scaling, tuple[int, ...]]:
        """Return one scaling for all clients, and the resulting shape of a sample."""
        # Fitted on all training samples.
        scaling = fit_scaling(train.x, self.standardize, self.rgb)
        shape = tuple(train.x.shape[1:])
        return scaling, (scaling.channels, *shape[:-1]) if train.x.ndim in (4, 5) else shape

    def _resized(self, split: DataSplit) -> DataSplit:
        """Return the split with its images in the size of the argument ``resize``."""
        return replace(split, x=resize_images(split.x, self.resize))


def _check_shapes(train: DataSplit, others: Mapping[str, DataSplit | None]) -> None:
    """Refuse splits whose samples differ in shape from the training samples."""
    shape = tuple(train.x.shape[1:])
    for name, split in others.items():
        # The samples of a map-style dataset may have any shape.
        if type(split) is type(train) and (own := tuple(split.x.shape[1:])) != shape:
            raise FlsuiteError(
                f"data: the {name} samples have shape {own}, and the training samples {shape}; "
                "resize them to one shape"
            )


def _check_labels(partition: Partition, spec: DataSpec) -> None:
    """Refuse samples without classes if the split depends on them."""
    if partition.needs_labels and spec.num_classes < 2:
        raise FlsuiteError(
            f"data.partition: {type(partition).__name__} splits by class, but these samples have "
            "no classes (one whole number per sample, at least two different ones); set "
            "data.labels (a field's name, a function or an array; with data.bins for numbers), or "
            "data.partition to IID, QuantitySkew or Natural"
        )
