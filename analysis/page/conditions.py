"""The conditions of runs for the report page: limits and their errors, host, versions, command to repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fleetbed.analysis.tables.about import Host, HostKnob
from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.units import MISSING, data_bytes, digits, percent, seconds
from fleetbed.emulator.records.tables import CapRow

MOST_NOTICES = 200
HEADS = ("Knob", "Status", "Enforced by", "Clients", "Error when read back", "Error in fleetbed verify", "Note")
TEXT = ("Knob", "Status", "Enforced by", "Note")
STATUSES = ("enforced", "modelled", "unavailable")


def conditions(runs: Sequence[Run]) -> str:
    """Return HTML. Limits, host and versions are those of the first run; the page lists differences above."""
    named = {**_facts(runs[0]), **_files(runs)}
    facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in named.items())
    commands = "\n".join(dict.fromkeys(run.about.command for run in runs if run.about.command))
    return (
        f"<h3>Limits of the clients</h3>{_caps(runs[0])}"
        f'<dl class="facts">{facts}</dl>'
        f'<h3>Command to repeat this</h3><pre id="command">{escape(commands) or MISSING}</pre>'
        f'<button type="button" data-copy="command">Copy</button>{_notices(runs)}'
    )


def _facts(run: Run) -> dict[str, str]:
    about, host = run.about, run.about.host or Host()
    versions = {"fleetbed": about.fleetbed_version or MISSING} | (about.versions or {})
    nodes = [
        f"{node.name}: {node.cpu}, {node.cores} core{'s' * (node.cores != 1)}, {node.outcomes} outcomes"
        for node in about.nodes or ()
    ]
    return {
        "Processor": f"{host.cpu or MISSING}, {host.cores or MISSING} cores",
        **({"Nodes": "; ".join(nodes)} if nodes else {}),
        "Memory": data_bytes(host.memory_bytes),
        "GPU": str(host.gpu or "none"),
        "Kernel, Python": f"{host.kernel or MISSING}, {host.python or MISSING}",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Timing": f"{(about.timing or {}).get('source', MISSING)}{_slowed(run)}",
        "Calibration": str((about.calibration or {}).get("id") or "none"),
        "Started": about.started or MISSING,
    } | _not_applicable(run)


def _not_applicable(run: Run) -> dict[str, str]:
    if run.config.experiment.flower is None:
        return {}
    return {
        "Does not apply to a Flower app": "the choice of a model by memory, a forecast before the run, "
        "and resuming in the middle of its ServerApp"
    }


def _files(runs: Sequence[Run]) -> dict[str, str]:
    """The user's own code, which no version stands for."""
    found = dict.fromkeys(
        f"{path} (SHA-256 {digest})" for run in runs for path, digest in (run.about.files or {}).items()
    )
    return {"Your own code": ", ".join(found)} if found else {}


def _slowed(run: Run) -> str:
    found = sorted(task.time_scale for task in run.tasks if task.time_scale is not None)
    if not found:
        return ""
    least, most = digits(found[0]), digits(found[-1])
    return f", {least if least == most else f'{least} to {most}'} host seconds per device second"


def _caps(run: Run) -> str:
    """Return a table of the limits in this run, then of those that the host could also enforce, or cannot."""
    groups: dict[tuple[str, str, str], list[CapRow]] = {}
    for cap in run.caps:
        groups.setdefault((cap.knob, cap.status, cap.backend), []).append(cap)
    proved = {proof.knob: proof.error for proof in run.about.verify or ()}
    lines: list[tuple[str, ...]] = []
    for (knob, status, backend), caps in groups.items():
        off = [abs(cap.got / cap.asked - 1) for cap in caps if cap.asked and cap.got is not None]
        error = percent(proved.get(knob)) if status == "enforced" else MISSING
        line = (knob, status, backend, str(len(caps)), percent(max(off)) if off else MISSING, error, caps[0].note)
        lines.append(line)
    held = {cap.knob: cap.status for cap in run.caps}
    for able in run.about.host_can or ():
        # also show a limit that the run only modelled although the host can enforce it
        if able.knob not in held or (able.status == "enforced" != held[able.knob]):
            lines.append(_of_host(able, in_use=bool(run.caps)))
    if not lines:
        return "<p class=note>Nothing has been recorded yet.</p>"
    head = "".join(f'<th scope="col"{" class=text" if title in TEXT else ""}>{title}</th>' for title in HEADS)
    rows = "".join(_cap_row(line) for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _of_host(knob: HostKnob, *, in_use: bool) -> tuple[str, ...]:
    status = "not used" if in_use and knob.status != "unavailable" else knob.status
    enable = f"To enable: {knob.enable}" if knob.enable else ""
    note = " ".join(text for text in (knob.note, enable) if text)
    return (knob.knob, status, knob.backend, MISSING, MISSING, MISSING, note)


def _cap_row(line: tuple[str, ...]) -> str:
    knob, status, backend, *figures, note = (escape(cell) for cell in line)
    kind = status if status in STATUSES else "not"
    return (
        f'<tr><th scope="row">{knob}</th><td class="text status-{kind}">{status}</td>'
        f'<td class="text">{backend}</td>'
        + "".join(f"<td>{figure}</td>" for figure in figures)
        + f'<td class="wrap">{note}</td></tr>'
    )


def _notices(runs: Sequence[Run]) -> str:
    items = [
        f"<li>{escape(run.name)}, {escape(seconds(notice.device_s))}: {escape(notice.text)}</li>"
        for run in runs
        for notice in run.notices
    ]
    if not items:
        return ""
    rest = f"<li>and {len(items) - MOST_NOTICES} more</li>" if len(items) > MOST_NOTICES else ""
    return f"<details><summary>{len(items)} notices</summary><ul>{''.join(items[:MOST_NOTICES])}{rest}</ul></details>"
