"""N-BaIoT: traffic of nine devices of the Internet of Things, benign and under the botnets Gafgyt (BASHLITE) and Mirai.

Source: Meidan et al., "N-BaIoT: Network-based Detection of IoT Botnet Attacks Using Deep Autoencoders", IEEE Pervasive
Computing 17(3), 2018, arXiv:1805.03409; https://archive.ics.uci.edu/dataset/442.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from flsuite.data.datasets.tabular import csv_frames, csv_header, every, fit_scale, numeric_chunks
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError
from flsuite.random import numpy_generator

__all__ = ["NBaIoT", "read_nbaiot"]

DEFAULT_ROOT = "~/.cache/flsuite"
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
MIRAI = tuple(f"mirai.{name}" for name in ("ack", "scan", "syn", "udp", "udpplain"))
TRAFFIC = ("benign", *GAFGYT, *MIRAI)
FEATURES = 115
TEST_FRACTION = 0.2
SPLIT_SEED = 0
FEWEST_ROWS = 5
CHUNK_ROWS = 16_384
REMEDY = "fetch the set from https://archive.ics.uci.edu/dataset/442, unpack its archives too, and set data.root to its folder"

Classes = Literal["binary", "family", "attack"]
Part = tuple[np.ndarray, int, int]
"""Rows float32 ``(n, 115)`` of one file, their class, their device."""


def read_nbaiot(
    folder: Path,
    classes: Classes = "binary",
    device: int | None = None,
    rows_per_file: int | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> PublishedSplits:
    """Read the set from ``folder``, in either of the layouts it is passed on in.

    1. UCI's: ``Danmini_Doorbell/benign_traffic.csv``, ``Danmini_Doorbell/gafgyt_attacks/combo.csv``, and so on.
    2. Flat: ``1.benign.csv``, ``1.gafgyt.combo.csv`` to ``9.mirai.udpplain.csv``; devices are numbered as in ``DEVICES``.

    A device may be absent, a file of a device that is there may not. Every row is read and checked, whatever the cap. The
    rows of a file stand in a random order, drawn once for all with a seed that is no parameter: the first
    ``rows_per_file`` are taken, and of them every fifth is for testing. A smaller cap is thus part of a larger one, and a
    row that is for testing under one cap is for testing under all.

    Args:
        folder: Where the files are.
        classes: See :class:`NBaIoT`.
        device: The only device to read, 1 to 9; ``None`` for all that are there.
        rows_per_file: At most so many rows of a file; ``None`` for all.
        chunk_rows: Rows in memory as float64 at a time; makes no difference to what is returned.

    Returns:
        ``train`` and ``test`` as float32 ``(n, 115)``, each feature brought to [0.1, 0.9] over the training rows and
        cut to [0, 1] in the test rows, labels int64 ``(n,)``, and the devices' numbers as ids, or no ids with one
        ``device``; no ``val``.

    Raises:
        FlsuiteError: If there is none of it, a file is missing or empty, has another header than the first, or has a
            value that is missing, no number or infinite.
    """
    names, label_of = _labels(classes)
    header: list[str] | None = None
    train: list[Part] = []
    test: list[Part] = []
    for number, traffic, file in _find(folder.expanduser(), device):
        header = _checked_header(file, header)
        rng = numpy_generator(SPLIT_SEED, f"nbaiot/{traffic}", client=number)
        rows = _sample(numeric_chunks(csv_frames(file, chunk_rows), file), rows_per_file, rng)
        held = every(len(rows), TEST_FRACTION)
        train.append((rows[~held], label_of[traffic], number))
        test.append((rows[held], label_of[traffic], number))
    if not any(len(x) for x, _, _ in test):
        raise FlsuiteError(
            f"no file in {folder} has the {FEWEST_ROWS} rows that a test split takes; {REMEDY}"
        )
    arrays = [_together(parts, with_ids=device is None) for parts in (train, test)]
    scale = fit_scale("minmax", arrays[0].x.numpy())
    for part in arrays:
        scale(part.x.numpy())
    return PublishedSplits(DataSpec((FEATURES,), len(names), class_names=names), *arrays)


def _labels(classes: Classes) -> tuple[tuple[str, ...], dict[str, int]]:
    """The class names, and the class of each kind of traffic."""
    if classes == "attack":
        return TRAFFIC, {traffic: label for label, traffic in enumerate(TRAFFIC)}
    if classes == "family":
        families = ("benign", "gafgyt", "mirai")
        return families, {traffic: families.index(traffic.split(".")[0]) for traffic in TRAFFIC}
    return ("benign", "attack"), {traffic: int(traffic != "benign") for traffic in TRAFFIC}


def _find(folder: Path, device: int | None) -> list[tuple[int, str, Path]]:
    """Device, kind of traffic and file, in the order of the numbers and of ``TRAFFIC``."""
    found = []
    for number in range(1, len(DEVICES) + 1) if device is None else [device]:
        kinds = TRAFFIC[: -len(MIRAI)] if number in WITHOUT_MIRAI else TRAFFIC
        places = {traffic: _places(folder, number, traffic) for traffic in kinds}
        there = {
            traffic: next((p for p in both if p.is_file()), None)
            for traffic, both in places.items()
        }
        if not any(there.values()):
            continue
        for traffic, file in there.items():
            if file is None:
                flat, nested = places[traffic]
                raise FlsuiteError(
                    f"N-BaIoT's device {number} lacks {flat} (or {nested}); {REMEDY}"
                )
            found.append((number, traffic, file))
    if not found:
        who = "N-BaIoT" if device is None else f"N-BaIoT's device {device}"
        flat, nested = _places(folder, device or 1, "gafgyt.combo")
        raise FlsuiteError(
            f"{who} is not in {folder}: there should be {flat.name} or {nested.relative_to(folder)}; {REMEDY}"
        )
    return found


def _places(folder: Path, number: int, traffic: str) -> tuple[Path, Path]:
    """Where the file is in the flat layout, and in UCI's."""
    family, _, attack = traffic.partition(".")
    inside = f"{family}_attacks/{attack}.csv" if attack else "benign_traffic.csv"
    return folder / f"{number}.{traffic}.csv", folder / DEVICES[number - 1] / inside


