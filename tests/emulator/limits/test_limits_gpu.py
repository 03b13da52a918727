"""GPU caps against a stand-in for CUDA, MPS and NVML; nothing here was seen on a real card."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetbed.emulator.limits import GpuPlan, LimitPlan, best_limits
from fleetbed.emulator.limits.gpu import Card, GpuKnob, Hardware, card_names

PLAN = GpuPlan(share=0.25, memory_bytes=2 * 2**30)
WHOLE = Card(multiprocessors=80, memory_bytes=16 * 2**30)


class FakeDriver:
    def __init__(self, card: Card | None = WHOLE, mps: bool = True, seen: int = 20) -> None:
        self._card, self._mps, self._seen = card, mps, seen
        self.fraction: float | None = None

    def card(self, index: int) -> Card | None:
        return self._card

    def mps_running(self) -> bool:
        return self._mps

    def limit_memory(self, index: int, fraction: float) -> Card:
        self.fraction = fraction
        return Card(self._seen, round(fraction * WHOLE.memory_bytes))

    def memory_bytes(self, index: int, pid: int) -> int | None:
        return 7

    def power_w(self, index: int) -> float | None:
        return 42.5


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"):
        monkeypatch.setenv(name, "before")


def test_a_client_gets_its_share_and_reads_it_back() -> None:
    driver = FakeDriver()
    knob = GpuKnob(PLAN, driver)
    assert [cap.got for cap in knob.caps] == [None, None]
    knob.enter()
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert os.environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert driver.fraction == 0.125
    compute, memory = knob.caps
    assert (compute.status, compute.got) == ("enforced", 0.25)
    assert (memory.status, memory.got) == ("enforced", 2 * 2**30)
    assert compute.note == memory.note == "not verified on hardware"


def test_without_a_daemon_compute_is_not_capped_and_it_says_so() -> None:
    knob = GpuKnob(PLAN, FakeDriver(mps=False, seen=80))
    knob.enter()
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "before"
    compute, memory = knob.caps
    assert (compute.status, compute.got) == ("unavailable", 1.0)
    assert "nvidia-cuda-mps-control -d" in compute.note
    assert (memory.status, memory.backend) == ("enforced", "torch fraction")


@pytest.mark.parametrize(("seen", "status"), [(19, "enforced"), (21, "enforced"), (80, "unavailable")])
def test_a_share_that_the_client_does_not_see_is_no_cap(seen: int, status: str) -> None:
    knob = GpuKnob(PLAN, FakeDriver(seen=seen))
    knob.enter()
    assert knob.caps[0].status == status


def test_without_a_card_the_device_is_emulated_on_the_cpu(bare_proc: Path) -> None:
    plan = LimitPlan("client-001", gpu=PLAN)
    caps = best_limits("t", bare_proc, FakeDriver(card=None)).create(plan).caps()
    assert [(cap.knob, cap.status) for cap in caps] == [("gpu-compute", "modelled"), ("gpu-memory", "modelled")]
    assert all(cap.note.startswith("gpu emulated on cpu") for cap in caps)


def test_memory_beyond_the_card_is_all_of_it() -> None:
    driver = FakeDriver()
    GpuKnob(GpuPlan(share=1.0, memory_bytes=2**40), driver).enter()
    assert driver.fraction == 1.0


class FakeNvml:
    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class Process:
        pid, usedGpuMemory = 123, 456

    lost = False

    def __init__(self, power: int | None) -> None:
        self._power = power

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetName(self, handle: int) -> str:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return f"card {handle}"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Process]:
        return [self.Process()]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if self._power is None:
            raise self.NVMLError_NotSupported
        return self._power


@pytest.mark.parametrize(("milliwatts", "watts"), [(61_500, 61.5), (None, None)])
def test_meters(monkeypatch: pytest.MonkeyPatch, milliwatts: int | None, watts: float | None) -> None:
    monkeypatch.setattr("fleetbed.emulator.limits.gpu._nvml", lambda: FakeNvml(milliwatts))
    assert Hardware().power_w(0) == watts
    assert Hardware().memory_bytes(0, 123) == 456
    assert Hardware().memory_bytes(0, 999) is None


def test_cards_are_recorded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(None)
    monkeypatch.setattr("fleetbed.emulator.limits.gpu._nvml", lambda: fake)
    assert card_names() == "card 0, card 1"
    fake.lost = True
    assert card_names() == "unknown: GPU is lost"


def test_no_driver_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbed.emulator.limits.gpu._nvml", lambda: None)
    assert card_names() is None
    assert Hardware().card(0) is None
    assert Hardware().power_w(0) is None


@pytest.mark.parametrize(
    ("script", "running"),
    [("cat > /dev/null; echo 4711", True), ("echo 'Cannot find MPS control daemon process'; exit 1", False)],
)
def test_the_daemon_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, running: bool) -> None:
    command = tmp_path / "nvidia-cuda-mps-control"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Hardware().mps_running() is running


def test_no_command_is_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not Hardware().mps_running()


def test_a_client_with_a_card_trains_on_it_and_is_metered() -> None:
    knob = GpuKnob(PLAN, FakeDriver())
    assert (knob.device, knob.memory_bytes(), knob.power_w()) == ("cuda:0", 7, 42.5)


@pytest.mark.parametrize(("plan", "card"), [(None, WHOLE), (PLAN, None)])
def test_without_a_plan_or_a_card_it_trains_on_the_cpu(plan: GpuPlan | None, card: Card | None) -> None:
    knob = GpuKnob(plan, FakeDriver(card=card))
    assert (knob.device, knob.memory_bytes(), knob.power_w()) == ("cpu", None, None)
