"""Text that users give (labels, titles, folder names) is shown as it is, and never becomes syntax anywhere."""

from __future__ import annotations

import csv
import io
import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.text import Text
from rich.console import Console
from synthetic_runs import write_run
from test_report import embedded

from fleetbed.analysis.figures.plot import draw_plot
from fleetbed.analysis.figures.style import RC
from fleetbed.analysis.page.page import page
from fleetbed.analysis.tables.compare import Comparison, side_by_side
from fleetbed.analysis.tables.runs import Run, open_run
from fleetbed.analysis.tables.series import series_of
from fleetbed.analysis.tables.summary_table import summary_tables
from fleetbed.analysis.tables.writing import Table, csv_text, latex_text
from fleetbed.cli import common
from fleetbed.profiles.yaml_text import plain

NASTY = (
    "<!--<script>",
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "]]><!--",
    "&lt;b&gt; &amp;amp; &#60;",
    r"$\frac",
    r"$\frac{a}{b}$ $x$",
    r"$\frac$ $x^$",
    r"\$ \\ \textbf{x}",
    "[bold]red[/bold] [link=file:///etc/passwd]x[/link]",
    "[/]",
    "[bold",
    "*a* **b** _c_ __d__ ~~e~~ `f` <g> ![h](i) [j](k) [l][m] [n]: o",
    "# heading",
    "> quote",
    "- list",
    "1. one",
    "a | b \\| c",
    "100 % & # {x} ~ ^ _",
    "[x] first",
    "* star",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-1+2",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    " =1",
    "＝1",
    "_hidden",
    "__proto__",
    "constructor",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "line\nbreak\r\nand\ttab",
    "\u202eright to left\u2066",
    "\u2028 \u2029",
    "ünï – 中文 🙂",
    "http://x.org www.x.org a@b.org",
    "${title} $title {title} %s %(a)s",
    "' or 1=1 --",
)

labels = st.one_of(
    st.sampled_from(NASTY),
    st.text(min_size=1, max_size=30),
    st.lists(st.sampled_from(list("<>!-/$\\[]()*_`|&#%{}~^=+-@'\" \t\n\x1bab1.:")), min_size=1, max_size=20).map(
        "".join
    ),
)
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    return [open_run(write_run(folder, name, methods=("fedavg", "fedin"), rounds=2)) for name in ("fedavg", "fedin")]


def labelled(runs: list[Run], label: str) -> list[Run]:
    """The second method, the title, the data, a device, a variant and a notice are called so."""
    found = []
    for number, run in enumerate(runs):
        method = msgspec.structs.replace(run.config.algorithm, label=label if number else None)
        data = msgspec.structs.replace(run.config.experiment.data, name=label)
        algorithms = (runs[0].config.algorithm, msgspec.structs.replace(runs[1].config.algorithm, label=label))
        experiment = msgspec.structs.replace(
            run.config.experiment, title=label, fleet=label, data=data, algorithms=algorithms
        )
        config = msgspec.structs.replace(run.config, experiment=experiment, algorithm=method)
        clients = tuple(
            msgspec.structs.replace(c, device=label, device_title=label, link=label, reason=label) for c in run.clients
        )
        caps = tuple(msgspec.structs.replace(c, status=label, backend=label, note=label) for c in run.caps)
        meta = {**run.meta, "command": label, "status": "failed", "error": label}
        found.append(replace(run, config=config, clients=clients, caps=caps, meta=meta))
    return found


def compared(runs: list[Run], label: str) -> Comparison:
    return side_by_side(labelled(runs, label), None, [])


class Elements(HTMLParser):
    """The elements of a page in order, and the text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.found[-1:] not in (["script"], ["style"]):
            self.text.append(data)


def script_ends(html: str) -> int:
    """Where the payload's element ends for a browser: `<!--` and `<script` in it would hide its end."""
    inside = html.split('id="payload">')[1]
    assert "<" not in inside[: inside.index("</script>")]
    return inside.index("</script>")


@given(labels)
@settings(many, max_examples=60)
def test_the_page_shows_it_and_has_no_other_elements(runs: list[Run], label: str) -> None:
    html = page(compared(runs, label))
    usual = page(compared(runs, "usual"))
    assert Elements(html).found == Elements(usual).found
    assert script_ends(html) > 0
    assert embedded(html)["series"][1]["label"] == label
    shown = " ".join(Elements(html).text)
    assert " ".join(label.split()) in " ".join(shown.split())


@given(labels)
@many
def test_a_cell_of_markdown_shows_it(label: str) -> None:
    table = Table(("Method", "x"), ((label, "1"),), notes=(label,))
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tokens = parser.parse(table.markdown())
    texts = [token for token in tokens if token.type == "inline"]
    assert len(texts) == (5 if plain(label).strip() else 4), "two heads, two cells, and the note"
    for token in (texts[2], *texts[4:]):
        assert {child.type for child in token.children or ()} <= {"text", "text_special"}
        assert "".join(child.content for child in token.children or ()) == plain(label).strip()