def _checked_header(file: Path, first: list[str] | None) -> list[str]:
    header = csv_header(file)
    if len(header) != FEATURES:
        raise FlsuiteError(
            f"{file} has {len(header)} columns where N-BaIoT has {FEATURES}; delete it and {REMEDY}"
        )
    if all(_is_number(name) for name in header):
        raise FlsuiteError(
            f"{file} has no header, its first row is numbers; put the header of the other files before it"
        )
    for column, (name, expected) in enumerate(zip(header, first or header, strict=True), start=1):
        if name != expected:
            raise FlsuiteError(
                f"{file} names column {column} {name!r} where the first file has {expected!r}; "
                "give all files the same columns in the same order"
            )
    return header


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sample(chunks: Iterable[np.ndarray], cap: int | None, rng: np.random.Generator) -> np.ndarray:
    """At most ``cap`` rows, float32, in the random order that each row's own draw gives it.

    One draw a row, in the order of the file, so that the chunks' size makes no difference; never more than ``cap`` rows and
    a chunk are kept.
    """
    kept: np.ndarray | None = None
    draws = np.zeros(0)
    for chunk in chunks:
        rows = chunk.astype(np.float32)
        kept = rows if kept is None else np.concatenate([kept, rows])
        draws = np.concatenate([draws, rng.random(len(rows))])
        if cap is not None and len(kept) > cap:
            first = np.argsort(draws)[:cap]
            kept, draws = kept[first], draws[first]
    assert kept is not None  # a file without rows is refused where it is read
    return kept[np.argsort(draws)]


def _together(parts: list[Part], with_ids: bool) -> DataSplit:
    """All parts as one split; ``parts`` is emptied on the way, for the set hardly fits into memory twice."""
    sizes = [len(x) for x, _, _ in parts]
    y, ids = (
        torch.from_numpy(np.repeat([part[column] for part in parts], sizes)) for column in (1, 2)
    )
    x = np.empty((sum(sizes), FEATURES), np.float32)
    stop = len(x)
    while parts:
        rows, _, _ = parts.pop()
        x[stop - len(rows) : stop] = rows
        stop -= len(rows)
    return DataSplit(torch.from_numpy(x), y, ids if with_ids else None)


class NBaIoT(FederatedDataModule):
    """Traffic of nine devices, 115 statistics a packet: some seven million rows, 3.3 GB as they lie in memory.

    Pair it with the ``Natural`` partition and nine clients for clients that are devices, or name one ``device`` and deal its
    rows to clients by any other partition. UCI's archive is not downloaded: see :func:`read_nbaiot` for what is
    looked for, in ``root/nbaiot`` or, where there is no such folder, in ``root`` itself; by default ``~/.cache/flsuite``.
    A fifth of each file is held out for testing, the same for every run.

    Args:
        classes: ``binary`` (benign or attack), ``family`` (benign, gafgyt, mirai) or ``attack`` (benign and the ten attacks).
            All classes are there for every device, though Mirai has no rows of the devices 3 and 7.
        device: Read this device only, 1 to 9, and have no natural owners. ``None`` for all.
        rows_per_file: Take so many rows of each file at most, the same for every run; at least 5. ``None`` for all.
        **kwargs: Those of ``FederatedDataModule``; those of images have no effect.
    """

    def __init__(
        self,
        classes: Classes = "binary",
        device: int | None = None,
        rows_per_file: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if classes not in get_args(Classes):
            raise FlsuiteError(
                f"data.classes must be one of {', '.join(get_args(Classes))}, got {classes!r}"
            )
        if device is not None and not 1 <= device <= len(DEVICES):
            raise FlsuiteError(f"data.device must be from 1 to {len(DEVICES)}, got {device}")
        if rows_per_file is not None and rows_per_file < FEWEST_ROWS:
            raise FlsuiteError(
                f"data.rows_per_file must be at least {FEWEST_ROWS}, got {rows_per_file}"
            )
        self.classes = classes
        self.device = device
        self.rows_per_file = rows_per_file

    def load(self) -> PublishedSplits:
        root = self.data_root(DEFAULT_ROOT)
        folder = root / "nbaiot" if (root / "nbaiot").is_dir() else root
        return read_nbaiot(folder, self.classes, self.device, self.rows_per_file)
