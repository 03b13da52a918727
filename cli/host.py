"""`fleetbed doctor`, `calibrate`, `verify` and `profiles measure`: examine this machine and test its limits."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetbed.cli.common import AsJson, ProfileFolders, complain, print_json, print_table
from fleetbed.profiles.yaml_text import plain

if TYPE_CHECKING:
    from fleetbed.emulator.checks.verify import LimitsReport, Proof
    from fleetbed.emulator.machine.calibration import Calibration


def doctor(as_json: AsJson = False) -> None:
    """Show what this host can enforce, and the commands that would enable the rest."""
    from fleetbed.emulator.checks.doctor import examine

    report = examine()
    if as_json:
        print_json(report)
        return
    gib = 2**30
    print(f"{report.cpu}, {report.cores} cores")
    print(f"{report.memory_bytes / gib:.1f} GiB of memory, {report.available_bytes / gib:.1f} GiB of it free")
    if report.calibration is None:
        print("not calibrated yet: run fleetbed calibrate, or let the first run do it")
    else:
        _print_calibration(report.calibration)
    rows = [(knob.knob, knob.status, knob.backend, knob.note) for knob in report.knobs]
    print_table("What this host can enforce", ("limit", "status", "enforced by", "note"), rows)
    for command in sorted({knob.enable for knob in report.knobs} - {""}):
        knobs = ", ".join(knob.knob for knob in report.knobs if knob.enable == command)
        print(f"To enforce more of {knobs}: {command}")


def calibrate(
    force: Annotated[bool, typer.Option("--force", help="Measure again, and discard the reference times.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of this host once, and store it in the user's cache."""
    from fleetbed.emulator.machine import measuring_lock
    from fleetbed.emulator.machine.calibration import Store, load_or_measure

    with measuring_lock.alone(complain):
        calibration = load_or_measure(force=force)
    if as_json:
        print_json({"id": calibration.id, "file": str(Store().path), "calibration": calibration})
    else:
        _print_calibration(calibration)
    if calibration.disturbed:
        why = ", ".join(dict.fromkeys(calibration.disturbed.values()))
        _warn(f"{why} during the measurement, so it is too low and was not saved; repeat it when the host is idle")
    elif not as_json:
        print(f"saved in {Store().path}")


def _print_calibration(calibration: Calibration) -> None:
    rate = calibration.rate
    print(f"calibration {calibration.id} of {calibration.measured}, {len(calibration.steps)} reference times")
    print(
        f"one core alone: {rate.alone_gflops:.1f} GFLOPS (spread {rate.alone_spread:.1%}); "
        f"each of {rate.cores} busy cores: {rate.busy_gflops:.1f} GFLOPS (spread {rate.busy_spread:.1%})"
    )


def verify(
    devices: Annotated[
        str | None, typer.Option(help="Device names, separated by commas; default: all CPU boards.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only three devices and the small memory limits.")] = False,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Stress-test the limits and report requested, measured and error. Exit code 1 if an error is out of tolerance."""
    from fleetbed.emulator.checks import verify as proving
    from fleetbed.profiles.resolve import load_device, search_folders

    search = search_folders(profiles)
    if devices is None:
        chosen = proving.shipped_cpu_devices()
    else:
        names = [name.strip() for name in devices.split(",")]
        chosen = {name: load_device(name, search, "--devices") for name in names}
    report = proving.verify_limits(chosen, quick=quick, on_result=_show_progress)
    proving.save_report(report)
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    if not report.host_was_idle:
        _warn(
            f"other processes used up to {report.other_cores:.1f} cores during the test: "
            "a rate out of tolerance means nothing until the host is idle"
        )
    if not report.ok:
        raise typer.Exit(1)


def _show_progress(proof: Proof) -> None:
    """Print one result on stderr as progress: the measurement is long, and its table comes at the end."""
    mark = "ok" if proof.ok else "OUT OF TOLERANCE"
    print(plain(f"{proof.knob}: {proof.device} {proof.error:+.2%} {mark}"), file=sys.stderr)


def _print_report(report: LimitsReport) -> None:
    rows = [
        (
            proof.knob,
            proof.device,
            f"{proof.asked:.4g}",
            f"{proof.got:.4g}",
            proof.unit,
            f"{proof.error:+.2%}",
            f"{proof.low:+.0%} to {proof.high:+.0%}" if proof.low > -1 else f"at most {proof.high:+.0%}",
            "yes" if proof.ok else "NO",
            proof.backend,
        )
        for proof in report.proofs
    ]
    columns = ("limit", "device", "requested", "measured", "unit", "error", "tolerance", "within", "enforced by")
    print_table(f"Limits measured at a time scale of {report.time_scale:.3g}", columns, rows)
    print(f"largest interference between paced clients: {report.worst_interference:.2%}")
    for sentence in report.skipped:
        print(f"skipped: {sentence}")


def measure(
    name: Annotated[str | None, typer.Option(help="The board's title; default: the name it reports itself.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; default: <name>.yaml in this folder.")] = None,
    link: Annotated[str, typer.Option(help="The link that connects the board.")] = "ethernet_1g",
    as_json: AsJson = False,
) -> None:
    """Measure the board that this runs on, and write its device profile."""
    from fleetbed.emulator.checks.board import as_yaml, board_title, measure_board
    from fleetbed.emulator.checks.class_rates import STEADY
    from fleetbed.emulator.machine.host import MOST_OTHER_CORES, LoadMeter
    from fleetbed.profiles.errors import BadInput
    from fleetbed.profiles.loading import read_profile
    from fleetbed.profiles.resolve import load_link
    from fleetbed.profiles.types import Device

    title = name or board_title()
    path = out or Path(re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".yaml")
    if path.exists():
        raise BadInput(f"{path}: this file already exists; remove it, or choose another with --out.")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: the folder {path.parent} does not exist; create it, or choose another with --out.")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"{path}: the folder {path.parent} is not writable; choose another with --out.")
    load_link(link, where="--link")
    meter = LoadMeter()
    measured, classes = measure_board(title, link)
    path.write_text(as_yaml(measured))
    if (others := meter.other_cores()) > MOST_OTHER_CORES:
        _warn(
            f"other processes used {others:.1f} cores during the measurement, so the rates are too low: "
            "repeat on an idle machine"
        )
    if classes.spread > STEADY:
        _warn(
            f"times of the same training step differ by {classes.spread:.0%}, so the rates are not reliable: "
            "measure again when nothing else is running"
        )
    device = read_profile(path, Device)
    if as_json:
        print_json({"file": str(path), "profile": device, "steps": classes.steps, "spread": classes.spread})
    else:
        print(
            f"{path}: {device.rate_gflops:g} GFLOPS, {device.memory.available_mib:g} MiB free, "
            f"{device.runtime_mib:g} MiB of it for the framework"
        )
        rows = [
            (step.model, f"{1e3 * step.measured_s:.4g}", f"{1e3 * step.predicted_s:.4g}", f"{step.error:+.1%}")
            for step in classes.steps
        ]
        print_table("What the rates predict", ("training step", "measured ms", "predicted ms", "error"), rows)


def _warn(sentence: str) -> None:
    print(f"fleetbed: {sentence}", file=sys.stderr)
