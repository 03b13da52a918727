"""GPU compute and memory: CUDA MPS for the share of multiprocessors, MPS and torch for memory, NVML as meter.

Written and tested against a stand-in for the driver; not yet verified on hardware, and labelled so. On a host
without a usable card a GPU device is emulated on the CPU: its rate by pacing, its memory by the client's cap.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from typing import Any, Protocol

from msgspec import Struct

from fleetbed.emulator.limits.plan import Cap, GpuPlan
from fleetbed.emulator.machine import interpreter

UNVERIFIED = "not verified on hardware"
EMULATED = "gpu emulated on cpu"
MPS_COMMAND = "nvidia-cuda-mps-control -d"
_PROBE = """import json, torch
p = torch.cuda.get_device_properties({index}) if torch.cuda.is_available() else None
print(json.dumps(p and [p.multi_processor_count, p.total_memory]))
"""


class Card(Struct, frozen=True):
    """A card as a process sees it; under MPS a client sees only its own part of the multiprocessors."""

    multiprocessors: int
    memory_bytes: int


class Driver(Protocol):
    """The calls to CUDA, MPS and NVML, which tests replace."""

    def card(self, index: int) -> Card | None:
        """The whole card; None if torch cannot use it. CUDA is not touched in this process."""
        ...

    def mps_running(self) -> bool: ...

    def limit_memory(self, index: int, fraction: float) -> Card:
        """Set torch's own limit, in the client; returns the part of the card that it sees."""
        ...

    def memory_bytes(self, index: int, pid: int) -> int | None: ...

    def power_w(self, index: int) -> float | None: ...


class Hardware:
    """The driver of this host."""

    def card(self, index: int) -> Card | None:
        return _probe(index) if _nvml() is not None else None

    def mps_running(self) -> bool:
        try:
            asked = subprocess.run(
                ["nvidia-cuda-mps-control"],
                input="get_server_list\n",
                capture_output=True,
                text=True,
                timeout=10,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return False
        return asked.returncode == 0 and "Cannot find" not in asked.stdout + asked.stderr

    def limit_memory(self, index: int, fraction: float) -> Card:
        import torch

        torch.cuda.set_per_process_memory_fraction(fraction, index)
        seen = torch.cuda.get_device_properties(index)
        return Card(seen.multi_processor_count, round(fraction * seen.total_memory))

    def memory_bytes(self, index: int, pid: int) -> int | None:
        nvml = _nvml()
        if nvml is None:
            return None
        running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index))
        return next((process.usedGpuMemory for process in running if process.pid == pid), None)

    def power_w(self, index: int) -> float | None:
        nvml = _nvml()
        if nvml is None:
            return None
        try:
            return float(nvml.nvmlDeviceGetPowerUsage(nvml.nvmlDeviceGetHandleByIndex(index))) / 1000
        except nvml.NVMLError_NotSupported:
            return None


@cache
def _nvml() -> Any | None:
    """The NVML bindings, initialised; None where the host has no driver or no card."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml if pynvml.nvmlDeviceGetCount() else None


def card_names() -> str | None:
    """The cards of this host as NVML names them; None where there is none that it can see."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return ", ".join(nvml.nvmlDeviceGetName(handle) for handle in handles)
    except nvml.NVMLError as error:  # a broken card must not end a run that may not even use it
        return f"unknown: {error}"


@cache
def _probe(index: int) -> Card | None:
    """Ask in a separate process, because one that has touched CUDA cannot fork clients that use it."""
    command = interpreter.command(_PROBE.format(index=index))
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    return None if seen is None else Card(*seen)


class GpuKnob:
    """A client's part of a card. The caps are complete once the client has entered."""

    def __init__(self, plan: GpuPlan | None, driver: Driver) -> None:
        self._plan, self._driver = plan, driver
        self._card = None if plan is None else driver.card(plan.index)
        self._mps = self._card is not None and driver.mps_running()
        self._seen: Card | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that MPS reads when the client first touches CUDA."""
        if self._plan is None or not self._mps:
            return {}
        limit_mib = self._plan.memory_bytes // 2**20
        return {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * self._plan.share:.4g}",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{self._plan.index}={limit_mib}M",
        }

    def enter(self) -> None:
        """Apply the limits; called in the client before it touches CUDA."""
        if self._plan is None or self._card is None:
            return
        os.environ.update(self.environment)
        fraction = min(1.0, self._plan.memory_bytes / self._card.memory_bytes)
        self._seen = self._driver.limit_memory(self._plan.index, fraction)

    @property
    def device(self) -> str:
        """The name of the torch device that the client trains on."""
        return "cpu" if self._plan is None or self._card is None else f"cuda:{self._plan.index}"

    def memory_bytes(self) -> int | None:
        """The bytes that the client holds on the card, by NVML."""
        if self._plan is None or self._card is None:
            return None
        return self._driver.memory_bytes(self._plan.index, os.getpid())

    def power_w(self) -> float | None:
        """The watts that the whole card draws, by NVML."""
        return None if self._plan is None or self._card is None else self._driver.power_w(self._plan.index)

    @property
    def caps(self) -> list[Cap]:
        plan, card, seen = self._plan, self._card, self._seen
        if plan is None:
            return []
        if card is None:
            note = f"{EMULATED}: no card that torch can use on this host"
            return [
                Cap("gpu-compute", "modelled", "cpu", plan.share, None, "share", note),
                Cap("gpu-memory", "modelled", "cpu", plan.memory_bytes, None, "bytes", note),
            ]
        memory_by = "MPS, torch fraction" if self._mps else "torch fraction"
        got_bytes = None if seen is None else seen.memory_bytes
        memory = Cap("gpu-memory", "enforced", memory_by, plan.memory_bytes, got_bytes, "bytes", UNVERIFIED)
        return [self._compute_cap(plan, card, seen), memory]

    def _compute_cap(self, plan: GpuPlan, card: Card, seen: Card | None) -> Cap:
        got = None if seen is None else seen.multiprocessors / card.multiprocessors
        if not self._mps:
            note = f"no MPS daemon, so a client has the whole card; start one with: {MPS_COMMAND}"
            return Cap("gpu-compute", "unavailable", "none", plan.share, got, "share", note)
        # MPS rounds to whole multiprocessors; a larger difference means that it ignored the percentage
        if got is not None and abs(got - plan.share) > 1.5 / card.multiprocessors:
            note = "the client sees another share of the multiprocessors than was asked for"
            return Cap("gpu-compute", "unavailable", "MPS", plan.share, got, "share", note)
        return Cap("gpu-compute", "enforced", "MPS", plan.share, got, "share", UNVERIFIED)
