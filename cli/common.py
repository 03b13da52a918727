"""Options and output helpers that all commands share."""

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
        help="A folder with your own devices/, links/, fleets/ and experiments/; may be repeated. "
        "Default: FLEETBED_PROFILES. The folder of an experiment's file counts too.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_finite(values: list[float] | None) -> list[float] | None:
    """Reject NaN and infinity in the numbers of an option: its range check lets NaN pass."""
    for value in values or ():
        if not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number.")
    return values


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch the garbage collector off for a short command: it would take a fifth of the time and find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def complain(error: object) -> None:
    """Print an error as one line on stderr, without the line breaks and control characters in its text."""
    print(f"fleetbed: {plain(' '.join(str(error).split()))}", file=sys.stderr)


def print_json(data: Any) -> None:
    """Print anything that msgspec can encode, as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with numbers aligned right: fitted to the width of a terminal, as plain columns elsewhere."""
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
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # as Text, because rich would interpret a plain string as markup
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    by_column = [[name, *(row[number] for row in cells)] for number, name in enumerate(columns)]
    widths = _widths(by_column, console.width - 2 * len(columns) + 1)
    for name, width, right in zip(columns, widths, numeric, strict=True):
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold", width=width)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _widths(by_column: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return the widths of columns that fit a terminal: the widest are wrapped first, and words broken last."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, texts)) for texts in by_column]
    words = [max((cell_len(word) for text in texts for word in text.split()), default=1) for texts in by_column]
    for least in (words, [1] * len(widths)):
        while sum(widths) > available and any(width > low for width, low in zip(widths, least, strict=True)):
            widest = max(range(len(widths)), key=lambda at: widths[at] if widths[at] > least[at] else 0)
            widths[widest] -= 1
    return widths


def _text(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
