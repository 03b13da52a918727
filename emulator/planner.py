"""How long a task takes on its device: the plan, from one of the sources of durations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from fleetbed.emulator import pacing
from fleetbed.models.base import Family, InputSpec
from fleetbed.models.cost import cost
from fleetbed.models.work import Pass, Work
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import Optimizer, Timing
from fleetbed.profiles.types import Device


class Reference(Struct, frozen=True):
    """A pass through a variant whose time, hot and alone on the host, is the unit of calibrated plans."""

    variant: str
    kind: str  # train, forward, parameters
    part: str
    samples: int
    optimise: bool = False


class Plan(Struct, frozen=True, kw_only=True):
    """Device seconds of a task: `step_s` for each optimiser step, `total_s` in all. A plan is a floor."""

    step_s: float
    total_s: float
    flops: float


def references(variant: str, work: Work) -> Iterator[tuple[Reference, int]]:
    """The passes that a task is made of, each with how often it occurs; those of a step come first."""
    if work.steps:
        yield Reference(variant, "train", "all", work.batch, optimise=True), work.steps
        for extra in work.each_step:
            yield _reference(variant, extra), work.steps
        if work.parameter_passes:
            yield Reference(variant, "parameters", "all", 1), work.steps * work.parameter_passes
    for extra in work.once:
        yield _reference(variant, extra), 1


def _reference(variant: str, extra: Pass) -> Reference:
    return Reference(variant, extra.kind, extra.part, extra.samples)


class Planner:
    """Plans for one run. `seconds` gives the reference time of a pass; it is not asked under `modelled`."""

    def __init__(
        self,
        *,
        source: Timing,
        family: Family,
        spec: InputSpec,
        optimizer: Optimizer,
        host_gflops: float | None,
        seconds: Callable[[Reference], float],
        recorded_s: dict[int, float] | None = None,
    ) -> None:
        self._source = source
        self._family = family
        self._spec = spec
        self._optimizer = optimizer
        self._host_gflops = host_gflops
        self._seconds = seconds
        self._recorded_s = recorded_s or {}

    def slowdown(self, device: Device) -> float | None:
        """Host core rate over device rate, of the same kernel; None where the host's rate plays no part."""
        if self._host_gflops is None:
            return None
        return pacing.slowdown(self._host_gflops, device)

    def plan(self, device: Device, variant: str, work: Work, task: int) -> Plan:
        flops = cost(self._family, variant, self._spec, work, self._optimizer).flops
        if self._source == "replay":
            if task not in self._recorded_s:
                raise FleetbedError(f"the run that is replayed has no duration of task {task}: it ended before it")
            total_s = self._recorded_s[task]
            return Plan(step_s=total_s / max(1, work.steps), total_s=total_s, flops=flops)
        slowdown = self.slowdown(device)
        if self._source == "modelled" or slowdown is None:
            total_s = _modelled_s(device, flops)
            return _throttled(Plan(step_s=total_s / max(1, work.steps), total_s=total_s, flops=flops), device)
        times = [(self._seconds(reference) * slowdown, count) for reference, count in references(variant, work)]
        step_s = sum(s * count for s, count in times if count >= work.steps) / work.steps if work.steps else 0.0
        return _throttled(Plan(step_s=step_s, total_s=sum(s * count for s, count in times), flops=flops), device)

    def modelled_s(self, device: Device, variant: str, work: Work) -> float:
        """What the FLOPs alone say, the same under every source of durations."""
        return _modelled_s(device, cost(self._family, variant, self._spec, work, self._optimizer).flops)


def server_seconds(device: Device, work: Work) -> float:
    """The server's own work on its own device, by its FLOPs."""
    return _modelled_s(device, work.server_flops)


def _modelled_s(device: Device, flops: float) -> float:
    return flops / (device.rate_gflops * 1e9) * device.train_scale


def _throttled(plan: Plan, device: Device) -> Plan:
    """A device that gets hot goes on at a lower rate. It is cool again when its next task begins."""
    throttle = device.throttle
    if throttle is None or plan.total_s <= throttle.after_s:
        return plan
    total_s = throttle.after_s + (plan.total_s - throttle.after_s) / throttle.rate
    # the steps are paced evenly; only their sum is the plan's
    return Plan(step_s=plan.step_s * total_s / plan.total_s, total_s=total_s, flops=plan.flops)
