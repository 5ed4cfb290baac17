"""Files of a run or a dataset with altered or missing bytes are read, or refused in one line."""

import contextlib
import io
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from flsuite.aggregators import FedAvgM
from flsuite.analysis import load_model
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.data.datasets import medmnist
from flsuite.federation import Asynchronous, Stragglers
from flsuite.models import MLP, Classifier
from flsuite.models.classifier import read_weights
from tests.conftest import digits, trainer
from tests.fuzz.settings import fuzzed

REFUSED = (FlsuiteError, FederationError)  # one line each

damage = st.tuples(
    st.floats(0, 1, exclude_max=True),  # where, as a share of the file
    st.one_of(
        st.integers(1, 255),  # the bits to flip there
        st.just("cut"),
        st.binary(min_size=1, max_size=40),  # what to write there
    ),
)


def damaged(content: bytes, place: float, how: int | str | bytes) -> bytes:
    """Return the bytes of a file after an accident."""
    at = int(place * len(content))
    if isinstance(how, int):
        return content[:at] + bytes([content[at] ^ how]) + content[at + 1 :] if content else b""
    if isinstance(how, bytes):
        return content[:at] + how + content[at + len(how) :]
    return content[:at]


class HalfFrozen(Classifier):
    """A classifier with an entry that nobody trains, and one that stays with the clients."""

    def ensure_built(self, spec: Any) -> None:
        super().ensure_built(spec)
        next(self.parameters()).requires_grad_(False)


def fit(folder: Path, ckpt_path: str | None, rounds: int) -> Any:
    made = trainer(
        rounds=rounds,
        run_dir=folder,
        aggregator=FedAvgM(momentum=0.9),
        schedule=Asynchronous(2, 1, speeds=Stragglers()),
    )
    model = HalfFrozen(MLP(hidden=(8,)), private=["network.3"])
    made.fit(model, digits(3), ckpt_path)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with all kinds of files: clients, versions in flight, frozen."""
    folder = tmp_path_factory.mktemp("run")
    fit(folder, None, 3)
    return folder


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


@fuzzed(12)
@given(which=st.floats(0, 1, exclude_max=True), accident=damage)
def test_a_run_with_a_damaged_file_is_resumed_or_refused(
    run: Path, tmp_path_factory: pytest.TempPathFactory, which: float, accident: Any
) -> None:
    names = files_of(run)
    name = names[int(which * len(names))]
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run, copy)
    (copy / name).write_bytes(damaged((run / name).read_bytes(), *accident))
    with contextlib.suppress(*REFUSED):
        fit(copy, "last", 4)
    shutil.rmtree(copy)


def _flip_a_number(content: bytes) -> bytes:
    """Flip a bit of a weight: torch alone would take it."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
    name, extra = struct.unpack("<HH", content[info.header_offset + 26 : info.header_offset + 30])
    at = info.header_offset + 30 + name + extra + 1
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("name", "accident", "message"),
    [
        ("checkpoints/last.ckpt", _flip_a_number, r"last\.ckpt cannot be read .*checksum of"),
        ("checkpoints/frozen.pt", _flip_a_number, r"frozen\.pt cannot be read: .*checksum of"),
        ("clients/*.pt", _flip_a_number, r"round-.*cannot be read: it is damaged.*checksum of"),
        ("clients/*.pt", lambda content: content[:100], "restore the folder clients of the run"),
        ("in_flight/*.pt", _flip_a_number, "version-.*cannot be read: it is damaged"),
        ("metrics.csv", lambda content: content.replace(b",train,", b"\xff"), r"metrics\.csv"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    run: Path, tmp_path: Path, name: str, accident: Any, message: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    for file in (tmp_path / "run").glob(name):
        file.write_bytes(accident(file.read_bytes()))
    with pytest.raises(FlsuiteError, match=message):
        fit(tmp_path / "run", "last", 4)


def test_weights_to_start_from_are_those_that_were_written(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / "model.ckpt"
    file.parent.mkdir()
    file.write_bytes(_flip_a_number((run / "checkpoints/model.ckpt").read_bytes()))
    with pytest.raises(FlsuiteError, match=r"model\.ckpt cannot be read: it is damaged"):
        load_model(tmp_path)
    with pytest.raises(FlsuiteError, match=r"pretrained.*the checksum of .* is wrong"):
        read_weights(str(file))


@fuzzed(60)
@given(accident=damage)
def test_damaged_weights_are_read_or_refused(
    run: Path, tmp_path_factory: pytest.TempPathFactory, accident: Any
) -> None:
    file = tmp_path_factory.getbasetemp() / "weights.ckpt"
    file.write_bytes(damaged((run / "checkpoints/model.ckpt").read_bytes(), *accident))
    with contextlib.suppress(*REFUSED):
        assert all(isinstance(value, torch.Tensor) for value in read_weights(str(file)).values())


@pytest.fixture(scope="module")
def archive() -> tuple[bytes, Any]:
    """Return the bytes of a small archive of images, and the description of its set."""
    arrays = {}
    for split in ("train", "val", "test"):
        arrays[f"{split}_images"] = np.zeros((6, 28, 28, 3), np.uint8)
        arrays[f"{split}_labels"] = np.arange(6, dtype=np.uint8).reshape(6, 1) % 5
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue(), medmnist._spec(medmnist._info("retinamnist"), 28)


@fuzzed(60)
@given(accident=damage)
def test_a_damaged_archive_of_images_is_read_or_refused(
    archive: tuple[bytes, Any], tmp_path_factory: pytest.TempPathFactory, accident: Any
) -> None:
    content, spec = archive
    file = tmp_path_factory.getbasetemp() / "images.npz"
    file.write_bytes(damaged(content, *accident))
    with contextlib.suppress(*REFUSED):
        for split in medmnist._read(file, spec):
            assert split.x.shape[1:] == (28, 28, 3)
