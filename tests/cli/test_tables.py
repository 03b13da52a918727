"""Tables on a terminal: they fit its width, and words are broken only where nothing else helps."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fleetbed.cli import common

COLUMNS = ["Method", "Final accuracy", "Memory of the tightest device", "Late or dropped work", "Degraded"]
ROWS = [["heteroavg, over-select", "46.9 %", "34.1 of 47.0 MiB (luckfox-pico-pro-128mb)", "3.4 %", "no"]]


def drawn(monkeypatch: pytest.MonkeyPatch, width: int) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.console.Console", lambda: Console(file=out, width=width, color_system=None))
    common.print_table("Results", COLUMNS, ROWS)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_a_table_fits_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = drawn(monkeypatch, width)
    assert max(map(len, lines)) <= width
    shown = {word for line in lines for word in line.split()}
    assert {word for text in [*COLUMNS, *ROWS[0]] for word in text.split()} <= shown


def test_a_table_keeps_one_line_per_row_where_there_is_space(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(drawn(monkeypatch, 200)) == 4  # title, heads, rule, row


def test_words_are_broken_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch, 40)
    assert max(map(len, lines)) <= 40
    assert "luckfox" in "".join("".join(lines).split())
