"""The choice of trials, their evaluation, and the hogs themselves under small limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fleetbed.emulator.checks import verify
from fleetbed.emulator.checks.stress import fill
from fleetbed.emulator.checks.verify import Finding, Proof, StressOrder, Subject, judge, summarise_proofs
from fleetbed.emulator.machine.calibration import Calibration, HostRate
from fleetbed.profiles.types import Cpu, Device, Memory

MIB = 2**20


def device(rate: float, cap_mib: float = 100) -> Device:
    return Device(
        title="t",
        trains_on="cpu",
        cpu=Cpu(description="t", cores=4, fp32_gflops=rate),
        memory=Memory(installed_mib=16384, visible_mib=16384, available_mib=cap_mib + 50, runtime_mib=50),
        link="wifi4",
    )


@pytest.mark.parametrize(
    ("got_s", "rate", "ok"), [(2.0, 50.0, True), (2.03, 49.261, True), (2.05, 48.780, False), (1.9, 52.632, False)]
)
def test_a_task_that_takes_longer_was_done_at_a_lower_rate(got_s: float, rate: float, ok: bool) -> None:
    proof = judge(Finding("rate alone", "a", 2.0, got_s, "pacing"), device(50.0))
    assert (proof.asked, proof.unit) == (50.0, "GFLOPS")
    assert proof.got == pytest.approx(rate, abs=1e-3)
    assert proof.error == pytest.approx(rate / 50 - 1, abs=1e-4)
    assert proof.ok is ok


@pytest.mark.parametrize(("got", "ok"), [(99.9, False), (100.0, True), (104.9, True), (105.1, False)])
def test_memory_must_not_kill_below_its_cap(got: float, ok: bool) -> None:
    proof = judge(Finding("memory", "a", 100 * MIB, got * MIB, "cgroup v1"), device(50.0))
    assert (proof.asked, proof.unit, proof.ok) == (100.0, "MiB", ok)


@pytest.mark.parametrize(("got", "ok"), [(0.1, True), (0.52, True), (0.53, False)])
def test_a_ceiling_holds_from_above_only(got: float, ok: bool) -> None:
    assert judge(Finding("ceiling", "a", 0.5, got, "pacing"), device(50.0)).ok is ok


def test_every_device_is_tried_and_every_batch_is_full() -> None:
    subjects = tuple(Subject(name, slowdown, 0) for name, slowdown in (("a", 2.0), ("b", 2.5), ("c", 5.0), ("d", 20.0)))
    batches = fill(subjects, 1.0, 1.0)  # shares 0.5, 0.4, 0.2, 0.05
    assert [[subject.name for subject in batch] for batch in batches] == [
        ["a", "b", "d", "d"],  # 0.5 + 0.4 + 0.05, and filled up by 0.05
        ["c", "a", "c", "d", "d"],  # 0.2 was left; 0.5, 0.2 and twice 0.05 fill up
    ]


def test_interference_is_the_loss_caused_by_other_clients() -> None:
    def proof(knob: str, got: float, ok: bool = True) -> Proof:
        return Proof(knob, "a", 50.0, got, got / 50 - 1, "GFLOPS", -0.02, 0.02, ok, "pacing", other_cores=got / 100)

    calibration = Calibration("h", "now", HostRate(180.0, 120.0, 2, 0.0, 0.0, 0.0))
    report = summarise_proofs(
        [proof("rate alone", 50.0), proof("rate together", 49.0), proof("memory", 90.0)], [], calibration, 1.5
    )
    assert report.ok
    assert report.worst_interference == pytest.approx(0.02)
    assert report.other_cores == 0.5  # of the rate trials: memory does not mind
    assert not report.host_was_idle
    assert not summarise_proofs([proof("rate alone", 40.0, ok=False)], [], calibration, 1.5).ok


def test_caps_that_do_not_fit_are_skipped_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify.host, "available_bytes", lambda: 5 * 2**30)
    devices = {"big": device(1, 6000), "small": device(1, 500), "twin": device(1, 500), "middle": device(1, 2000)}
    assert verify._memory_trials(devices, quick=False) == (
        ["small", "middle"],
        ["memory of big: its limit of 6000 MiB does not fit into this host's free memory"],
    )
    assert verify._memory_trials(devices, quick=True)[0] == ["small"]


def test_the_shipped_boards_from_the_slowest_to_the_fastest() -> None:
    devices = verify.shipped_cpu_devices()
    assert next(iter(devices)) == "raspberry-pi-zero-2w"
    assert next(reversed(devices)) == "intel-n100-mini-pc"
    assert {"raspberry-pi-4b-4gb", "raspberry-pi-5-8gb", "phone-mid"} <= set(devices)
    assert all(device.trains_on == "cpu" for device in devices.values())


@pytest.mark.slow
def test_the_hogs_reach_their_limits(tmp_path: Path) -> None:
    subject = Subject("small", 10.0, 128 * MIB)
    order = StressOrder(rate=(subject,), memory=(subject,), time_scale=0.5, task_s=0.2)
    command = [sys.executable, "-m", "fleetbed.emulator.checks.stress"]
    done = subprocess.run(command, input=msgspec.json.encode(order), stdout=subprocess.PIPE, check=True)
    findings = [msgspec.json.decode(line, type=Finding) for line in done.stdout.splitlines()]
    knobs = [finding.knob for finding in findings]
    assert knobs[0] == "rate alone"
    assert knobs[-1] == "memory"
    assert "rate together" in knobs
    assert all(finding.got >= finding.asked for finding in findings if finding.knob.startswith("rate"))
    assert judge(findings[-1], device(50.0)).ok, findings[-1]
