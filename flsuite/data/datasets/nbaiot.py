"""N-BaIoT: traffic of nine IoT devices, benign and under two botnets, Gafgyt (BASHLITE) and Mirai.

Source: Meidan et al., "N-BaIoT: Network-based Detection of IoT Botnet Attacks Using Deep
Autoencoders", IEEE Pervasive Computing 17(3), 2018, arXiv:1805.03409;
https://archive.ics.uci.edu/dataset/442.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from flsuite.common.arguments import Range, at_least, check_init
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import number_in
from flsuite.common.random import numpy_generator
from flsuite.data.datasets.csv_files import csv_frames, csv_header, fit_scale, numeric_chunks
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits
from flsuite.data.module import FederatedDataModule
from flsuite.data.splits import evenly_held_out

DEVICES = (
    "Danmini_Doorbell",
    "Ecobee_Thermostat",
    "Ennio_Doorbell",
    "Philips_B120N10_Baby_Monitor",
    "Provision_PT_737E_Security_Camera",
    "Provision_PT_838_Security_Camera",
    "Samsung_SNH_1011_N_Webcam",
    "SimpleHome_XCS7_1002_WHT_Security_Camera",
    "SimpleHome_XCS7_1003_WHT_Security_Camera",
)
WITHOUT_MIRAI = (3, 7)
GAFGYT = tuple(f"gafgyt.{name}" for name in ("combo", "junk", "scan", "tcp", "udp"))
_MIRAI = tuple(f"mirai.{name}" for name in ("ack", "scan", "syn", "udp", "udpplain"))
TRAFFIC = ("benign", *GAFGYT, *_MIRAI)
_FEATURES = 115
_REMEDY = (
    "download the set from https://archive.ics.uci.edu/dataset/442, unpack its archives too, and "
    "set data.root or FLSUITE_DATA_ROOT to its folder"
)


def _find_files(folder: Path, device: int | None) -> list[tuple[int, str, Path]]:
    """Return (device, kind of traffic, file), ordered by device and ``TRAFFIC``.

    Raises:
        FlsuiteError: If there is no device, or some of a device's files are missing.
    """
    files = []
    for number in range(1, len(DEVICES) + 1) if device is None else [device]:
        kinds = TRAFFIC[: -len(_MIRAI)] if number in WITHOUT_MIRAI else TRAFFIC
        places = {traffic: _places(folder, number, traffic) for traffic in kinds}
        own = {kind: file for kind, both in places.items() for file in both[::-1] if file.is_file()}
        # A device without any file is absent. A device with some files missing is incomplete.
        if own and (missing := [kind for kind in kinds if kind not in own]):
            flat, nested = places[missing[0]]
            raise FlsuiteError(f"N-BaIoT's device {number} lacks {flat} (or {nested}); {_REMEDY}")
        files += [(number, kind, own[kind]) for kind in kinds if own]

    if not files:
        what = "N-BaIoT" if device is None else f"N-BaIoT's device {device}"
        flat, nested = _places(folder, device or 1, "gafgyt.combo")
        raise FlsuiteError(
            f"{what} is not in {folder}: expected {flat.name} or "
            f"{nested.relative_to(folder)}; {_REMEDY}"
        )
    return files


def _places(folder: Path, number: int, traffic: str) -> tuple[Path, Path]:
    """Return the path of a file in the flat layout and in UCI's layout."""
    family, _, attack = traffic.partition(".")
    inside = f"{family}_attacks/{attack}.csv" if attack else "benign_traffic.csv"
    return folder / f"{number}.{traffic}.csv", folder / DEVICES[number - 1] / inside


def _checked_header(file: Path, first: list[str] | None) -> list[str]:
    """Return the column names of a file.

    Args:
        file: The file.
        first: The column names of the first file, which all files must have.

    Raises:
        FlsuiteError: If the file has other columns, or no header.
    """
    header = csv_header(file)
    if len(header) != _FEATURES:
        raise FlsuiteError(
            f"{file} has {len(header)} columns, but N-BaIoT has {_FEATURES}; "
            f"delete it and {_REMEDY}"
        )

    if None not in map(number_in, header):
        raise FlsuiteError(
            f"{file} has no header: its first row is numbers; add the header of the other files"
        )

    for column, (name, expected) in enumerate(zip(header, first or header, strict=True), start=1):
        if name != expected:
            raise FlsuiteError(
                f"{file}: header, column {column}: expected {expected!r} as in the first file, "
                f"got {name!r}; give all files the same columns in the same order"
            )
    return header


_TEST_FRACTION = 0.2
_SPLIT_SEED = 0
_FEWEST_ROWS = 5
CHUNK_ROWS = 16_384
"""Rows in memory as float64 at a time. The result does not depend on it."""

_Classes = Literal["binary", "family", "attack"]
_Device = Annotated[
    int, Range(f"from 1 to {len(DEVICES)}", lambda number: 1 <= number <= len(DEVICES))
]
_FileRows = tuple[np.ndarray, int, int]
"""Rows float32 ``(n, 115)`` of one file, their class, their device."""


