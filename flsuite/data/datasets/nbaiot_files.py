"""The files of N-BaIoT: their places in both layouts, and their header."""

from pathlib import Path

from flsuite.data.datasets.csv_files import csv_header
from flsuite.errors import FlsuiteError

__all__ = [
    "DEVICES",
    "FEATURES",
    "GAFGYT",
    "MIRAI",
    "REMEDY",
    "TRAFFIC",
    "WITHOUT_MIRAI",
    "checked_header",
    "find_files",
]

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
REMEDY = (
    "download the set from https://archive.ics.uci.edu/dataset/442, unpack its archives too, and "
    "set data.root to its folder"
)


def find_files(folder: Path, device: int | None) -> list[tuple[int, str, Path]]:
    """Return device, kind of traffic and file, ordered by the devices' numbers and ``TRAFFIC``.

    Raises:
        FlsuiteError: If there is no device, or some of a device's files are missing.
    """
    files = []
    for number in range(1, len(DEVICES) + 1) if device is None else [device]:
        kinds = TRAFFIC[: -len(MIRAI)] if number in WITHOUT_MIRAI else TRAFFIC
        places = {traffic: _places(folder, number, traffic) for traffic in kinds}
        present = {
            traffic: next((place for place in both if place.is_file()), None)
            for traffic, both in places.items()
        }
        # A device without any file is absent. A device with only some files is damaged.
        if not any(present.values()):
            continue
        for traffic, file in present.items():
            if file is None:
                flat, nested = places[traffic]
                raise FlsuiteError(
                    f"N-BaIoT's device {number} lacks {flat} (or {nested}); {REMEDY}"
                )
            files.append((number, traffic, file))

    if not files:
        missing = "N-BaIoT" if device is None else f"N-BaIoT's device {device}"
        flat, nested = _places(folder, device or 1, "gafgyt.combo")
        raise FlsuiteError(
            f"{missing} is not in {folder}: expected {flat.name} or "
            f"{nested.relative_to(folder)}; {REMEDY}"
        )
    return files


def _places(folder: Path, number: int, traffic: str) -> tuple[Path, Path]:
    """Return the place of a file in the flat layout, and in UCI's."""
    family, _, attack = traffic.partition(".")
    inside = f"{family}_attacks/{attack}.csv" if attack else "benign_traffic.csv"
    return folder / f"{number}.{traffic}.csv", folder / DEVICES[number - 1] / inside


def checked_header(file: Path, first: list[str] | None) -> list[str]:
    """Return the column names of a file.

    Args:
        file: The file.
        first: The column names of the first file, which all files must have.

    Raises:
        FlsuiteError: If the file has other columns, or no header.
    """
    header = csv_header(file)
    if len(header) != FEATURES:
        raise FlsuiteError(
            f"{file} has {len(header)} columns, and N-BaIoT has {FEATURES}; delete it and {REMEDY}"
        )

    if all(_is_number(name) for name in header):
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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
