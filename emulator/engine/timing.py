"""How long tasks take in device time, and how the host carries them out: one form for each `timing.source`.

The plan of a task is a property of the device and the work, never of the host. `modelled` takes the plan for granted
and works at full speed. `enforced` holds each task to the pace of its plan, and takes what was measured where that was
longer. `replay` takes durations and failures from another run, at full speed. `metered` is in `flower/metered.py`, for
code that declares no work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from msgspec import Struct

from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.machine.calibration import HostRate
from fleetbed.emulator.timeline import pacing
from fleetbed.emulator.timeline.plan import Pace, Plan, plan_of
from fleetbed.emulator.timeline.time_scale import TimeScale
from fleetbed.emulator.wire.messages import Trained
from fleetbed.models.base import Family, InputSpec
from fleetbed.models.cost.predict import Cost, cost
from fleetbed.models.work import Work
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import Optimizer, TimingSource
from fleetbed.profiles.types import Device

FailureKind = Literal["oom", "crash", "hang", "refused"]
HeaviestTask = tuple[str, Device, str, Work]  # of a client: its kind and device, its variant, the work


@dataclass(frozen=True)
class TrainingCosts:
    """Everything that decides the cost of work, apart from the work itself."""

    family: Family
    spec: InputSpec
    optimizer: Optimizer

    def of(self, variant: str, work: Work) -> Cost:
        return cost(self.family, variant, self.spec, work, self.optimizer)


class Recording(Struct, frozen=True):
    """The recording of another run, for its replay."""

    variants: dict[int, str | None]
    compute_s: dict[int, float]  # device seconds of the compute phase by task
    flops: dict[int, float]  # of the declared work: shows how many steps a task was cut to
    failed: dict[int, tuple[FailureKind, str]]  # tasks whose process failed: the outcome and its detail


class OnHost(Struct, frozen=True):
    """How the host carries out a task."""

    load: float  # the part of a core that it needs
    expected_s: float  # host seconds, or a figure proportional to them
    time_scale: float | None = None  # host seconds per device second; None: full speed
    hang_s: float | None = None  # host seconds after which the client counts as hung; None: it follows from expected_s


class Timing(ABC):
    source: ClassVar[TimingSource]
    #: what follows when a client runs out of memory: a smaller variant, the end of the run, or nothing
    on_oom: ClassVar[Literal["step-down", "end", "go-on"]] = "step-down"
    #: whether the chosen variants are tried out under their memory caps before the run
    tries_out: ClassVar[bool] = False

    def __init__(self, training: TrainingCosts) -> None:
        self._training = training

    def modelled(self, device: Device, variant: str, work: Work) -> Plan:
        """The plan by device and work alone, the same under every source."""
        return plan_of(device, self.cost_of(variant, work), work)

    def cost_of(self, variant: str, work: Work) -> Cost:
        return self._training.of(variant, work)

    @abstractmethod
    def plan(self, device: Device, variant: str, work: Work, task: int) -> Plan:
        """The planned duration of this task; it is never shorter."""

    def budget_s(self, device: Device, variant: str, work: Work) -> float:
        """The duration by which a variant is chosen."""
        return self.modelled(device, variant, work).total_s

    def variants(self, chosen: Mapping[int, str | None]) -> dict[int, str | None]:
        """The variants of all clients, given those that were chosen for them."""
        return dict(chosen)

    def steps(self, device: Device, variant: str, work: Work, task: int, fitting: Callable[[], int]) -> int:
        """The steps that a task is cut to under a policy that accepts partial work; `fitting()` are in time by plan."""
        return fitting()

    def failure(self, task: int) -> tuple[FailureKind, str] | None:
        """The failure that this task is known to have, whatever happens on the host."""
        return None

    # on the host

    def fit_scale(self, tasks: Iterable[HeaviestTask], before: float | None) -> str | None:  # noqa: B027
        """Decide how fast device time passes for these clients, or keep the scale of `before`.

        Returns a sentence if a person should know something about it.
        """

    def on_host(self, plan: Plan, variant: str, work: Work) -> OnHost:
        return OnHost(load=1.0, expected_s=plan.flops / 1e9)

    def on_host_s(self, plan_s: float, full_speed_s: float) -> float:
        """Host seconds of a task with this plan that takes `full_speed_s` on this host at full speed."""
        return full_speed_s

    def frozen(self) -> Timing:
        """A copy that learns nothing, for a forecast."""
        return self

    def share(self, device: Device, variant: str, work: Work) -> float:
        """The part of a core, hot and alone, that a client fills while it trains."""
        return 1.0

    def slowdown(self, device: Device, variant: str, work: Work) -> float | None:
        """How many times longer the work takes on the device than on this host; None where that was not measured."""
        return None

    def ceiling_cores(self, share: float) -> float | None:
        """The kernel's ceiling for a client of this share; None: there is no ceiling."""
        return None

    def capacity(self, cores: int) -> float:
        """The load that may be under way at once."""
        return float(cores)

    def measured_s(self, task: Task, answer: Trained) -> float | None:
        """Device seconds that a task really took; None if its plan is its duration."""
        return None

    def learn(self, task: Task, answer: Trained) -> None:  # noqa: B027 - most forms have nothing to learn
        """Take into account how a task went."""

    def meta(self) -> dict[str, Any]:
        return {"source": self.source}


