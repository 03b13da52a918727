"""The source of time for code that declares no work: its torch operators are counted, and its CPU seconds measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.engine.timing import OnHost, Timing
from fleetbed.emulator.machine.calibration import HostRate
from fleetbed.emulator.timeline.plan import Plan, throttled_s
from fleetbed.emulator.wire.messages import Trained
from fleetbed.models.cost.operations import compute_seconds
from fleetbed.models.work import Work
from fleetbed.profiles.types import Device


class Metered(Timing):
    """For code that declares no work: its torch operators by class, and the rest by CPU seconds.

    The rest is what it computed outside of operators that were counted, multiplied by how much slower the device's CPU
    is. The host's rate is that of a core while all are busy, as they are in a round.
    """

    source = "metered"
    on_oom = "go-on"

    def __init__(self, rate: HostRate, devices: Mapping[int, Device], hang_s: float) -> None:
        self._rate = rate
        self._devices = devices  # by client
        self._hang_s = hang_s
        self._calls = self._calls_with_torch = 0
        self._seconds = self._operator_s = 0.0  # device seconds of all calls; those of their operators

    def modelled(self, device: Device, variant: str, work: Work) -> Plan:
        return Plan(paces=(), total_s=0.0, flops=0.0)  # it is not known before the task has run

    def plan(self, device: Device, variant: str, work: Work, task: int) -> Plan:
        return self.modelled(device, variant, work)

    def on_host(self, plan: Plan, variant: str, work: Work) -> OnHost:
        return OnHost(load=1.0, expected_s=0.0, hang_s=self._hang_s)

    def slowdown(self, device: Device, variant: str, work: Work) -> float:
        return self._rate.busy_gflops / device.cpu.fp32_gflops * device.train_scale

    def measured_s(self, task: Task, answer: Trained) -> float:
        device = self._devices[task.client]
        return throttled_s(device, sum(self._parts(task, answer)))

    def _parts(self, task: Task, answer: Trained) -> tuple[float, float]:
        """Device seconds of the operators that were counted, and of all else."""
        device, counted = self._devices[task.client], answer.counted
        slowdown = self.slowdown(device, task.variant, Work())
        if counted is None:
            return 0.0, answer.cpu_s * slowdown
        return compute_seconds(device, counted.operations), max(0.0, answer.cpu_s - counted.cpu_s) * slowdown

    def learn(self, task: Task, answer: Trained) -> None:
        operator_s, other_s = self._parts(task, answer)
        self._calls += 1
        self._calls_with_torch += answer.counted is not None
        self._operator_s += operator_s
        self._seconds += operator_s + other_s

    def summary(self) -> str:
        """A sentence about how the durations were found."""
        if not self._operator_s:
            return f"none of {self._calls} calls used torch: their time is by CPU seconds"
        part = self._operator_s / self._seconds
        return (
            f"{self._calls_with_torch} of {self._calls} calls used torch: {part:.0%} of the compute time of all is by "
            "its operators, the rest by CPU seconds"
        )

    def meta(self) -> dict[str, Any]:
        return {**super().meta(), "host_busy_gflops": self._rate.busy_gflops}