def _labels(classes: _Classes) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names, and the class of each kind of traffic."""
    if classes == "attack":
        return TRAFFIC, {traffic: label for label, traffic in enumerate(TRAFFIC)}
    if classes == "family":
        families = ("benign", "gafgyt", "mirai")
        return families, {traffic: families.index(traffic.split(".")[0]) for traffic in TRAFFIC}
    return ("benign", "attack"), {traffic: int(traffic != "benign") for traffic in TRAFFIC}


def _sample(chunks: Iterable[np.ndarray], cap: int | None, rng: np.random.Generator) -> np.ndarray:
    """Return at most ``cap`` rows, float32, in a random order.

    Each row has one random draw, in the order of the file, so the result does not depend on the
    chunk size. Rows are sorted by their draws. At most ``cap`` rows and one chunk are in memory.
    """
    kept, draws = np.zeros((0, _FEATURES), np.float32), np.zeros(0)
    for chunk in chunks:
        kept = np.concatenate([kept, chunk.astype(np.float32)])
        draws = np.concatenate([draws, rng.random(len(chunk))])
        if cap is not None and len(kept) > cap:
            # The rows with the smallest draws so far; later chunks may replace some.
            first = np.argsort(draws)[:cap]
            kept, draws = kept[first], draws[first]

    return kept[np.argsort(draws)]


def _joined(files: list[_FileRows], with_ids: bool) -> DataSplit:
    """Return the rows of all files as one split.

    ``files`` is emptied in the process, because two copies of the set may not fit into memory.
    """
    sizes = [len(rows) for rows, _, _ in files]
    y, ids = (
        torch.from_numpy(np.repeat([file[column] for file in files], sizes)) for column in (1, 2)
    )

    # Fill from the end, because files are popped from the end.
    x = np.empty((sum(sizes), _FEATURES), np.float32)
    stop = len(x)
    while files:
        rows, _, _ = files.pop()
        x[stop - len(rows) : stop] = rows
        stop -= len(rows)

    return DataSplit(torch.from_numpy(x), y, ids if with_ids else None)


class NBaIoT(FederatedDataModule):
    """Traffic of nine devices, 115 statistics per packet: some seven million rows, 3.3 GB.

    With the ``Natural`` partition and nine clients, clients are devices. With a single ``device``,
    any other partition splits its rows over clients. UCI's archive is not downloaded. The files are
    in ``root/nbaiot`` or, without such a folder, in ``root`` itself. The default of ``root`` is
    ``~/.cache/flsuite``. The two usual layouts are supported:

    1. UCI's: ``Danmini_Doorbell/benign_traffic.csv``, ``Danmini_Doorbell/gafgyt_attacks/combo.csv``
       and so on.
    2. Flat: ``1.benign.csv``, ``1.gafgyt.combo.csv`` to ``9.mirai.udpplain.csv``, with devices
       numbered as in ``DEVICES``.

    A whole device may be missing, but not a single file of a device. Every row is read and checked,
    for any cap. The rows of a file are shuffled with a fixed seed. The first ``rows_per_file`` are
    kept, and every fifth of them is a test row. A smaller cap thus gives a subset of a larger one,
    and a test row under one cap is a test row under all.

    Args:
        classes: ``binary`` (benign or attack), ``family`` (benign, gafgyt, mirai) or ``attack``
            (benign and the ten attacks). Every device has all classes, although the devices 3 and 7
            have no rows of Mirai.
        device: The only device to read, 1 to 9. The data then has no natural owners. ``None`` means
            all devices.
        rows_per_file: Maximum number of rows per file, at least 5, the same rows in every run.
            ``None`` means all rows.
        **kwargs: Arguments of ``FederatedDataModule``. Arguments about images have no effect.
    """

    def __init__(
        self,
        classes: _Classes = "binary",
        device: _Device | None = None,
        rows_per_file: Annotated[int, at_least(_FEWEST_ROWS)] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.classes = classes
        self.device = device
        self.rows_per_file = rows_per_file
        check_init(self, NBaIoT)

    def load(self) -> PublishedSplits:
        """Read the files, with the devices' numbers as ids, unless there is a single ``device``.

        Each feature is scaled to [0.1, 0.9] over the training rows, and clipped to [0, 1] in the
        test rows.

        Raises:
            FlsuiteError: If there are no files, or a file is missing or empty, has another header
                than the first, or has a value that is missing, infinite or not a number.
        """
        folder = self.data_root()
        folder = folder / "nbaiot" if (folder / "nbaiot").is_dir() else folder
        names, label_of = _labels(self.classes)
        header: list[str] | None = None
        train: list[_FileRows] = []
        test: list[_FileRows] = []
        for number, traffic, file in _find_files(folder, self.device):
            # Each file must have the header of the first, to prevent mixed-up columns.
            header = _checked_header(file, header)
            rng = numpy_generator(_SPLIT_SEED, f"nbaiot/{traffic}", client=number)
            chunks = numeric_chunks(csv_frames(file, CHUNK_ROWS), file)
            rows = _sample(chunks, self.rows_per_file, rng)
            held = evenly_held_out(len(rows), _TEST_FRACTION)
            train.append((rows[~held], label_of[traffic], number))
            test.append((rows[held], label_of[traffic], number))
        if not any(len(rows) for rows, _, _ in test):
            raise FlsuiteError(
                f"no file in {folder} has the {_FEWEST_ROWS} rows that a test split needs; "
                f"{_REMEDY}"
            )

        splits = [_joined(files, with_ids=self.device is None) for files in (train, test)]
        scale = fit_scale("minmax", splits[0].x.numpy())
        for split in splits:
            scale(split.x.numpy())  # in place
        return PublishedSplits(DataSpec((_FEATURES,), len(names), class_names=names), *splits)
