"""Wraps a plain Lightning data module as federated data."""

import logging
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from flsuite.common.arguments import PositiveInt
from flsuite.common.errors import FlsuiteError, require_instance
from flsuite.common.random import seed_process
from flsuite.data.datasets.from_dataset import MapStyleModule
from flsuite.data.map_style import Field
from flsuite.data.module import FederatedDataModule
from flsuite.data.partitions.base import Partition
from flsuite.data.spec import PublishedSplits

log = logging.getLogger("flsuite")

_ATTRIBUTES = ("clients", "partition", "labels", "ids", "bins", "val_fraction")
_BATCH_HOOKS = ("on_after_batch_transfer", "on_before_batch_transfer", "transfer_batch_to_device")


class FromDataModule(MapStyleModule):
    """Federated data from the loaders of a plain data module.

    The collate function and the number of workers come from its training loader. Its samplers are
    not used, because every client shuffles its own samples. Without a ``test_dataloader``, the
    samples of ``val_dataloader`` are the test data, and clients hold out samples for validation.

    Args:
        data: The data module.
        clients: Number of clients that share the training samples.
        partition: The rule that splits them. Default: :class:`~flsuite.data.partitions.IID`. A
            partition by class needs ``labels``.
        batch_size: Samples per training batch. Default: as in its training loader.
        **kwargs: Arguments of ``MapStyleModule`` and ``FederatedDataModule``. Arguments about files
            have no effect.
    """

    def __init__(
        self,
        data: LightningDataModule,
        clients: int = 10,
        partition: Partition | None = None,
        labels: Field | None = None,
        batch_size: PositiveInt | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs |= {} if batch_size is None else {"batch_size": batch_size}
        super().__init__(clients=clients, partition=partition, labels=labels, **kwargs)
        self.data, self._takes_batch_size = data, batch_size is None

    def load(self) -> PublishedSplits:
        kind = type(self.data).__name__
        for hook in _BATCH_HOOKS:
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
        if loaders["test"] is None:
            if loaders["val"] is None:
                raise FlsuiteError(f"data: {kind} has no test_dataloader; add one")
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
        datasets = {name: loader.dataset for name, loader in loaders.items() if loader is not None}
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
        if isinstance(loader, (list, tuple)) and len(loader) == 1:
            loader = loader[0]
        if loader is None or (isinstance(loader, (list, tuple)) and not loader):
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
