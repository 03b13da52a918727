"""Published training times: rows that are read, rows that are skipped, files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetbed.models.cost.points import COLUMNS, read_points, shipped_points
from fleetbed.profiles import BadInput

GOOD = {
    "device": "raspberry-pi-5-8gb",
    "what": "training (all parameters)",
    "model": "resnet18",
    "input": "3x224x224",
    "batch": "16",
    "threads": "default",
    "metric": "time per batch",
    "value": "4.5",
    "unit": "s",
    "notes": "",
}


def file(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "points.csv"
    lines = [",".join(COLUMNS), *(",".join(f'"{row[name]}"' for name in COLUMNS) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_shipped_points() -> None:
    points = read_points(shipped_points())
    assert len(points.used) == 37
    assert {point.device for point in points.used} == {"raspberry-pi-4b-8gb"}
    assert {(point.batch, point.shape) for point in points.used} == {(16, (3, 224, 224))}
    first = points.used[0]
    assert (first.row, first.model, first.seconds) == (2, "resnet18", 10.9183)
    assert [(row.row, row.reason) for row in points.left_out] == [
        (28, 'metric is "outcome", but time per batch is needed')
    ]


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({}, 4.5),
        ({"unit": "ms", "value": "4500"}, 4.5),
        ({"device": "Raspberry Pi 5 8 GB"}, 4.5),
        ({"threads": "4"}, 4.5),
    ],
)
def test_rows_that_are_read(tmp_path: Path, change: dict[str, str], seconds: float) -> None:
    points = read_points(file(tmp_path, {**GOOD, **change}))
    (point,) = points.used
    assert point.seconds == pytest.approx(seconds)
    assert point.device == "raspberry-pi-5-8gb"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "pocket calculator"}, 'the device "pocket calculator" is unknown: give the name of a profile'),
        ({"notes": "[profile=toaster]"}, 'the device "toaster" is unknown'),
        ({"unit": "minutes"}, 'unit is "minutes", but s or ms is needed'),
        ({"unit": ""}, 'unit is "", but s or ms is needed'),
        ({"value": "0"}, 'value is "0", but a time above 0 is needed'),
        ({"value": "-3"}, "a time above 0 is needed"),
        ({"value": "nan"}, "a time above 0 is needed"),
        ({"value": "inf"}, "a time above 0 is needed"),
        ({"value": "1e400"}, "a time above 0 is needed"),
        ({"value": "fast"}, 'value is "fast", but a number of s is needed'),
        ({"batch": "0"}, "a whole number from 1 to 1000000 is needed"),
        ({"batch": "16.5"}, "a whole number from 1 to 1000000 is needed"),
        ({"batch": "99999999999999"}, "a whole number from 1 to 1000000 is needed"),
        ({"batch": "²"}, "a whole number from 1 to 1000000 is needed"),
        ({"input": "224"}, "channels, height and width are needed"),
        ({"input": "3x0x224"}, "channels, height and width are needed"),
        ({"what": "inference"}, 'what is "inference", but only training is compared'),
        ({"metric": "outcome"}, "time per batch is needed"),
        ({"model": " "}, "model is empty"),
        ({"threads": "1"}, "threads is 1, but the rates of the device are those of all 4 cores"),
    ],
)
def test_a_row_that_cannot_be_used_is_left_out_with_its_reason(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    points = read_points(file(tmp_path, GOOD, {**GOOD, **change}, GOOD))
    assert [point.row for point in points.used] == [2, 4]
    (row,) = points.left_out
    assert row.row == 3
    assert reason in row.reason
    with pytest.raises(BadInput, match=r"points\.csv: no row of this file can be used; row 2: "):
        read_points(file(tmp_path, {**GOOD, **change}))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the column device is missing"),
        (b"device,model\nx,y\n", "the column what is missing"),
        (b"\xff\xfe\x00\x01", "not a CSV file in UTF-8"),
        (",".join(COLUMNS).encode() + b"\n", "no row of this file can be used"),
    ],
)
def test_a_file_without_a_table_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "points.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=says):
        read_points(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_points(tmp_path / "none.csv")
    with pytest.raises(BadInput, match="Is a directory"):
        read_points(tmp_path)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_garbage_is_refused_or_left_out(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "points.csv"
    path.write_bytes(",".join(COLUMNS).encode() + b"\n" + garbage)
    with pytest.raises(BadInput, match=r"points\.csv"):
        read_points(path)
