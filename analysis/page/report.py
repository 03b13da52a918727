"""Writes the report of runs: one HTML file, and its parts as PNG, PDF and CSV in a folder next to it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from fleetbed.analysis.figures.plot import grouped
from fleetbed.analysis.page.page import page
from fleetbed.analysis.tables.clients import ClientResources, client_rows, find_client, kind_medians
from fleetbed.analysis.tables.compare import Comparison, records, side_by_side
from fleetbed.analysis.tables.curves import AXES, band
from fleetbed.analysis.tables.metrics import TaskMetric, client_means, task_metrics
from fleetbed.analysis.tables.notes import cautions
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series, runs_of, series_of
from fleetbed.analysis.tables.stragglers import round_costs
from fleetbed.analysis.tables.writing import csv_text, writable
from fleetbed.emulator.wire.storage import write_atomically
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.files import title_of
from fleetbed.profiles.yaml_text import plain

PAGE_START = b"<!doctype html>"


def write_report(
    runs: Sequence[Run], out: Path, base: str | None, targets: Sequence[float], series: str | None = None
) -> list[Path]:
    """Write the report; return all files, the page first."""
    comparison = side_by_side(runs, base, targets, series)
    with writable(out.parent):
        _check_page(out)
        write_atomically(out, lambda part: part.write_text(page(comparison), encoding="utf-8"))
        return [out, *_write_parts(comparison, out.with_name(f"{out.stem}_parts"))]


def _check_page(out: Path) -> None:
    """Refuse a place whose content a report would destroy: only another page is replaced."""
    if out.is_dir():
        raise BadInput(f"--out {out}: a folder, but the name of a page is needed: --out {out / 'report.html'}.")
    if out.is_file():
        with out.open("rb") as file:
            start = file.read(len(PAGE_START))
        if start and start.lower() != PAGE_START:
            raise BadInput(f"--out {out}: exists and is not a web page, so it is not replaced; choose another name.")


def _write_parts(comparison: Comparison, folder: Path) -> list[Path]:
    from fleetbed.analysis.figures.curve_plots import curves_figure
    from fleetbed.analysis.figures.style import save

    folder.mkdir(exist_ok=True)
    runs = runs_of(comparison.series)
    written = []
    for axis in ("time", "rounds", "bytes", "joules"):
        drawn = [one for one in comparison.series if band(one, axis) is not None]
        for name, members in grouped(f"accuracy_{axis}", drawn).items():
            targets = next(group.targets for group in comparison.groups if group.shown == members[0].shown)
            written += save(curves_figure(members, axis, targets), folder / name)
    for name, members in grouped("loss_time", [one for one in comparison.series if band(one, "time")]).items():
        written += save(curves_figure(members, "time", (), "loss"), folder / name)
    comparing = records(comparison)
    tables = {
        "comparison": csv_text(list(comparing[0]), [list(row.values()) for row in comparing]),
        "clients": _clients_csv(comparison.series, None),
        "rounds": _rounds_csv(runs),
        "curves": _curves_csv(comparison),
    }
    reported = [metric for run in runs for metric in task_metrics(run)]
    if reported:
        tables["task_metrics"] = csv_text(TaskMetric._fields, reported)
    for name, text in tables.items():
        path = folder / f"{name}.csv"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def clients_csv(runs: Sequence[Run], client: str | None = None, series: str | None = None) -> str:
    return _clients_csv(series_of(runs, series), client)


def _clients_csv(series: Sequence[Series], client: str | None) -> str:
    rows = [
        (run.name, *msgspec.structs.astuple(row))
        for one in series
        for run in one.runs
        for row in _chosen(one, run, client)
    ]
    return csv_text(("run", *ClientResources.__struct_fields__), rows)


def report_json(
    runs: Sequence[Run], base: str | None, targets: Sequence[float], client: str | None, series: str | None = None
) -> dict[str, Any]:
    """Return the report's figures for programs: the comparison, and all clients of every run, or the given one."""
    comparison = side_by_side(runs, base, targets, series)
    return {
        "runs": [
            {
                "folder": plain(str(run.folder)),
                "method": run.config.algorithm.title,
                "policy": title_of(run.config.policy.kind),
                "series": one.shown,
                "seed": run.config.seed,
                "state": run.state,
                "device_s": run.device_s,
                "clients": _chosen(one, run, client),
                "medians": kind_medians(client_rows(run, one.shown)),
                "task_metrics": client_means(run),
            }
            for one in comparison.series
            for run in one.runs
        ],
        "targets": list(comparison.targets),
        "comparison": records(comparison),
        "warnings": cautions(comparison.series),
    }


def _chosen(one: Series, run: Run, client: str | None) -> list[ClientResources]:
    rows = client_rows(run, one.shown)
    return rows if client is None else [rows[find_client(run, client)]]


def _rounds_csv(runs: Sequence[Run]) -> str:
    columns = ("run", "version", "round", "stage", "start_s", "duration_s", "last_client", "without_last_s")
    path = ("download", "compute", "upload", "server", "rest")
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        for cost in round_costs(run):
            first = (run.name, cost.version, cost.round, cost.stage, cost.start_s, cost.duration_s)
            rest = (cost.last, cost.without_last_s, *(cost.path.get(name, 0.0) for name in path))
            rows.append((*first, *rest, cost.idle_s, cost.busy_s))
    return csv_text((*columns, *(f"{name}_s" for name in path), "idle_s", "busy_s"), rows)


def _curves_csv(comparison: Comparison) -> str:
    rows: list[tuple[Any, ...]] = []
    for one in comparison.series:
        for axis in AXES:
            found = band(one, axis)
            if found is not None:
                points = zip(found.x, found.mean, found.deviation, strict=True)
                rows += [
                    (one.label, one.shown, axis, float(x), *((None, None) if isnan(mean) else (float(mean), float(sd))))
                    for x, mean, sd in points
                ]
    return csv_text(("method", "series", "axis", "x", "accuracy_mean", "accuracy_sd"), rows)
