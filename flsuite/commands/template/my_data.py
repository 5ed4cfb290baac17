"""The data of all clients together: any LightningDataModule. exp.yaml splits it among clients."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class MyData(LightningDataModule):
    """Scikit-learn's handwritten digits, which need no download.

    Args:
        batch_size: Samples per batch.
    """

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        x = torch.tensor(digits.images / 16, dtype=torch.float32)
        samples = TensorDataset(x, torch.tensor(digits.target))
        # A fixed seed: all runs have the same test set.
        parts = random_split(samples, [0.7, 0.1, 0.2], torch.Generator().manual_seed(0))
        self.train, self.val, self.test = parts

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=self.batch_size)
