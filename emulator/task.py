"""A task: what it was, when each phase was in both clocks, what it cost, how it ended."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from fleetbed.emulator.messages import Trained
from fleetbed.profiles.types import Device


class Task(Struct, kw_only=True):
    """Plain data: a checkpoint holds the tasks in flight, a row of the records those that have ended."""

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
    step_s: float = 0.0
    flops: float = 0.0
    bytes_down: int = 0
    most_steps: int | None = None
    downloaded_s: float | None = None
    compute_start_s: float | None = None
    compute_end_s: float | None = None
    uploaded_s: float | None = None
    host_start_s: float | None = None
    host_end_s: float | None = None
    dilation: float | None = None
    spread: float = 1.0
    learned_from: bool = False
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

    def take(self, answer: Trained) -> None:
        """What the worker's meters said."""
        self.keep = answer.keep
        self.cpu_s, self.throttled_s = answer.cpu_s, answer.throttled_s
        self.peak_bytes, self.anon_bytes = answer.peak_bytes, answer.anon_bytes
        self.gpu_peak_bytes, self.gpu_w = answer.gpu_peak_bytes, answer.gpu_w
        self.steps, self.samples = answer.steps, answer.samples
        self.loss = answer.metrics.get("loss")

    @property
    def doing(self) -> str:
        """What its client is at, in device time."""
        if self.outcome:
            return "waits for the merge"
        if self.compute_end_s is not None:
            return "uploads"
        return "trains" if self.compute_start_s is not None else "downloads"

    def joules(self, device: Device) -> float | None:
        """Modelled from the profile's watts: load while computing, idle while transferring; None without figures."""
        load_w, idle_w = device.power.load_w, device.power.idle_w
        if load_w is None or idle_w is None or self.compute_start_s is None:
            return None
        compute_s = (self.compute_end_s or self.compute_start_s) - self.compute_start_s
        down_s = self.compute_start_s - self.dispatched_s
        up_s = self.uploaded_s - self.compute_end_s if self.uploaded_s and self.compute_end_s else 0.0
        return load_w * compute_s + idle_w * (down_s + up_s)


#: what only the engine needs; all other fields are columns of the table `tasks`
NOT_COLUMNS = ("number", "kept", "keep", "step_s", "most_steps", "spread", "learned_from")


def task_row(task: Task, device: Device) -> dict[str, Any]:
    columns = {name: getattr(task, name) for name in task.__struct_fields__ if name not in NOT_COLUMNS}
    return {"task": task.number, **columns, "joules": task.joules(device)}
