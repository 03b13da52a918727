"""`fleetbed doctor`, `calibrate`, `verify` and `profiles measure`: what this machine is and can hold others to."""

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
    """Say what this host can enforce, and the command that would enable the rest."""
    from fleetbed.emulator.checks.doctor import examine

    report = examine()
    if as_json:
        print_json(report)
        return
    gib = 2**30
    print(f"{report.cpu}, {report.cores} cores")
    print(f"{report.memory_bytes / gib:.1f} GiB of memory, {report.available_bytes / gib:.1f} GiB of it free")
    if report.calibration is None:
        print("not calibrated yet: run fleetbed calibrate (or the first run does it)")
    else:
        _print_calibration(report.calibration)
    rows = [(knob.knob, knob.status, knob.backend, knob.note) for knob in report.knobs]
    print_table("What this host can enforce", ("knob", "status", "by", "note"), rows)
    for command in sorted({knob.enable for knob in report.knobs} - {""}):
        knobs = ", ".join(knob.knob for knob in report.knobs if knob.enable == command)
        print(f"more for {knobs} with: {command}")


def calibrate(
    force: Annotated[bool, typer.Option("--force", help="Measure again, and forget the reference times.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this host is, once, and keep it in the user's cache."""
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
        _warn(f"{why} while this was measured, so it is too low and is not kept; run it again when the host is quiet")
    elif not as_json:
        print(f"kept in {Store().path}")


def _print_calibration(calibration: Calibration) -> None:
    rate = calibration.rate
    print(f"calibration {calibration.id} of {calibration.measured}, {len(calibration.steps)} reference times")
    print(
        f"one core alone {rate.alone_gflops:.1f} GFLOPS (spread {rate.alone_spread:.1%}), "
        f"each of {rate.cores} busy ones {rate.busy_gflops:.1f} GFLOPS (spread {rate.busy_spread:.1%})"
    )


def verify(
    devices: Annotated[str | None, typer.Option(help="Names, separated by commas; without it all CPU boards.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three devices and the small memory caps only.")] = False,
    profiles: ProfileFolders = None,
    as_json: AsJson = False,
) -> None:
    """Stress-test the limits and report requested, measured and error. Exit code 1 if an error is out of tolerance."""
    from fleetbed.emulator.checks import verify as proving
    from fleetbed.profiles.resolve import load_device

    search = profiles or ()
    if devices is None:
        chosen = proving.shipped_cpu_devices()
    else:
        names = [name.strip() for name in devices.split(",")]
        chosen = {name: load_device(name, search, "--devices") for name in names}
    report = proving.verify(chosen, quick=quick, tell=_tell)
    proving.keep(report)
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    if not report.quiet:
        _warn(
            f"others kept up to {report.other_cores:.1f} cores busy meanwhile: "
            "a rate beyond its bar says nothing until the host is quiet"
        )
    if not report.ok:
        raise typer.Exit(1)


def _tell(proof: Proof) -> None:
    """A long measurement shows that it goes on; the table comes at the end."""
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
            "ok" if proof.ok else "no",
            proof.backend,
        )
        for proof in report.proofs
    ]
    columns = ("knob", "device", "asked", "got", "unit", "error", "bar", "held", "by")
    print_table(f"Limits measured at a time scale of {report.time_scale:.3g}", columns, rows)
    print(f"largest interference between paced clients: {report.worst_interference:.2%}")
    for sentence in report.skipped:
        print(f"skipped: {sentence}")


def measure(
    name: Annotated[str | None, typer.Option(help="The board's title; without it what the board says.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; without it <name>.yaml here.")] = None,
    link: Annotated[str, typer.Option(help="The link that the board is on.")] = "ethernet_1g",
    as_json: AsJson = False,
) -> None:
    """Run on a board: measure it and write its device profile."""
    from fleetbed.emulator.checks.board import as_yaml, board_title, measure_board
    from fleetbed.emulator.checks.class_rates import STEADY
    from fleetbed.emulator.machine.host import QUIET_CORES, LoadMeter
    from fleetbed.profiles.errors import BadInput
    from fleetbed.profiles.loading import read
    from fleetbed.profiles.resolve import load_link
    from fleetbed.profiles.types import Device

    title = name or board_title()
    path = out or Path(re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".yaml")
    if path.exists():
        raise BadInput(f"{path}: this file exists already; remove it, or name another one with --out.")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}; make it, or name another one with --out.")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"{path}: the folder {path.parent} cannot be written; name another one with --out.")
    load_link(link, where="--link")
    meter = LoadMeter()
    measured, classes = measure_board(title, link)
    path.write_text(as_yaml(measured))
    if (others := meter.other_cores()) > QUIET_CORES:
        _warn(
            f"others kept {others:.1f} cores busy meanwhile, so the rates are too low: measure again when it is quiet"
        )
    if classes.spread > STEADY:
        _warn(
            f"the same training step took times that are {classes.spread:.0%} apart, so the rates are not to be relied "
            "on: measure again when nothing else runs"
        )
    device = read(path, Device)
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
