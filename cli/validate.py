"""`fleetbed validate`: compares plans with training times measured on real boards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json, print_table
from fleetbed.profiles.resolve import search_folders

if TYPE_CHECKING:
    from fleetbed.models.cost.rate_fit import Errors
    from fleetbed.models.cost.validation import Validation

FIGURE = "device-time"


def validate(
    points: Annotated[
        Path | None, typer.Argument(help="A CSV file of measured training times; default: the shipped ones.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("validation"),
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Compare predicted with measured training times: a table, the errors by device, and a plot."""
    from fleetbed.analysis.figures.style import save
    from fleetbed.analysis.figures.validation_plot import validation_figure
    from fleetbed.analysis.tables.writing import writable
    from fleetbed.models.cost.points import read_points, shipped_points
    from fleetbed.models.cost.validation import validate_points

    search = search_folders(profiles)
    found = validate_points(read_points(points or shipped_points(), search))
    with writable(out):
        files = save(validation_figure(found), out / FIGURE)
    for row in found.left_out:
        complain(f"row {row.row} is skipped: {row.reason}")
    for operator, models in found.unknown_operators.items():
        complain(f"the operator {operator} of {', '.join(models)} is in no class: it is counted as memory-bound")
    if as_json:
        print_json({"files": [str(file) for file in files], **_as_json(found)})
        return
    _print(found)
    for file in files:
        print(file)


def _as_json(found: Validation) -> dict[str, object]:
    return {
        "points": [
            {
                "row": each.point.row,
                "device": each.point.device,
                "model": each.point.model,
                "batch": each.point.batch,
                "input": "x".join(map(str, each.point.shape)),
                "measured_s": each.point.seconds,
                "predicted_s": each.predicted_s,
                "error": each.error,
                "unseen_s": each.unseen_s,
                "unseen_error": each.unseen_error,
            }
            for each in found.compared
        ],
        "devices": found.devices,
        "left_out": found.left_out,
        "unknown_operators": found.unknown_operators,
    }


def _print(found: Validation) -> None:
    rows = [
        (
            each.point.device,
            each.point.model,
            each.point.batch,
            f"{each.point.seconds:.3g}",
            f"{each.predicted_s:.3g}",
            f"{each.error:+.0%}",
            "" if each.unseen_error is None else f"{each.unseen_error:+.0%}",
        )
        for each in found.compared
    ]
    print_table(
        f"{len(rows)} training steps",
        ("device", "model", "batch", "measured s", "predicted s", "error", "left out of the fit"),
        rows,
    )
    print()
    summary = []
    for result in found.devices:
        kinds = ", ".join(result.rates_from)
        summary.append((result.device, kinds, "all", *_cells(result.errors)))
        if result.unseen is not None:
            summary.append((result.device, kinds, "model left out of the fit", *_cells(result.unseen)))
    print_table(
        "Relative errors",
        ("device", "rates", "predicted", "points", "median", "p90", "worst", "rank correlation"),
        summary,
    )


def _cells(errors: Errors) -> tuple[object, ...]:
    rank = "" if errors.rank is None else f"{errors.rank:.2f}"
    return errors.points, f"{errors.median:.1%}", f"{errors.p90:.1%}", f"{errors.worst:.1%}", rank
