"""`fleetbed report`, `plot`, `compare`, `export` and `privacy`: the results of runs."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetbed.analysis.figures.plot import KINDS
from fleetbed.cli.common import AsJson, check_finite, print_json, print_table
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import plain

if TYPE_CHECKING:
    from fleetbed.analysis.tables.compare import Comparison

RunFolders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or studies.")]
Base = Annotated[
    str | None, typer.Option(metavar="METHOD", help="The method to compare the others with; default: the first.")
]
Targets = Annotated[
    list[float] | None,
    typer.Option(
        "--target",
        callback=check_finite,
        metavar="SCORE",
        min=0,
        help="A target: an accuracy such as 0.6, or an error where labels are numbers; may be repeated.",
    ),
]
Series = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The accuracy to show: global, personal-own or personal-all; "
        "default: the one that each method's paper reports.",
    ),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


def report(
    folders: RunFolders,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The page to write; its other files go into a folder next to it.")
    ] = Path("report.html"),
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print the resources of one client, such as 007, and write no page."),
    ] = None,
    base: Base = None,
    target: Targets = None,
    series: Series = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Write a report on runs as an HTML page, or print its figures."""
    from fleetbed.analysis.page.report import clients_csv, report_json, write_report
    from fleetbed.analysis.tables.compare import side_by_side
    from fleetbed.analysis.tables.runs import open_runs
    from fleetbed.analysis.tables.units import data_bytes

    runs = open_runs(folders)
    if as_json:
        print_json(report_json(runs, base, target or [], client, series))
    elif as_csv:
        print(clients_csv(runs, client, series), end="")
    elif client is not None:
        _print_client(report_json(runs, base, target or [], client, series)["runs"])
    else:
        page, *parts = write_report(runs, out, base, target or [], series)
        _print_results(side_by_side(runs, base, target or [], series))
        size = data_bytes(page.stat().st_size)
        print(plain(f"report: {page} ({size}), {len(parts)} files in {parts[0].parent}"))


def _print_results(comparison: Comparison) -> None:
    """Print what each method reached, what it cost the tightest device, which work was lost, and who wins."""
    from fleetbed.analysis.tables.headlines import headlines
    from fleetbed.analysis.tables.summary_table import RESULT, summary_table
    from fleetbed.emulator.method.series import TITLES

    for group in comparison.groups:
        table = summary_table(group, RESULT)
        print_table(f"Results of the {TITLES[group.shown]}", table.columns, table.rows)
    for line in headlines(comparison):
        print(plain(str(line)))


def _print_client(runs: list[dict[str, Any]]) -> None:
    """Print one column per run, and next to it the median of all clients with the same device."""
    import msgspec

    from fleetbed.analysis.tables.units import of_field

    columns, rows = ["run"], []
    for run in runs:
        (row,) = run["clients"]
        columns += [Path(run["folder"]).name, f"median of {row.device}"]
        rows.append((msgspec.structs.asdict(row), run["medians"][row.device]))
    fields = [
        [name, *(of_field(name, value) for row, medians in rows for value in (row[name], medians.get(name)))]
        for name in rows[0][0]
    ]
    print_table(f"client {rows[0][0]['client']}", columns, fields)


def plot(
    kind: Annotated[
        str, typer.Argument(help="What to draw: " + "; ".join(f"{k}, {v}" for k, v in KINDS.items()) + ".")
    ],
    folders: RunFolders,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figures.")] = Path("figures"),
    target: Targets = None,
    series: Series = None,
) -> None:
    """Draw a figure for a paper, as PNG and PDF."""
    from fleetbed.analysis.figures.plot import draw_plot
    from fleetbed.analysis.tables.notes import cautions
    from fleetbed.analysis.tables.runs import open_runs
    from fleetbed.analysis.tables.series import series_of

    runs = open_runs(folders)
    for path in draw_plot(kind, runs, out, target or [], series):
        print(plain(str(path)))
    for note in cautions(series_of(runs, series)):
        print(plain(note), file=sys.stderr)


class Format(str, Enum):
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


class Show(str, Enum):
    summary = "summary"
    rounds = "rounds"
    costs = "costs"


