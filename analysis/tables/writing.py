"""Tables of strings, the formats to write them in, and the folder to write them to.

Cells contain names that users chose, so each format escapes its own syntax.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleetbed.profiles.errors import BadInput, HostCannot
from fleetbed.profiles.yaml_text import plain

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", '"': r"{\char34}", "`": "{`}"}
_LATEX |= {"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--"}

#: Markdown's special characters, except where they have no effect: an underscore in a word, a bracket without a link.
_MARKDOWN = re.compile(
    r"[\\|`*<~$]"
    r"|(?<![^\W_])_|_(?![^\W_])"
    r"|\](?=[(\[:])"
    r"|&(?=#?\w+;)"
    r"|(?<=:)/(?=/)|(?<=\bwww)\.|(?<=\w)@(?=\w)"
)
_MARKDOWN_BLOCK = re.compile(r"^([#>+=-])|^(\d+)(?=[.)])")  # the start of a heading, quotation, list or rule


def markdown_text(text: str) -> str:
    """Escape the text of a cell, so that it is shown literally."""
    return _MARKDOWN.sub(r"\\\g<0>", plain(text).strip())


def markdown_paragraph(text: str) -> str:
    return _MARKDOWN_BLOCK.sub(lambda found: f"\\{found[1]}" if found[1] else f"{found[2]}\\", markdown_text(text))


def latex_text(text: str) -> str:
    """Escape the text of a cell; the row before would read a bracket or an asterisk at its start as an option."""
    shown = plain(text).strip()
    return ("{}" if shown.startswith(("[", "*")) else "") + "".join(_LATEX.get(c, c) for c in shown)


_LONG = ' class="long"'
LONG = 24  # characters; a cell with more may have several lines on a page


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    title: str = ""

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(map(markdown_text, cells)) + " |"

        title = [f"{markdown_paragraph(self.title)}\n"] if self.title else []
        rule = "|" + "|".join([" --- ", *[" ---: "] * (len(self.columns) - 1)]) + "|"
        notes = [f"\n{markdown_paragraph(note)}" for note in self.notes]
        return "\n".join([*title, line(self.columns), rule, *map(line, self.rows), *notes]) + "\n"

    def latex(self) -> str:
        """Return a booktabs tabular; title and notes are comments above it."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join(map(latex_text, cells)) + r" \\"

        return "\n".join(
            [
                *(f"% {plain(text)}" for text in (self.title, *self.notes) if text),
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
        """Return an HTML table whose first column has the headings of the rows."""
        head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in self.columns)
        body = "".join(
            f'<tr><th scope="row">{html.escape(row[0])}</th>'
            + "".join(f"<td{_LONG if len(cell) > LONG else ''}>{html.escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Create the folder to write into; a folder that is not writable is the user's mistake."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot write there ({error.strerror}); choose another folder.") from error


#: characters that start a formula in a spreadsheet
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return CSV with text on one line; an apostrophe precedes text that a spreadsheet would read as a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_csv_cell(value) for value in row] for row in [columns, *rows])
    return out.getvalue()


def _csv_cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def missing_extra(what: str, library: str, extra: str) -> HostCannot:
    """Return the error for an optional library that is not there."""
    return HostCannot(f"{what}: {library} is not installed here; pip install 'fleetbed[{extra}]' brings it.")
