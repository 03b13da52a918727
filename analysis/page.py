"""The report's page: what is written into the HTML, beside what the page draws by itself from the payload."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

from fleetbed.analysis.compare import (
    COSTS,
    TITLES,
    Comparison,
    difference_text,
    factor,
    spread,
    to_target_text,
)
from fleetbed.analysis.curves import AXES
from fleetbed.analysis.payload import payload
from fleetbed.analysis.runs import Run
from fleetbed.analysis.study import differences
from fleetbed.analysis.tables import Table
from fleetbed.analysis.units import MISSING, data_bytes, digits, percent, seconds, target_text

SCRIPTS = ("draw.js", "timeline.js", "clients.js", "page.js")


def page(comparison: Comparison) -> str:
    """One file that needs no other: style, script and data are inside."""
    series = [summary.series for summary in comparison.summaries]
    runs = [run for one in series for run in one.runs]
    data = msgspec.json.encode(payload(series, comparison.targets)).decode()
    return Template(_asset("report.html")).substitute(
        title=_escaped(title(runs)),
        lead=_escaped(_lead(runs, comparison)),
        banners="".join(f'<p class="banner">{_escaped(text)}</p>' for text in warnings(runs)),
        tiles="".join(_tile(*tile) for tile in _tiles(runs, comparison)),
        accuracy_note=_escaped(_accuracy_note(comparison)),
        result_tables="".join(f"<h3>{_escaped(head)}</h3>{table.html()}" for head, table in results(comparison)),
        conditions=_conditions(runs),
        footer=_escaped(f"Written by fleetbed from {len(runs)} run{_s(runs)}: {', '.join(r.name for r in runs)}."),
        css=_asset("report.css"),
        js="\n".join(_asset(name) for name in SCRIPTS),
        # "</" would end the script element, whatever JSON says
        payload=data.replace("</", "<\\/"),
    )


def title(runs: Sequence[Run]) -> str:
    return " and ".join(dict.fromkeys(run.config.experiment.title for run in runs))


def warnings(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before believing a figure."""
    found = list(differences(runs).values())
    found += [f"{run.name} is {run.state}. It is shown as far as it went." for run in runs if not run.finished]
    degraded = [run.name for run in runs if run.meta.get("degraded")]
    if degraded:
        found.append(
            f"Device times of {', '.join(degraded)} are degraded: the host could not keep the pace of the plan "
            "(the 95th percentile of measured over planned compute is above 1.05)."
        )
    return found


def results(comparison: Comparison) -> list[tuple[str, Table]]:
    """Accuracy, then a table per target."""
    base = comparison.base
    accuracy = Table(
        ("Method", "Seeds", "Final", "Best", f"Final, to {base.series.label}", "Peak memory", "Dropped work"),
        tuple(
            (
                summary.series.label,
                str(len(summary.series.runs)),
                spread(summary.final),
                spread(summary.best),
                difference_text(summary.difference),
                data_bytes(summary.peak_bytes),
                percent(summary.dropped),
            )
            for summary in comparison.summaries
        ),
    )
    found = [("Accuracy reached", accuracy)]
    for target in comparison.targets:
        rows = []
        for summary in comparison.summaries:
            costs = [to_target_text(summary.to_target[target, axis]) for axis in AXES]
            gains = [factor(summary.speed_up(base, target, axis)) for axis in COSTS[:3]]
            rows.append((summary.series.label, *costs, *gains))
        columns = [TITLES[axis] for axis in AXES] + [f"{TITLES[axis]}, times less" for axis in COSTS[:3]]
        head = f"To reach {target_text(target)}, and how many times less than {base.series.label}"
        found.append((head, Table(("Method", *columns), tuple(rows))))
    return found


def _lead(runs: Sequence[Run], comparison: Comparison) -> str:
    experiment = runs[0].config.experiment
    methods = ", ".join(summary.series.label for summary in comparison.summaries)
    seeds = sorted({run.config.seed for run in runs})
    kinds = len({client.device for client in runs[0].clients})
    partition = experiment.data.partition
    skew = f" {partition.alpha:g}" if partition.kind == "dirichlet" else ""
    return (
        f"{methods} on {len(runs[0].clients)} clients of {kinds} kind{_s(range(kinds))} "
        f"(fleet {experiment.fleet}), {experiment.rounds} rounds, seed{_s(seeds)} {', '.join(map(str, seeds))}. "
        f"Data: {experiment.data.name}, partition {partition.kind}{skew}; models: {experiment.model.family}; "
        f"policy: {', '.join(dict.fromkeys(run.config.policy.kind for run in runs))}; "
        f"timing: {experiment.timing.source}."
    )