def compare(
    folders: RunFolders,
    show: Annotated[
        Show,
        typer.Option(help="Accuracy and cost of each method; its accuracy by round; or the cost of a round."),
    ] = Show.summary,
    base: Base = None,
    target: Targets = None,
    series: Series = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Columns of the summary, such as final,time,speed-up; others are seeds, best, difference, rounds, "
            "bytes, energy, flops, bytes-saved, energy-saved, memory, tightest, dropped and degraded.",
        ),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Format of the table.")] = Format.markdown,
    as_json: AsJson = False,
) -> None:
    """Compare methods: their accuracy, what it cost to reach it, and differences paired by seed."""
    from fleetbed.analysis.tables import by_round
    from fleetbed.analysis.tables import compare as comparing
    from fleetbed.analysis.tables.runs import open_runs
    from fleetbed.analysis.tables.summary_table import column_names, summary_tables
    from fleetbed.analysis.tables.writing import csv_text

    if columns is not None and (show is not Show.summary or as_json or form is Format.csv):
        raise BadInput("--columns chooses columns of the summary as markdown or latex; CSV and JSON have all of them.")
    names = [] if columns is None else column_names(columns)
    found = comparing.compare_runs(open_runs(folders), base, target or [], series)
    rows, tables = {
        Show.summary: lambda: (comparing.records(found), summary_tables(found, names)),
        Show.rounds: lambda: (by_round.accuracy_records(found), by_round.accuracy_tables(found)),
        Show.costs: lambda: (by_round.cost_records(found), [by_round.cost_table(found)]),
    }[show]()
    if as_json:
        print_json({"targets": found.targets, "methods": rows, "notes": found.notes})
    elif form is Format.csv:
        print(csv_text(list(rows[0]) if rows else [], [list(row.values()) for row in rows]), end="")
    else:
        print("\n".join(each.latex() if form is Format.latex else each.markdown() for each in tables), end="")


def export_runs(
    folders: RunFolders,
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="csv, chrome-trace or parquet.")] = "csv",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")] = Path("export"),
    series: Series = None,
) -> None:
    """Write runs in the formats of other tools; open a chrome-trace in ui.perfetto.dev."""
    from fleetbed.analysis.tables.export import export as write
    from fleetbed.analysis.tables.runs import open_runs

    for path in write(open_runs(folders), form, out, series):
        print(plain(str(path)))


privacy = typer.Typer(help="Estimate what features reveal, and what noise hides.", no_args_is_help=True)


@privacy.command()
def sigma(
    clip: Annotated[float, typer.Option(help="C, the largest norm of the features sent.")] = 0.1,
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")] = 10.0,
    delta: Annotated[float, typer.Option(help="The probability of a worse leak.")] = 1e-6,
    as_json: AsJson = False,
) -> None:
    """Print the standard deviation of the noise that gives (epsilon, delta)-differential privacy."""
    from fleetbed.analysis.figures.privacy import dp_sigma

    found = dp_sigma(clip, epsilon, delta)
    if as_json:
        print_json({"clip": clip, "epsilon": epsilon, "delta": delta, "sigma": found})
        return
    print(f"{found:.4g}")
    if epsilon >= 1:
        print("The bound is proven for epsilon below 1.")


@privacy.command()
def reconstruct(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    noise: Annotated[
        list[float] | None,
        typer.Option(
            callback=check_finite,
            min=0,
            metavar="SD",
            help="Noise in standard deviations of the features; may be repeated.",
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, max=32, help="Number of test images.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Optimisation steps.")] = 300,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figure and the table.")] = Path("figures"),
    as_json: AsJson = False,
) -> None:
    """Reconstruct test images from the features that a client would send, with and without noise."""
    from fleetbed.analysis.figures import privacy as attacking
    from fleetbed.analysis.figures.privacy_plot import reconstruction_figure
    from fleetbed.analysis.figures.style import save
    from fleetbed.analysis.tables.runs import open_run
    from fleetbed.analysis.tables.writing import csv_text, writable

    original, attacks = attacking.reconstruct_images(open_run(folder), noise or [0.0, 0.8], images, steps)
    columns, rows = attacking.table(attacks)
    with writable(out):
        written = save(reconstruction_figure(original, attacks), out / "reconstruction")
        (out / "reconstruction.csv").write_text(csv_text(columns, rows))
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    for attack in attacks:
        print(f"noise {attack.noise:g} sd: mean SSIM {attacking.mean_ssim(attack):.3f}")
    print(plain(str(written[0])))
