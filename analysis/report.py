"""Writes the report of runs: one HTML file, and its parts as PNG, PDF and CSV in a folder beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.analysis.clients import ClientRow, client_rows, find_client, kind_medians
from fleetbed.analysis.compare import Comparison, records, side_by_side
from fleetbed.analysis.curves import AXES, band
from fleetbed.analysis.page import page, warnings
from fleetbed.analysis.runs import Run
from fleetbed.analysis.stragglers import round_costs
from fleetbed.analysis.tables import csv_text, writable


def write_report(runs: Sequence[Run], out: Path, base: str | None, targets: Sequence[float]) -> list[Path]:
    """Every file that was written, the page first."""
    comparison = side_by_side(runs, base, targets)
    with writable(out.parent):
        out.write_text(page(comparison), encoding="utf-8")
        return [out, *_write_parts(comparison, out.with_name(f"{out.stem}_parts"))]


def _write_parts(comparison: Comparison, folder: Path) -> list[Path]:
    from fleetbed.analysis.curve_plots import curves_figure
    from fleetbed.analysis.style import save

    folder.mkdir(exist_ok=True)
    series = [summary.series for summary in comparison.summaries]
    runs = [run for one in series for run in one.runs]
    written = []
    for axis in ("time", "rounds", "bytes", "joules"):
        if any(band(one, axis) is not None for one in series):
            written += save(curves_figure(series, axis, comparison.targets), folder / f"accuracy_{axis}")
    comparing = records(comparison)
    tables = {
        "comparison": csv_text(list(comparing[0]), [list(row.values()) for row in comparing]),
        "clients": clients_csv(runs),
        "rounds": _rounds_csv(runs),
        "curves": _curves_csv(comparison),
    }
    for name, text in tables.items():
        path = folder / f"{name}.csv"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def clients_csv(runs: Sequence[Run], client: str | None = None) -> str:
    rows = [(run.name, *msgspec.structs.astuple(row)) for run in runs for row in _chosen(run, client)]
    return csv_text(("run", *ClientRow.__struct_fields__), rows)


def report_json(runs: Sequence[Run], base: str | None, targets: Sequence[float], client: str | None) -> dict[str, Any]:
    """The figures of the report for programs: the comparison, and every client of every run (or the one named)."""
    comparison = side_by_side(runs, base, targets)
    return {
        "runs": [
            {
                "folder": str(run.folder),
                "method": run.config.algorithm.title,
                "policy": run.config.policy.kind,
                "seed": run.config.seed,
                "state": run.state,
                "device_s": run.device_s,
                "clients": _chosen(run, client),
                "medians": kind_medians(client_rows(run)),
            }
            for run in runs
        ],
        "targets": list(comparison.targets),
        "comparison": records(comparison),
        "warnings": warnings(runs),
    }


def _chosen(run: Run, client: str | None) -> list[ClientRow]:
    rows = client_rows(run)
    return rows if client is None else [rows[find_client(run, client)]]


def _rounds_csv(runs: Sequence[Run]) -> str:
    columns = ("run", "version", "round", "stage", "start_s", "duration_s", "last_client", "without_last_s")
    path = ("download", "wait", "compute", "upload", "server", "rest")
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        for cost in round_costs(run):
            first = (run.name, cost.version, cost.round, cost.stage, cost.start_s, cost.duration_s)
            rest = (cost.last, cost.without_last_s, *(cost.path.get(name, 0.0) for name in path))
            rows.append((*first, *rest, cost.idle_s, cost.busy_s))
    return csv_text((*columns, *(f"{name}_s" for name in path), "idle_s", "busy_s"), rows)


def _curves_csv(comparison: Comparison) -> str:
    rows: list[tuple[Any, ...]] = []
    for summary in comparison.summaries:
        for axis in AXES:
            found = band(summary.series, axis)
            if found is not None:
                points = zip(found.x, found.mean, found.deviation, strict=True)
                rows += [(summary.series.label, axis, *map(float, point)) for point in points]
    return csv_text(("method", "axis", "x", "accuracy_mean", "accuracy_sd"), rows)
