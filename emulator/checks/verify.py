"""Stress-tests the limits: compares the requested with the measured value, and checks that the error is tolerable."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from fleetbed.emulator.limits import clean_leftovers
from fleetbed.emulator.machine import host, interpreter
from fleetbed.emulator.machine.calibration import THREAD_VARIABLES, Calibration, host_fingerprint, load_or_measure
from fleetbed.emulator.timeline.pacing import slowdown, smallest_scale
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.folders import cache_folder
from fleetbed.profiles.resolve import available, load_device
from fleetbed.profiles.types import Device

LimitKnob = Literal["rate alone", "rate together", "ceiling", "memory"]
SLOWEST, FASTEST = "raspberry-pi-zero-2w", "intel-n100-mini-pc"
TASK_S = 2.0
SPARE_BYTES = 2**30  # host memory to leave free beyond the largest cap
QUICK_CAP_BYTES = 2**30
RATE_BAR = (-0.02, 0.02)
BARS = {
    "rate alone": RATE_BAR,
    "rate together": RATE_BAR,
    "ceiling": (-1.0, 0.05),  # an upper limit: a busy host may give less
    "memory": (0.0, 0.05),
}


class Subject(Struct, frozen=True):
    """The properties of a device that the stress tests use."""

    name: str
    slowdown: float
    cap_bytes: int


class StressOrder(Struct, frozen=True):
    """The input of the stress tests, which run in a separate process (`stress.py`)."""

    rate: tuple[Subject, ...]
    memory: tuple[Subject, ...]
    time_scale: float
    task_s: float  # device seconds of a task


class Finding(Struct, frozen=True):
    """One measurement. `asked` and `got` are in the knob's unit: device seconds of a task, cores, bytes."""

    knob: LimitKnob
    device: str
    asked: float
    got: float
    backend: str
    load: float = 0.0  # cores that were paced at the same time, with this one
    other_cores: float = 0.0  # cores that other processes used meanwhile


class Proof(Struct, frozen=True):
    """One trial. `error` is (got - asked) / asked, and must be from `low` to `high`."""

    knob: str
    device: str
    asked: float
    got: float
    error: float
    unit: str
    low: float
    high: float
    ok: bool
    backend: str
    load: float = 0.0
    other_cores: float = 0.0


class LimitsReport(Struct, frozen=True):
    ok: bool
    proofs: tuple[Proof, ...]
    skipped: tuple[str, ...]  # sentences
    worst_interference: float  # the largest fall of a rate because of other paced clients
    other_cores: float  # the most cores that other processes used during a rate trial
    calibration: str
    time_scale: float

    @property
    def host_was_idle(self) -> bool:
        return self.other_cores <= host.MOST_OTHER_CORES


def shipped_cpu_devices() -> dict[str, Device]:
    """Return the shipped devices that train on their CPU, from the slowest board to the fastest."""
    devices = {name: load_device(name) for name in available("device")}
    low, high = devices[SLOWEST].rate_gflops, devices[FASTEST].rate_gflops
    chosen = {n: d for n, d in devices.items() if d.trains_on == "cpu" and low <= d.rate_gflops <= high}
    return dict(sorted(chosen.items(), key=lambda item: item[1].rate_gflops))


