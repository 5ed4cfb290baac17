"""CINIC-10: tiny files in the publisher's layout, and damaged files."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from flsuite.common.errors import FlsuiteError
from flsuite.data.datasets.vision import CINIC10, CLASSES
from tests.data.readers import check, save_image


def write_cinic10(root: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write two images per class and split, the second one in gray. Return all by split."""
    images: dict[str, list[np.ndarray]] = {"train": [], "valid": [], "test": []}
    for split, kept in images.items():
        for name in CLASSES:
            colour = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            grey = rng.integers(0, 256, (32, 32), dtype=np.uint8)
            folder = root / "CINIC-10" / split / name
            save_image(folder / f"cifar10-{split}-1.png", colour)
            save_image(folder / "n02690373_1.png", grey)
            kept += [colour, np.repeat(grey[..., None], 3, axis=2)]
    return {split: np.stack(kept) for split, kept in images.items()}


def test_cinic10(tmp_path: Path, rng: np.random.Generator) -> None:
    images = write_cinic10(tmp_path, rng)
    source = CINIC10(root=str(tmp_path)).load()
    check(source, (3, 32, 32), train=20, val=20, test=20)
    assert source.val is not None and source.spec.class_names == CLASSES
    for split, arrays in (("train", source.train), ("valid", source.val), ("test", source.test)):
        assert np.array_equal(arrays.x.numpy(), images[split])
        assert arrays.y.tolist() == np.repeat(np.arange(10), 2).tolist()


def test_cinic10_uses_of_its_validation_split(tmp_path: Path, rng: np.random.Generator) -> None:
    images = write_cinic10(tmp_path, rng)
    joined = CINIC10(valid="training", root=str(tmp_path)).load()
    assert joined.val is None
    both = np.concatenate([images["train"], images["valid"]])
    assert np.array_equal(joined.train.x.numpy(), both)
    shutil.rmtree(tmp_path / "CINIC-10" / "valid")
    unused = CINIC10(valid="unused", root=str(tmp_path)).load()
    assert unused.val is None and len(unused.train) == 20


def test_cinic10_missing_or_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    write_cinic10(tmp_path, rng)
    folder = tmp_path / "CINIC-10"
    for missing in ("valid", "test/ship", "train/airplane"):
        (folder / missing).rename(tmp_path / "elsewhere")
        with pytest.raises(FlsuiteError, match=rf"CINIC10 is not in .*{missing}.*https://"):
            CINIC10(root=str(tmp_path)).load()
        (tmp_path / "elsewhere").rename(folder / missing)

    file = folder / "test" / "ship" / "n02690373_1.png"
    whole, grey, small = file.read_bytes(), *(np.zeros((n, n, 3), np.uint8) for n in (32, 16))
    for content in (whole[:80], b""):
        file.write_bytes(content)
        reason = rf"images in {folder / 'test'} are damaged .*delete them, do"
        with pytest.raises(FlsuiteError, match=reason):
            CINIC10(root=str(tmp_path)).load()
    save_image(file, small)
    with pytest.raises(FlsuiteError, match=r"are damaged \(all input arrays"):
        CINIC10(root=str(tmp_path)).load()
    file.write_bytes(whole)
    save_image(folder / "test" / "zebra" / "1.png", grey)
    with pytest.raises(FlsuiteError, match=r"are damaged \(the classes are .* zebra"):
        CINIC10(root=str(tmp_path)).load()
