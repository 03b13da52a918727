"""A task: its work, its phases on both clocks, its costs and its outcome."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from fleetbed.emulator.method.algorithm import Assignment, Client
from fleetbed.emulator.records.records import finite
from fleetbed.emulator.records.tables import TaskRow, columns
from fleetbed.emulator.timeline.plan import Pace
from fleetbed.emulator.wire.messages import Trained
from fleetbed.profiles.types import Device


class Task(Struct, kw_only=True):
    """One task of a client, as plain data: checkpoints hold tasks in flight, the records those that have ended."""

    number: int
    client: int
    variant: str
    round: int
    stage: str
    base_version: int
    kept: str | None
    cap_bytes: int
    dispatched_s: float
    host_queued_s: float
    plan_s: float = 0.0
    paces: tuple[Pace, ...] = ()
    flops: float = 0.0  # of the work that it was planned to do
    waited_s: float | None = None
    bytes_down: int = 0
    most_steps: int | None = None
    declared_steps: int | None = None
    declared_samples: int | None = None
    downloaded_s: float | None = None
    compute_start_s: float | None = None
    compute_end_s: float | None = None
    uploaded_s: float | None = None
    ended_s: float | None = None
    host_start_s: float | None = None
    host_end_s: float | None = None
    time_scale: float | None = None  # host seconds per device second; None: full speed
    load: float = 1.0  # the part of a core that it needs
    expected_s: float = 0.0  # host seconds
    hang_s: float | None = None  # host seconds after which its client counts as hung; None: see `expected_s`
    measured_s: float | None = None
    overrun: float | None = None
    bytes_up: int | None = None
    outcome: str = ""  # empty while it is under way
    detail: str = ""
    merged_version: int | None = None
    staleness: int | None = None
    keep: str | None = None
    cpu_s: float | None = None
    throttled_s: float | None = None
    peak_bytes: int | None = None
    anon_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    gpu_w: float | None = None
    steps: int | None = None
    samples: int | None = None
    loss: float | None = None
    metrics: dict[str, float | None] = {}  # reported by its method, without the loss

    def take(self, answer: Trained) -> None:
        """Store what the worker measured."""
        self.keep = answer.keep
        self.cpu_s, self.throttled_s = answer.cpu_s, answer.throttled_s
        self.peak_bytes, self.anon_bytes = answer.peak_bytes, answer.anon_bytes
        self.gpu_peak_bytes, self.gpu_w = answer.gpu_peak_bytes, answer.gpu_w
        self.steps, self.samples = answer.steps, answer.samples
        if answer.counted is not None:
            self.flops = answer.counted.operations.flop
        self.loss = finite(answer.metrics.get("loss"))
        self.metrics = {name: finite(value) for name, value in answer.metrics.items() if name != "loss"}

    def cut(self, passed: float) -> None:
        """Count only the part that has `passed` of the transfer that is under way, if any."""
        if self.compute_start_s is None:
            self.bytes_down = int(self.bytes_down * passed)
        elif self.compute_end_s is not None and self.bytes_up is not None:
            self.bytes_up = int(self.bytes_up * passed)

    @property
    def compute_s(self) -> float:
        """Device seconds that it has spent computing."""
        end_s = self.ended_s if self.compute_end_s is None else self.compute_end_s
        return 0.0 if self.compute_start_s is None or end_s is None else end_s - self.compute_start_s

    @property
    def done_flops(self) -> float:
        """The part of its work that it has done; a task that failed while it computed counts in full."""
        if self.compute_start_s is None:
            return 0.0
        needed_s = max(self.plan_s, self.measured_s or 0.0)
        if self.compute_end_s is not None or not needed_s:
            return self.flops
        return self.flops * min(1.0, self.compute_s / needed_s)

    @property
    def doing(self) -> str:
        """Return what its client is doing at this device time."""
        if self.outcome:
            return "waits for the merge"
        if self.compute_end_s is not None:
            return "uploads"
        return "trains" if self.compute_start_s is not None else "downloads"

    def joules(self, device: Device) -> float | None:
        """Energy by the profile's watts: load while computing, idle while transferring; None without figures."""
        load_w, idle_w = device.power.load_w, device.power.idle_w
        if load_w is None or idle_w is None or self.ended_s is None:
            return None
        down_s = (self.ended_s if self.compute_start_s is None else self.compute_start_s) - self.dispatched_s
        up_s = 0.0 if self.compute_end_s is None else self.ended_s - self.compute_end_s
        return load_w * self.compute_s + idle_w * (down_s + up_s)


def assignment_of(task: Task, client: Client) -> Assignment:
    """The task as its method sees it."""
    return Assignment(client=client, task=task.number, stage=task.stage, round=task.round)


def task_row(task: Task, device: Device) -> TaskRow:
    """The row of a task that has ended. Columns that are not worked out here are fields of the task."""
    worked_out: dict[str, Any] = {
        "task": task.number,
        "plan_flops": task.flops,
        "flops": task.done_flops,
        "joules": task.joules(device),
    }
    fields = {name: getattr(task, name) for name in columns(TaskRow) if name not in worked_out}
    return TaskRow(**worked_out, **fields)
