"""What every command shares: its options, and how results are printed."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fleetbed.profiles.yaml_text import plain

ProfileFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--profiles",
        metavar="DIR",
        help="A folder of your own with devices/, links/, fleets/, experiments/ in it; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def finite(values: list[float] | None) -> list[float] | None:
    """For numbers on the command line: a range alone lets NaN pass."""
    for value in values or ():
        if not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number.")
    return values


@contextmanager
def without_collector() -> Iterator[None]:
    """For a short command: looking for garbage among torch's modules takes a fifth of its time, and finds none."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def complain(error: object) -> None:
    """An error as one line on stderr, whatever line breaks or control characters its text has."""
    print(f"fleetbed: {plain(' '.join(str(error).split()))}", file=sys.stderr)


def print_json(data: Any) -> None:
    """Anything that msgspec can encode, indented."""
    print(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Numbers to the right. A drawn table on a terminal, plain columns in a pipe or a file."""
    title, columns = plain(title), [plain(column) for column in columns]
    cells = [["" if value is None else plain(_text(value)) for value in row] for row in rows]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    if sys.stdout.isatty():
        _draw(title, columns, cells, numeric)
        return
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    print(title)
    for line in [list(columns), *cells]:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _draw(title: str, columns: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # as Text, since rich takes a plain string for markup
    table = Table(title=Text(title), title_justify="left")
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _text(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
