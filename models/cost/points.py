"""Reads published training times: one row per device, model and batch, in a CSV file.

A row that cannot be used is skipped and reported with the reason; a file without such a table is refused. The shipped
file contains the times that Flower Labs published for a Raspberry Pi 4.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path

from msgspec import Struct

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.resolve import available, load_device
from fleetbed.profiles.types import Device
from fleetbed.profiles.yaml_text import shorten

COLUMNS = ("device", "what", "model", "input", "batch", "threads", "metric", "value", "unit", "notes")
METRIC = "time per batch"
UNITS = {"s": 1.0, "ms": 1e-3}
MAX_BATCH = 1_000_000
_PROFILE = re.compile(r"\[profile=([^\]]+)\]")
_INPUT = re.compile(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){2}")


class Point(Struct, frozen=True, kw_only=True):
    """Seconds of one training step, measured on a device."""

    row: int  # of the file, the header is 1
    device: str
    model: str
    shape: tuple[int, ...]
    batch: int
    seconds: float


class LeftOut(Struct, frozen=True):
    row: int
    reason: str


class Points(Struct, frozen=True, kw_only=True):
    file: str
    used: list[Point]
    left_out: list[LeftOut]
    devices: dict[str, Device]


class _Unusable(Exception):
    """The reason why a row is skipped."""


def shipped_points() -> Path:
    return Path(str(resources.files("fleetbed.profiles"))) / "published" / "raspberry-pi-4.csv"


def read_points(path: Path, search: Sequence[Path] = ()) -> Points:
    """Read the rows of the file, each with its device's profile."""
    points = Points(file=str(path), used=[], left_out=[], devices={})
    names = _Names(search)
    for number, row in enumerate(_rows(path), start=2):
        try:
            point = _point(number, row, names)
            if point.device not in points.devices:
                points.devices[point.device] = load_device(point.device, search)
            _check_threads(row, points.devices[point.device])
            points.used.append(point)
        except (_Unusable, BadInput) as reason:
            points.left_out.append(LeftOut(number, str(reason)))
    if not points.used:
        first = f"; row {points.left_out[0].row}: {points.left_out[0].reason}" if points.left_out else ""
        raise BadInput(f"{path}: no row of this file can be used{first}.")
    return points


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise BadInput(
                    f"{path}: the column {missing[0]} is missing in the first line; it needs {', '.join(COLUMNS)}."
                )
            return list(reader)
    except OSError as error:
        raise BadInput(f"{path}: the points cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: not a CSV file in UTF-8 ({error}).") from error


def _point(number: int, row: dict[str, str], names: _Names) -> Point:
    if not row["what"].strip().startswith("training"):
        raise _Unusable(f"what is {shorten(row['what'])}, but only training is compared")
    if row["metric"].strip() != METRIC:
        raise _Unusable(f"metric is {shorten(row['metric'])}, but {METRIC} is needed")
    if not row["model"].strip():
        raise _Unusable("model is empty")
    return Point(
        row=number,
        device=_device(row, names),
        model=row["model"].strip(),
        shape=_shape(row["input"].strip()),
        batch=_batch(row["batch"].strip()),
        seconds=_seconds(row["value"].strip(), row["unit"].strip()),
    )


class _Names:
    """Finds profiles by name or by title; titles are read only if a name is not found."""

    def __init__(self, search: Sequence[Path]) -> None:
        self._search = search
        self._known = available("device", search)
        self._titles: dict[str, str] | None = None

    def find(self, asked: str) -> str | None:
        return asked if asked in self._known else self._by_title().get(asked)

    def _by_title(self) -> dict[str, str]:
        if self._titles is None:
            self._titles = {}
            for name in self._known:
                with suppress(BadInput):  # a wrong profile is reported when a row uses it
                    self._titles[load_device(name, self._search).title] = name
        return self._titles


def _device(row: dict[str, str], names: _Names) -> str:
    """Return the profile in the notes, if any; otherwise the one with the name or title in the device column."""
    noted = _PROFILE.search(row["notes"])
    asked = noted[1].strip() if noted else row["device"].strip()
    found = names.find(asked)
    if found is None:
        raise _Unusable(
            f"the device {shorten(asked)} is unknown: give the name of a profile (fleetbed profiles list device)"
        )
    return found


def _shape(text: str) -> tuple[int, ...]:
    if not _INPUT.fullmatch(text):
        raise _Unusable(f"input is {shorten(text)}, but channels, height and width are needed: 3x224x224")
    return tuple(int(size) for size in text.split("x"))


def _batch(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_BATCH and len(text) < 9):
        raise _Unusable(f"batch is {shorten(text)}, but a whole number from 1 to {MAX_BATCH} is needed")
    return int(text)


def _seconds(value: str, unit: str) -> float:
    if unit not in UNITS:
        raise _Unusable(f"unit is {shorten(unit)}, but {' or '.join(UNITS)} is needed")
    try:
        seconds = float(value) * UNITS[unit]
    except ValueError:
        raise _Unusable(f"value is {shorten(value)}, but a number of {unit} is needed") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise _Unusable(f"value is {shorten(value)}, but a time above 0 is needed")
    return seconds


def _check_threads(row: dict[str, str], device: Device) -> None:
    threads = row["threads"].strip()
    if threads.isdecimal() and device.trains_on == "cpu" and int(threads) != device.cpu.cores:
        raise _Unusable(f"threads is {threads}, but the rates of the device are those of all {device.cpu.cores} cores")