def verify_limits(
    devices: Mapping[str, Device], *, quick: bool = False, on_result: Callable[[Proof], None] = lambda _: None
) -> LimitsReport:
    """Run the stress tests on this host, about ten seconds per device; call `on_result` with each result."""
    clean_leftovers()
    calibration = load_or_measure()
    names = list(devices)
    rated = [names[0], names[len(names) // 2], names[-1]] if quick and len(names) > 3 else names
    capped, skipped = _memory_trials(devices, quick)
    slowdowns = {name: slowdown(calibration.rate.alone_gflops, devices[name]) for name in names}
    time_scale = smallest_scale((slowdowns[name] for name in rated), calibration.rate.busy_to_alone)
    subjects = {name: Subject(name, slowdowns[name], _cap_bytes(devices[name])) for name in names}
    order = StressOrder(
        rate=tuple(subjects[name] for name in rated),
        memory=tuple(subjects[name] for name in capped),
        time_scale=time_scale,
        task_s=TASK_S,
    )
    proofs = []
    for finding in _findings(order):
        proofs.append(judge(finding, devices[finding.device]))
        on_result(proofs[-1])
    return summarise_proofs(proofs, skipped, calibration, time_scale)


def save_report(report: LimitsReport) -> None:
    """Save the report in the user's cache, so that runs on this host can record it."""
    path = _report_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(report))


def load_report() -> LimitsReport | None:
    """Load the last report of this host; None if there is none that this version can read."""
    try:
        return msgspec.json.decode(_report_path().read_bytes(), type=LimitsReport)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _report_path() -> Path:
    host_hash = hashlib.blake2b(host_fingerprint().encode(), digest_size=6).hexdigest()
    return cache_folder() / f"verify-{host_hash}-{os.getuid()}.json"


def worst(report: LimitsReport) -> list[Proof]:
    """Return the trial with the largest error of each limit: the rate (alone and together), and memory."""
    caps = {"cpu": ("rate alone", "rate together"), "memory": ("memory",)}
    found = []
    for cap, knobs in caps.items():
        proofs = [proof for proof in report.proofs if proof.knob in knobs]
        if proofs:
            found.append(msgspec.structs.replace(max(proofs, key=lambda p: abs(p.error)), knob=cap))
    return found


def _memory_trials(devices: Mapping[str, Device], quick: bool) -> tuple[list[str], list[str]]:
    """Return the devices whose memory caps can be tried here, and a sentence for each that cannot.

    Equal caps are tried once.
    """
    largest = host.available_bytes() - SPARE_BYTES
    chosen: dict[int, str] = {}
    skipped = []
    for name, device in sorted(devices.items(), key=lambda item: item[1].cap_mib):
        cap = _cap_bytes(device)
        if cap > largest:
            skipped.append(
                f"memory of {name}: its limit of {device.cap_mib:g} MiB does not fit into this host's free memory"
            )
        elif not quick or cap <= QUICK_CAP_BYTES:
            chosen.setdefault(cap, name)
    return list(chosen.values()), skipped


def _cap_bytes(device: Device) -> int:
    return int(device.cap_mib * 2**20)


def _findings(order: StressOrder) -> Iterator[Finding]:
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    command = interpreter.module_command("fleetbed.emulator.checks.stress")
    pipe = subprocess.PIPE
    # in a separate session, so that Ctrl-C reaches only this process, which then stops the other cleanly
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin is not None  # asked for in Popen
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.close()
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=Finding)
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise FleetbedError("the process that runs the stress tests ended early; see its output above")


def judge(finding: Finding, device: Device) -> Proof:
    asked, got, unit = finding.asked, finding.got, {"ceiling": "cores", "memory": "MiB"}.get(finding.knob, "GFLOPS")
    if unit == "GFLOPS":  # a task that took longer was done at a lower rate
        asked, got = device.rate_gflops, device.rate_gflops * finding.asked / finding.got
    elif unit == "MiB":
        asked, got = asked / 2**20, got / 2**20
    error = got / asked - 1
    low, high = BARS[finding.knob]
    return Proof(
        knob=finding.knob,
        device=finding.device,
        asked=asked,
        got=got,
        error=error,
        unit=unit,
        low=low,
        high=high,
        ok=low <= error <= high,
        backend=finding.backend,
        load=finding.load,
        other_cores=finding.other_cores,
    )


def summarise_proofs(
    proofs: Sequence[Proof], skipped: Sequence[str], calibration: Calibration, time_scale: float
) -> LimitsReport:
    alone = {p.device: p.got for p in proofs if p.knob == "rate alone"}
    interference = [1 - p.got / alone[p.device] for p in proofs if p.knob == "rate together"]
    rates = [p for p in proofs if p.knob in ("rate alone", "rate together")]
    return LimitsReport(
        ok=all(p.ok for p in proofs),
        proofs=tuple(proofs),
        skipped=tuple(skipped),
        worst_interference=max(interference, default=0.0),
        other_cores=max((p.other_cores for p in rates), default=0.0),
        calibration=calibration.id,
        time_scale=time_scale,
    )
