"""Tables of strings, the ways to write them down, and the folder they go to.

Cells hold what users called things. Each way of writing escapes what it would take for syntax.
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

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", '"': r"{\char34}", "`": "{`}"}
_LATEX |= {"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--"}

#: Markdown's own characters, but not where they mean nothing: an underscore inside a word, a bracket without a link.
_MARKDOWN = re.compile(
    r"[\\|`*<~$]"
    r"|(?<![^\W_])_|_(?![^\W_])"
    r"|\](?=[(\[:])"
    r"|&(?=#?\w+;)"
    r"|(?<=:)/(?=/)|(?<=\bwww)\.|(?<=\w)@(?=\w)"
)
_MARKDOWN_BLOCK = re.compile(r"^([#>+=-])|^(\d+)(?=[.)])")  # a heading, quotation, list or rule begins so


def markdown_text(text: str) -> str:
    """For a cell: shows the text itself."""
    return _MARKDOWN.sub(r"\\\g<0>", plain(text).strip())


def markdown_paragraph(text: str) -> str:
    return _MARKDOWN_BLOCK.sub(lambda found: f"\\{found[1]}" if found[1] else f"{found[2]}\\", markdown_text(text))


def latex_text(text: str) -> str:
    """For a cell. The rule or row before it would take a bracket or an asterisk at its beginning for an option."""
    shown = plain(text).strip()
    return ("{}" if shown.startswith(("[", "*")) else "") + "".join(_LATEX.get(c, c) for c in shown)


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
        """A booktabs tabular; title and notes are comments above it."""

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


#: what a spreadsheet takes for the beginning of a formula
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Numbers as they are; text on one line, with an apostrophe before what a spreadsheet would take for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_csv_cell(value) for value in row] for row in [columns, *rows])
    return out.getvalue()


def _csv_cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
