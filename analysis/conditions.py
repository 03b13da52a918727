"""Under which conditions runs were made: caps and their errors, host, versions, how to repeat them. For the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fleetbed.analysis.runs import Cap, Run
from fleetbed.analysis.units import MISSING, data_bytes, digits, percent, seconds

MOST_NOTICES = 200
HEADS = ("Knob", "Status", "By", "Clients", "Read back off by", "Proved off by", "Note")
TEXT = ("Knob", "Status", "By", "Note")


def conditions(runs: Sequence[Run]) -> str:
    """As HTML. Caps, host and versions are those of the first run: where others differ, the page says so above."""
    facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in _facts(runs[0]).items())
    commands = "\n".join(dict.fromkeys(str(run.meta["command"]) for run in runs if run.meta.get("command")))
    return (
        f"<h3>What held the clients to their devices</h3>{_caps(runs[0])}"
        f'<dl class="facts">{facts}</dl>'
        f'<h3>To repeat</h3><pre id="command">{escape(commands) or MISSING}</pre>'
        f'<button type="button" data-copy="command">Copy</button>{_notices(runs)}'
    )


def _facts(run: Run) -> dict[str, str]:
    host, timing = run.meta.get("host") or {}, run.meta.get("timing") or {}
    versions = {"fleetbed": run.meta.get("fleetbed_version", MISSING)} | (run.meta.get("versions") or {})
    return {
        "Processor": f"{host.get('cpu', MISSING)}, {host.get('cores', MISSING)} cores",
        "Memory": data_bytes(host.get("memory_bytes")),
        "GPU": str(host.get("gpu") or "none"),
        "Kernel, Python": f"{host.get('kernel', MISSING)}, {host.get('python', MISSING)}",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Timing": f"{timing.get('source', MISSING)}{_slowed(run)}",
        "Calibration": str((run.meta.get("calibration") or {}).get("id") or "none"),
        "Started": str(run.meta.get("started") or MISSING),
    }


def _slowed(run: Run) -> str:
    found = sorted(task.dilation for task in run.tasks if task.dilation is not None)
    if not found:
        return ""
    least, most = digits(found[0]), digits(found[-1])
    return f", {least if least == most else f'{least} to {most}'} host seconds per device second"


def _caps(run: Run) -> str:
    """What held in this run; below it the knobs of the host that the run did not use, or does not have yet."""
    groups: dict[tuple[str, str, str], list[Cap]] = {}
    for cap in run.caps:
        groups.setdefault((cap.knob, cap.status, cap.backend), []).append(cap)
    proved = {row["knob"]: row["error"] for row in run.meta.get("verify") or []}
    lines = []
    for (knob, status, backend), caps in groups.items():
        off = [abs(cap.got / cap.asked - 1) for cap in caps if cap.asked and cap.got is not None]
        error = percent(proved.get(knob)) if status == "enforced" else MISSING
        line = (knob, status, backend, str(len(caps)), percent(max(off)) if off else MISSING, error, caps[0].note)
        lines.append(line)
    used = {cap.knob for cap in run.caps}
    for entry in run.meta.get("doctor") or []:
        if entry["knob"] not in used:
            status = "not used" if run.caps and entry["status"] != "unavailable" else str(entry["status"])
            note = str(entry.get("note", ""))
            lines.append((entry["knob"], status, entry["backend"], MISSING, MISSING, MISSING, note))
    if not lines:
        return "<p class=note>Nothing is recorded of it yet.</p>"
    head = "".join(f'<th scope="col"{" class=text" if title in TEXT else ""}>{title}</th>' for title in HEADS)
    rows = "".join(_cap_row(line) for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cap_row(line: tuple[str, ...]) -> str:
    knob, status, backend, *figures, note = (escape(cell) for cell in line)
    return (
        f'<tr><th scope="row">{knob}</th><td class="text status-{status.split()[0]}">{status}</td>'
        f'<td class="text">{backend}</td>'
        + "".join(f"<td>{figure}</td>" for figure in figures)
        + f'<td class="wrap">{note}</td></tr>'
    )


def _notices(runs: Sequence[Run]) -> str:
    told = [
        f"<li>{escape(run.name)}, {escape(seconds(notice.device_s))}: {escape(notice.text)}</li>"
        for run in runs
        for notice in run.notices
    ]
    if not told:
        return ""
    rest = f"<li>and {len(told) - MOST_NOTICES} more</li>" if len(told) > MOST_NOTICES else ""
    return f"<details><summary>{len(told)} notices</summary><ul>{''.join(told[:MOST_NOTICES])}{rest}</ul></details>"
