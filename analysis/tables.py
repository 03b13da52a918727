"""Tables of strings, the ways to write them down, and the folder they go to."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleetbed.profiles.errors import BadInput

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--"}


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def csv(self) -> str:
        return csv_text(self.columns, self.rows)

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = "|" + "|".join([" --- ", *[" ---: "] * (len(self.columns) - 1)]) + "|"
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([line(self.columns), rule, *map(line, self.rows), *notes]) + "\n"

    def latex(self) -> str:
        """A booktabs tabular; the notes are comments above it."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join("".join(_LATEX.get(c, c) for c in cell) for cell in cells) + r" \\"

        return "\n".join(
            [
                *(f"% {note}" for note in self.notes),
                rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}",
                r"\toprule",
                line(self.columns),
                r"\midrule",
                *map(line, self.rows),
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )

    def html(self) -> str:
        """The first column is a heading of its row; the others are figures."""
        head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in self.columns)
        body = "".join(
            f'<tr><th scope="row">{html.escape(row[0])}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Make the folder for what is written inside; a place that cannot be written is the user's mistake."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be written ({error.strerror}); name another place.") from error


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()
