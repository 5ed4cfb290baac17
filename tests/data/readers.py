"""Shared helpers for tests of the readers of images."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flsuite.data.federated import DataSplit, PublishedSplits


def check(source: PublishedSplits, shape: tuple[int, ...], **sizes: int) -> None:
    """Check sizes, shapes and dtypes of an image set."""
    channels, *sides = shape
    assert source.spec.shape == shape
    assert len(source.spec.class_names) == source.spec.num_classes
    for split, size in sizes.items():
        arrays = getattr(source, split)
        assert isinstance(arrays, DataSplit)
        assert arrays.x.shape == (size, *sides, channels)
        assert arrays.x.dtype == torch.uint8
        assert arrays.x.is_contiguous()
        if source.spec.task == "multilabel":
            assert arrays.y.shape == (size, source.spec.num_classes)
            assert arrays.y.dtype == torch.uint8
        else:
            assert arrays.y.shape == (size,) and arrays.y.dtype == torch.int64
            assert arrays.y.min() >= 0 and arrays.y.max() < source.spec.num_classes


def save_image(file: Path, pixels: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
