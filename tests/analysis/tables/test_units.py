"""Numbers are formatted for people."""

from __future__ import annotations

import pytest

from fleetbed.analysis.tables.units import (
    data_bytes,
    digits,
    flops,
    joules,
    of_field,
    percent,
    scale,
    seconds,
    target_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (0.0298, "29.8 ms"),
        (1.0, "1 s"),
        (59.94, "59.9 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (5400.0, "90 min"),
        (7200.0, "2 h"),
        (100_000.0, "27.8 h"),
        (864_000.0, "10 d"),
    ],
)
def test_times(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_quantities_take_the_prefix_that_fits() -> None:
    assert [data_bytes(v) for v in (0, 999, 1000, 19_600_000, 2.5e12)] == [
        "0 B",
        "999 B",
        "1 000 B",
        "18.7 MiB",
        "2.27 TiB",
    ]
    assert flops(1.935e11) == "194 GFLOP"
    assert joules(0.25) == "0.25 J"


def test_digits_and_percentages() -> None:
    assert [digits(v) for v in (1234567, 99.96, 9.996, 0.0123456, -3.14159)] == [
        "1 234 567",
        "100.0",
        "10.00",
        "0.0123",
        "-3.14",
    ]
    assert percent(0.12345) == "12.3 %"
    assert percent(None) == "–"
    assert target_text(0.6) == "60 %"
    assert target_text(0.625) == "62.5 %"


def test_an_axis_has_one_unit() -> None:
    assert scale(90.0, "time") == (1.0, "s")
    assert scale(90 * 60.0, "time") == (60.0, "min")
    assert scale(3e9, "bytes") == (2.0**30, "GiB")
    assert scale(40, "rounds") == (1.0, "")


def test_fields_carry_their_unit_in_their_name() -> None:
    shown = [("compute_s", 90.0), ("bytes_up", 2e6), ("peak_bytes", None), ("flops", 1e9), ("joules", 5.0)]
    assert [of_field(name, value) for name, value in shown] == ["90 s", "1.91 MiB", "–", "1 GFLOP", "5 J"]
    assert [of_field(*pair) for pair in (("accuracy", 0.5), ("tasks", 12), ("link", "lte"))] == ["50.0 %", "12", "lte"]