def _tiles(runs: Sequence[Run], comparison: Comparison) -> list[tuple[str, str, str]]:
    """Heading, figure, and what the figure is of."""
    tiles = []
    ranked = [summary for summary in comparison.summaries if summary.final]
    if ranked:
        best = max(ranked, key=lambda summary: sum(summary.final.values()) / len(summary.final))
        tiles.append(("Best final accuracy", spread(best.final), best.series.label))
    for target in comparison.targets[:1]:
        there = [summary for summary in comparison.summaries if summary.to_target[target, "time"].always]
        if there:
            first = min(there, key=lambda summary: sum(summary.to_target[target, "time"].reached))
            gain = first.speed_up(comparison.base, target, "time")
            over = f", {factor(gain)} {comparison.base.series.label}" if gain and first is not comparison.base else ""
            time = to_target_text(first.to_target[target, "time"])
            tiles.append((f"Fastest to {target_text(target)}", time, first.series.label + over))
    fit = sum(client.variant is not None for client in runs[0].clients)
    unfit = len(runs[0].clients) - fit
    tiles.append(("Clients that train", str(fit), f"{unfit} unfit" if unfit else "none unfit"))
    host = sum(run.rounds[-1].host_end_s for run in runs if run.rounds)
    tiles.append(("Device time emulated", seconds(sum(run.device_s for run in runs)), f"in {seconds(host)} here"))
    return tiles


def _tile(head: str, figure: str, of: str) -> str:
    return f"<div><dt>{_escaped(head)}</dt><dd>{_escaped(figure)}</dd><dd>{_escaped(of)}</dd></div>"


def _accuracy_note(comparison: Comparison) -> str:
    several = any(len(summary.series.runs) > 1 for summary in comparison.summaries)
    spread_note = " Lines are means over seeds, bands one standard deviation." if several else ""
    return (
        "Mean over the evaluated models. Device time is the time as the devices would have lived it; "
        f"measuring accuracy takes none of it.{spread_note}"
    )


def _conditions(runs: Sequence[Run]) -> str:
    first = runs[0]
    host, timing = first.meta.get("host") or {}, first.meta.get("timing") or {}
    dilation = timing.get("dilation")
    facts = {
        "Processor": f"{host.get('cpu', MISSING)}, {host.get('cores', MISSING)} cores",
        "Memory": data_bytes(host.get("memory_bytes")),
        "GPU": host.get("gpu") or "none",
        "Kernel, Python": f"{host.get('kernel', MISSING)}, {host.get('python', MISSING)}",
        "Versions": ", ".join(
            [f"fleetbed {first.meta.get('fleetbed_version', MISSING)}"]
            + [f"{k} {v}" for k, v in (first.meta.get("versions") or {}).items() if k != "fleetbed"]
        ),
        "Timing": f"{timing.get('source', MISSING)}"
        + (f", {digits(dilation)} host seconds per device second" if isinstance(dilation, (int, float)) else ""),
        "Calibration": (first.meta.get("calibration") or {}).get("id") or "none",
        "Started": first.meta.get("started") or MISSING,
    }
    listed = "".join(f"<dt>{_escaped(key)}</dt><dd>{_escaped(str(value))}</dd>" for key, value in facts.items())
    commands = "\n".join(dict.fromkeys(str(run.meta["command"]) for run in runs if run.meta.get("command")))
    notices = [(run, notice) for run in runs for notice in run.notices]
    told = "".join(
        f"<li>{_escaped(run.name)}, {_escaped(seconds(notice.device_s))}: {_escaped(notice.text)}</li>"
        for run, notice in notices[:200]
    )
    return (
        f"<h3>What held the clients to their devices</h3>{_caps(first)}"
        f'<dl class="facts">{listed}</dl>'
        f'<h3>To repeat</h3><pre id="command">{_escaped(commands) or MISSING}</pre>'
        '<button type="button" data-copy="command">Copy</button>'
        + (f"<details><summary>{len(notices)} notices</summary><ul>{told}</ul></details>" if notices else "")
    )


def _caps(run: Run) -> str:
    """What the host could do, what was read back for this run, and what `verify` measured."""
    verified = {row["knob"]: row for row in run.meta.get("verify") or []}
    rows = []
    for entry in run.meta.get("doctor") or _doctor_from_caps(run):
        knob = entry["knob"]
        status = str(entry["status"])
        off = [abs(cap.got / cap.asked - 1) for cap in run.caps if cap.knob == knob and cap.asked and cap.got]
        measured = verified.get(knob, {}).get("error")
        cells = [entry.get("backend", ""), str(len(off)), percent(max(off)) if off else MISSING]
        cells.append(percent(measured) if measured is not None else "not measured")
        rows.append(
            f'<tr><th scope="row">{_escaped(knob)}</th><td class="text status-{_escaped(status)}">{_escaped(status)}'
            f'</td><td class="text">{_escaped(cells[0])}</td>'
            + "".join(f"<td>{_escaped(cell)}</td>" for cell in cells[1:])
            + f'<td class="wrap">{_escaped(entry.get("note", ""))}</td></tr>'
        )
    heads = ("Knob", "Status", "By", "Clients read back", "Largest difference", "Measured error", "Note")
    left = ("Knob", "Status", "By", "Note")
    head = "".join(f'<th scope="col"{" class=text" if h in left else ""}>{h}</th>' for h in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _doctor_from_caps(run: Run) -> list[dict[str, Any]]:
    knobs = {cap.knob: cap for cap in run.caps}
    return [{"knob": k, "status": c.status, "backend": c.backend, "note": c.note} for k, c in knobs.items()]


def _asset(name: str) -> str:
    return (files("fleetbed.analysis") / "assets" / name).read_text(encoding="utf-8")


def _escaped(text: str) -> str:
    return html.escape(str(text))


def _s(many: Sequence[object] | range) -> str:
    return "" if len(many) == 1 else "s"