class Modelled(Timing):
    source = "modelled"
    on_oom = "end"  # a step down would make the timeline depend on this host's memory

    def plan(self, device: Device, variant: str, work: Work, task: int) -> Plan:
        return self.modelled(device, variant, work)


class Enforced(Timing):
    """`host_s` returns the seconds that work takes on a core of this host that is hot and alone."""

    source = "enforced"
    tries_out = True

    def __init__(
        self, training: TrainingCosts, rate: HostRate, host_s: Callable[[str, Work], float], scale: TimeScale
    ) -> None:
        super().__init__(training)
        self._rate = rate
        self._host_s = host_s
        self.scale = scale
        self._smallest_slowdown = 1.0

    def plan(self, device: Device, variant: str, work: Work, task: int) -> Plan:
        return self.modelled(device, variant, work)

    def slowdown(self, device: Device, variant: str, work: Work) -> float:
        return self.modelled(device, variant, work).total_s / self._host_s(variant, work)

    def fit_scale(self, tasks: Iterable[HeaviestTask], before: float | None) -> str | None:
        slowdowns: dict[str, float] = {}
        for kind, device, variant, work in tasks:
            slowdown = self.slowdown(device, variant, work)
            slowdowns[kind] = min(slowdown, slowdowns.get(kind, slowdown))
        self._smallest_slowdown = min(slowdowns.values())
        if before is not None:
            self.scale.resume(before)
            return None
        self.scale.fit(slowdowns, self._rate.busy_to_alone)
        if self.scale.now <= 1:
            return None
        return f"the fleet is faster than this host: a device second takes {self.scale.now:.2f} host seconds"

    def share(self, device: Device, variant: str, work: Work) -> float:
        return pacing.share(self.slowdown(device, variant, work), self.scale.now)

    def on_host(self, plan: Plan, variant: str, work: Work) -> OnHost:
        scale = self.scale.now
        planned_s = plan.total_s * scale
        alone = self._host_s(variant, work) / planned_s if planned_s else 1.0
        # admission counts cores that are all busy, which may be slower than one alone
        return OnHost(load=alone / self._rate.busy_to_alone, expected_s=planned_s, time_scale=scale)

    def on_host_s(self, plan_s: float, full_speed_s: float) -> float:
        return plan_s * self.scale.now

    def frozen(self) -> Enforced:
        scale = TimeScale(self.scale.now)
        scale.resume(self.scale.now)
        return Enforced(self._training, self._rate, self._host_s, scale)

    def ceiling_cores(self, share: float) -> float:
        return pacing.ceiling_cores(self.scale.largest(share))

    def capacity(self, cores: int) -> float:
        return pacing.capacity(cores)

    def measured_s(self, task: Task, answer: Trained) -> float | None:
        return None if task.time_scale is None else answer.seconds / task.time_scale

    def learn(self, task: Task, answer: Trained) -> None:
        if task.time_scale and task.plan_s and answer.gpu_peak_bytes is None:
            planned_s = task.plan_s * task.time_scale
            # as if the fastest device had done it, because the scale is made for that one
            own = task.load * self._rate.busy_to_alone
            fastest = pacing.share(self._smallest_slowdown, task.time_scale)
            load = answer.cpu_s / planned_s * fastest / own
            self.scale.note(task.time_scale, load=load, overrun=answer.seconds / planned_s)

    def meta(self) -> dict[str, Any]:
        return {
            **super().meta(),
            "time_scale": self.scale.now,
            "host_alone_gflops": self._rate.alone_gflops,
            "host_busy_gflops": self._rate.busy_gflops,
        }


class Replay(Timing):
    source = "replay"

    def __init__(self, training: TrainingCosts, recording: Recording) -> None:
        super().__init__(training)
        self._recording = recording

    def plan(self, device: Device, variant: str, work: Work, task: int) -> Plan:
        total_s = self._recording.compute_s.get(task)
        if total_s is None:
            raise FleetbedError(f"the run that is replayed has no duration of task {task}: it ended before that")
        flops = self._training.of(variant, work).flops
        steps = max(1, work.all_steps)
        return Plan(paces=(Pace(steps, total_s / steps),), total_s=total_s, flops=flops)

    def budget_s(self, device: Device, variant: str, work: Work) -> float:
        """Zero: the variants were chosen in the recorded run, and measured durations may exceed a budget."""
        return 0.0

    def variants(self, chosen: Mapping[int, str | None]) -> dict[int, str | None]:
        return {**chosen, **self._recording.variants}

    def steps(self, device: Device, variant: str, work: Work, task: int, fitting: Callable[[], int]) -> int:
        """As many steps as in the recorded run, because durations do not show the steps that did not fit."""

        def flops_of(steps: int) -> float:
            return self._training.of(variant, work.cut(steps)).flops

        return 1 + bisect_left(range(1, work.all_steps), self._recording.flops[task], key=flops_of)

    def failure(self, task: int) -> tuple[FailureKind, str] | None:
        return self._recording.failed.get(task)