@given(labels)
@many
def test_a_cell_of_latex_holds_no_command_of_its_own(label: str) -> None:
    written = latex_text(label)
    known = (
        r"\\(?:[&%$#_{}]|textbackslash\{\}|textasciitilde\{\}|textasciicircum\{\}|textless\{\}|textgreater\{\}|char34)"
    )
    rest = re.sub(rf"{known}|\$\\pm\$|\$\\times\$|\$-\$", "", written)
    assert not re.search(r"[\\$%#&_^~\n\r]", rest), rest
    assert rest.count("{") == rest.count("}")
    assert not written.startswith(("[", "*"))
    table = Table(("Method", label), ((label, "1"),), notes=(label,), title=label).latex()
    assert table.count("\n") == Table(("Method", "x"), (("x", "1"),), notes=("x",), title="x").latex().count("\n")


@given(st.lists(labels, min_size=1, max_size=4), st.floats(allow_nan=False, allow_infinity=False))
@many
def test_a_cell_of_csv_is_no_formula_and_numbers_stay_numbers(texts: list[str], number: float) -> None:
    written = csv_text(["label"] * len(texts) + ["number"], [[*texts, number]])
    (_, cells) = csv.reader(io.StringIO(written, newline=""))
    assert float(cells[-1]) == number
    for text, cell in zip(texts, cells, strict=False):
        assert cell.removeprefix("'") == plain(text).removeprefix("'")
        assert not cell.lstrip().startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠"))


@given(labels)
@many
def test_a_table_on_a_terminal_and_in_a_pipe_shows_it(label: str) -> None:
    for terminal in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            out = io.StringIO()
            patch.setattr("sys.stdout", out)
            patch.setattr(out, "isatty", lambda terminal=terminal: terminal, raising=False)
            console = Console(file=out, width=400, color_system=None)
            patch.setattr("rich.console.Console", lambda console=console: console)
            common.print_table(label, [label, "count"], [[label, 1]])
        printed = " ".join(out.getvalue().split())
        shown = " ".join(plain(label).split())
        assert printed.count(shown) >= 3 or not shown
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())


@given(labels)
@many
def test_an_error_is_one_line(label: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        err = io.StringIO()
        patch.setattr("sys.stderr", err)
        common.complain(label)
    assert err.getvalue().splitlines() == [err.getvalue().removesuffix("\n")]
    assert "\x1b" not in err.getvalue()


def _drawn(figure: Any) -> list[str]:
    """The texts of a figure, which is laid out as for a file: a formula would be read now."""
    with warnings.catch_warnings(), mpl.rc_context(RC):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.set_layout_engine("none")  # the texts matter, not where they stand
        figure.draw_without_rendering()
    texts = figure.findobj(Text)
    assert not [text for text in texts if text.get_parse_math() and text.get_text()]
    return [text.get_text().strip() for text in texts]


@pytest.mark.parametrize("label", NASTY)
def test_figures_show_it(runs: list[Run], label: str) -> None:
    from fleetbed.analysis.figures.curve_plots import curves_figure, groups_figure, pareto_figure
    from fleetbed.analysis.figures.partition_plot import partition_figure

    named = labelled(runs, label)
    series = series_of(named)
    for figure in (curves_figure(series, "time", []), pareto_figure(series), groups_figure(series)):
        assert plain(label).strip() in _drawn(figure)
    _drawn(partition_figure(named[0]))


@pytest.mark.parametrize("label", [r"$\frac", r"$\frac$ $x^$", "_hidden"])
def test_figures_are_written_with_it(runs: list[Run], label: str, tmp_path: Path) -> None:
    for path in draw_plot("time", labelled(runs, label), tmp_path, []):
        assert path.stat().st_size > 0


def test_the_picture_of_a_partition_is_written_with_it(tmp_path: Path) -> None:
    from fleetbed.emulator.data.picture import draw_partition

    for label in (r"$\frac", r"$\frac$ $x^$", "a\x1bb"):
        draw_partition(np.ones((2, 2), int), np.ones((2, 2), int), tmp_path / "p.png", label, label)


def test_the_notes_of_compare_hold_it_on_one_line_each(runs: list[Run]) -> None:
    for label in NASTY:
        (found,) = summary_tables(compared(runs, label))
        assert len(found.markdown().splitlines()) == 4 + 2 * len(found.notes)


def test_the_live_view_takes_no_markup() -> None:
    from types import SimpleNamespace as Of

    from fleetbed.live import _view

    for label in NASTY:
        kind = Of(name="000", kind=label)
        task = Of(outcome="", client=0, variant=label, doing="trains", dispatched_s=0.0, plan_s=1.0)
        task.compute_start_s = None
        progress = Of(tasks={0: task}, timeline=Of(now_s=1.0), policy=Of(round=1))
        config = Of(experiment=Of(rounds=2), algorithm=Of(title=label), policy=Of(title=label), seed=1)
        engine: Any = Of(config=config, progress=progress, participants={0: Of(spec=kind)}, last_arrival=0, started_s=0)
        out = io.StringIO()
        Console(file=out, width=400, color_system=None).print(_view(engine, None, (1, 0.0)))
        assert " ".join(plain(label).split()) in " ".join(out.getvalue().split())
        assert "\x1b" not in out.getvalue()
