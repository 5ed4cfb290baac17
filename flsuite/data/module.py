"""The data module that every dataset extends: from a published split to clients."""

import os
from abc import abstractmethod
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn import functional as F

from flsuite.data.augment import Augment
from flsuite.data.federated import FederatedData, Ragged, Scaling, TrainLoader
from flsuite.data.partitions import IID, Partition, partition_labels
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError
from flsuite.messages import POOLED
from flsuite.random import numpy_generator

__all__ = ["FederatedDataModule"]

_SUBSET_SEED = 0  # the subset is part of the task, not of a run


class FederatedDataModule(LightningDataModule):
    """A dataset in memory, dealt to clients. A subclass reads the files in :meth:`load` and does nothing else.

    Args:
        clients: How many clients share the training split.
        partition: How it is dealt; default :class:`~flsuite.data.partitions.IID`.
        batch_size: Samples a step.
        val_fraction: Part of each client's samples that is held out for validation. Default: none where the publisher ships
            a validation split, which then serves all; a tenth elsewhere. 0 trains on everything.
        root: Folder of the files. Default: ``$FLSUITE_DATA_ROOT``, else the reading library's own default.
        download: Fetch missing files, where the library can.
        resize: Side in pixels to which images are brought once, bilinearly. Default: as they are.
        rgb: Repeat grey images to three channels.
        standardize: Bring each channel to mean 0 and deviation 1 over the training split; otherwise pixels lie in [0, 1].
        augment: A random change of training batches.
        train_samples: Keep only this many training samples, the same ones in every run, whatever its seed; default all.
        seed: Of the partition and the splits. Default: the run's seed.

    Attributes:
        federated: The dealt dataset, after :meth:`setup`.
    """

    def __init__(
        self,
        clients: int = 10,
        partition: Partition | None = None,
        batch_size: int = 64,
        val_fraction: float | None = None,
        root: str | None = None,
        download: bool = True,
        resize: int | None = None,
        rgb: bool = False,
        standardize: bool = True,
        augment: Augment | None = None,
        train_samples: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if clients < 1:
            raise FlsuiteError(f"data.clients must be at least 1, got {clients}")
        if batch_size < 1:
            raise FlsuiteError(f"data.batch_size must be at least 1, got {batch_size}")
        if val_fraction is not None and not 0 <= val_fraction < 1:
            raise FlsuiteError(f"data.val_fraction must be in [0, 1), got {val_fraction}")
        if train_samples is not None and train_samples < 1:
            raise FlsuiteError(f"data.train_samples must be at least 1, got {train_samples}")
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
        self.seed = seed
        self._federated: FederatedData | None = None
        self._default_seed = 0

    @abstractmethod
    def load(self) -> PublishedSplits:
        """Read the published splits.

        Raises:
            FlsuiteError: If files are missing and cannot be fetched, or are damaged; the message names them and the remedy.
        """

    def data_root(self, default: str | Path) -> Path:
        """The folder of the files: argument, else ``$FLSUITE_DATA_ROOT``, else ``default``."""
        return self.root or Path(os.environ.get("FLSUITE_DATA_ROOT") or default).expanduser()

    @property
    def federated(self) -> FederatedData:
        if self._federated is None:
            raise FlsuiteError("the data is not dealt yet: call setup() of the data module first")
        return self._federated

    @property
    def spec(self) -> DataSpec:
        return self.federated.spec

    def use_seed(self, seed: int) -> None:
        """The seed of partition and splits where the argument leaves it open; another one deals anew."""
        if self.seed is None and seed != self._default_seed:
            self._federated = None
        self._default_seed = seed

    def setup(self, stage: str | None = None) -> None:
        """Read, scale and deal, once."""
        if self._federated is None:
            self._federated = self._deal(self.load())

    def train_dataloader(self) -> TrainLoader:
        """The pooled training samples, for a plain Lightning Trainer."""
        return self.federated.loader(POOLED, self.partition_seed, 0)

    @property
    def partition_seed(self) -> int:
        return self._default_seed if self.seed is None else self.seed

    def _deal(self, source: PublishedSplits) -> FederatedData:
        parts = (_subset(source.train, self.train_samples), source.test, source.val)
        train, test, val = (self._resized(part) for part in parts)
        assert train is not None and test is not None
        labels = partition_labels(train.y.numpy())
        rng = numpy_generator(self.partition_seed, "partition")
        ids = None if train.ids is None else train.ids.numpy()
        rows = (self.partition or IID())(labels, self.clients, rng, ids)
        train_rows, val_rows = self._hold_out(rows, published=val is not None)
        if ids is not None and test.ids is not None and owners_are_whole(ids, train_rows):
            test_rows = deal_by_owner(ids, train_rows, test.ids.numpy())
        else:
            test_rows = deal_like(
                labels, train_rows, partition_labels(test.y.numpy()), self.partition_seed
            )
        scaling = self._scaling(train.x)
        return FederatedData(
            spec=self._spec(source.spec, train.x, scaling),
            train=train,
            test=test,
            val=val if self.val_fraction is None else None,
            train_index=Ragged.of(train_rows),
            val_index=Ragged.of(val_rows),
            test_index=Ragged.of(test_rows),
            scaling=scaling,
            batch_size=self.batch_size,
            augment=self.augment,
        )

    def _hold_out(
        self, rows: list[np.ndarray], published: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Split each client's rows into training and validation; a client keeps at least one sample to train on."""
        fraction = (
            self.val_fraction if self.val_fraction is not None else (0.0 if published else 0.1)
        )
        if fraction == 0:
            return rows, [np.zeros(0, np.int64) for _ in rows]
        train, val = [], []
        for client, own in enumerate(rows):
            order = numpy_generator(self.partition_seed, "validation", client=client).permutation(
                own
            )
            held = min(round(fraction * len(own)), len(own) - 1)
            val.append(np.sort(order[:held]))
            train.append(np.sort(order[held:]))
        return train, val

    def _resized(self, part: DataSplit | None) -> DataSplit | None:
        if (
            part is None
            or self.resize is None
            or part.x.ndim != 4
            or part.x.shape[1:3] == (self.resize, self.resize)
        ):
            return part
        chunks = [_resize(chunk, self.resize) for chunk in part.x.split(1024)]
        return DataSplit(torch.cat(chunks), part.y, part.ids)

    def _scaling(self, x: Tensor) -> Scaling:
        if x.dtype != torch.uint8:
            return Scaling(torch.ones(1), torch.zeros(1), 1)
        channels = x.shape[-1]
        mean, std = torch.zeros(channels), torch.ones(channels)
        if self.standardize:
            mean, std = _channel_moments(x)
        return Scaling(1 / (255 * std), -mean / std, 3 if self.rgb else channels)

    @staticmethod
    def _spec(spec: DataSpec, x: Tensor, scaling: Scaling) -> DataSpec:
        shape = (scaling.channels, x.shape[1], x.shape[2]) if x.ndim == 4 else tuple(x.shape[1:])
        return DataSpec(shape, spec.num_classes, spec.task, spec.class_names)


def _subset(train: DataSplit, samples: int | None) -> DataSplit:
    """A fixed random part of the training split, in its order."""
    if samples is None or samples >= len(train):
        return train
    order = numpy_generator(_SUBSET_SEED, "subset").permutation(len(train))
    return train.take(torch.from_numpy(np.sort(order[:samples])))


def deal_like(
    labels: np.ndarray, rows: list[np.ndarray], test_labels: np.ndarray, seed: int
) -> list[np.ndarray]:
    """Deal the test samples so that each client's class mix is that of its training samples.

    The test samples of a class go to the clients in proportion to the training samples of it that they hold; each goes to
    exactly one client, unless nobody holds its class. A client with few samples may get none.
    """
    dealt: list[list[np.ndarray]] = [[] for _ in rows]
    owner = np.full(len(labels), -1)
    for client, own in enumerate(rows):
        owner[own] = client
    for label in np.unique(test_labels):
        holders = np.bincount(owner[(labels == label) & (owner >= 0)], minlength=len(rows))
        if holders.sum() == 0:
            continue
        rng = numpy_generator(seed, "test", client=int(label))
        samples = rng.permutation(np.flatnonzero(test_labels == label))
        order = rng.permutation(
            len(rows)
        )  # who gains from rounding must not depend on the client's number
        cuts = np.round(np.cumsum(holders[order]) / holders.sum() * len(samples)).astype(int)
        for client, part in zip(order, np.split(samples, cuts[:-1]), strict=True):
            dealt[client].append(part)
    return [np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64) for parts in dealt]


def owners_are_whole(ids: np.ndarray, rows: list[np.ndarray]) -> bool:
    """Whether all training samples of each natural owner lie with one client."""
    pairs = np.concatenate(
        [np.stack([ids[own], np.full(len(own), client)]) for client, own in enumerate(rows)], axis=1
    )
    return len(np.unique(pairs, axis=1).T) == len(np.unique(pairs[0]))


def deal_by_owner(
    ids: np.ndarray, rows: list[np.ndarray], test_ids: np.ndarray
) -> list[np.ndarray]:
    """Give each natural owner's test samples to the client that trains on most of the owner's samples."""
    owners, index = np.unique(ids, return_inverse=True)
    held = np.stack([np.bincount(index[own], minlength=len(owners)) for own in rows])
    keeper = dict(zip(owners.tolist(), held.argmax(0).tolist(), strict=True))
    client = np.array([keeper.get(owner, -1) for owner in test_ids.tolist()])
    return [np.flatnonzero(client == number) for number in range(len(rows))]


def _resize(x: Tensor, side: int) -> Tensor:
    scaled = F.interpolate(
        x.permute(0, 3, 1, 2).float(),
        size=(side, side),
        mode="bilinear",
        align_corners=False,
        antialias=True,
    )
    return scaled.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel in [0, 1], from the histogram of its bytes: exact and quick."""
    values = torch.arange(256, dtype=torch.float64) / 255
    moments = []
    for channel in x.unbind(-1):
        weights = torch.bincount(channel.reshape(-1), minlength=256).double()
        mean = (weights * values).sum() / weights.sum()
        moments.append((mean, ((weights * (values - mean) ** 2).sum() / weights.sum()).sqrt()))
    mean, std = (torch.stack(m).float() for m in zip(*moments, strict=True))
    return mean, std.clamp_min(1 / 255)
