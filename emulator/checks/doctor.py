"""Finds out what this host can enforce, knob by knob, and which command would enable the rest."""

from __future__ import annotations

import getpass
import os
import shutil
from pathlib import Path

from msgspec import Struct

from fleetbed.emulator.limits import Cap, GpuPlan, LimitPlan, best_limits
from fleetbed.emulator.limits.cgroup import CONTROLLERS, Place, places
from fleetbed.emulator.limits.gpu import MPS_COMMAND, Driver, Hardware
from fleetbed.emulator.limits.group import PACING
from fleetbed.emulator.limits.owner import PROC
from fleetbed.emulator.limits.rlimit import BACKEND as RLIMIT
from fleetbed.emulator.machine import host
from fleetbed.emulator.machine.calibration import Calibration, Store

SYSTEMD = Path("/run/systemd/system")
_PROBE = LimitPlan("probe", memory_bytes=64 * 2**20, cpu_cores=0.5, gpu=GpuPlan(share=0.5, memory_bytes=2**30))


class Knob(Struct, frozen=True):
    """How far one knob works here. `enable` says what would improve it, mostly a command."""

    knob: str
    status: str
    backend: str
    note: str = ""
    enable: str = ""


class HostReport(Struct, frozen=True):
    knobs: tuple[Knob, ...]
    cpu: str
    cores: int
    memory_bytes: int
    available_bytes: int
    calibration: Calibration | None


def examine(proc: Path = PROC, driver: Driver | None = None, store: Store | None = None) -> HostReport:
    """Try each knob on a temporary control group, which is removed at once."""
    driver = driver or Hardware()
    caps = {cap.knob: cap for cap in _probe(proc, driver)}
    found = places(proc)
    return HostReport(
        knobs=(
            _cpu(caps["cpu"], found),
            _memory(caps["memory"], found),
            _gpu(caps["gpu-compute"]),
            _gpu(caps["gpu-memory"]),
            _link(shutil.which("tc") is not None),
        ),
        cpu=host.cpu_model(),
        cores=host.cores(),
        memory_bytes=host.memory_bytes(),
        available_bytes=host.available_bytes(),
        calibration=(store or Store()).load(),
    )


def _probe(proc: Path, driver: Driver) -> list[Cap]:
    limits = best_limits("doctor", proc, driver)
    try:
        group = limits.create(_PROBE)
        caps = group.caps()
        group.remove()
    finally:
        limits.close()
    return caps


def _cpu(cap: Cap, found: list[Place]) -> Knob:
    enable = enabling_command(found) if cap.backend == PACING else ""
    return Knob("cpu", cap.status, cap.backend, cap.note, enable)


def _memory(cap: Cap, found: list[Place]) -> Knob:
    enable = enabling_command(found) if cap.backend == RLIMIT else ""
    return Knob("memory", cap.status, cap.backend, cap.note, enable)


def _gpu(cap: Cap) -> Knob:
    if cap.status == "modelled":
        enable = "use an NVIDIA card and a CUDA build of torch"
    else:
        enable = "" if "MPS" in cap.backend else MPS_COMMAND
    return Knob(cap.knob, cap.status, cap.backend, cap.note, enable)


def _link(tc: bool) -> Knob:
    note = "transfers take device time according to their bytes"
    return Knob("link", "modelled", "timeline", f"{note}; tc is {'' if tc else 'not '}installed on this host")


def enabling_command(found: list[Place], systemd: Path = SYSTEMD) -> str:
    """Return the command that gives a user a group; limits are nested below the group in which a command starts."""
    trees = [place for place in found if place.controllers & CONTROLLERS]
    if not trees:
        return "in a container: start it with --privileged --cgroupns=private; otherwise mount /sys/fs/cgroup"
    if systemd.exists() and any(place.version == 2 for place in trees):
        user = "" if os.geteuid() == 0 else " --user"
        return f"systemd-run{user} --scope -p Delegate=yes fleetbed ..."
    user = getpass.getuser()
    # v2 enables controllers only for children of a group without processes, which here is only the root
    enable = [f"echo +cpu +memory > {place.mount}/cgroup.subtree_control; " for place in trees if place.version == 2]
    folders = sorted({str((place.own if place.version == 1 else place.mount) / f"of-{user}") for place in trees})
    hand_over = f"for g; do mkdir -p $g && chown -R {user} $g && echo '$$' > $g/cgroup.procs; done"
    return f"sudo sh -c '{''.join(enable)}{hand_over}' sh {' '.join(folders)}"
