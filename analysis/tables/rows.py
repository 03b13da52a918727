"""The rows of run.sqlite as types: what every figure may rely on once a run is open.

The bounds are far beyond anything that a run records. They keep damaged values out of sums, axes and JSON.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any

from msgspec import Meta, Struct

from fleetbed.emulator.method.series import TargetSeries, target_series

Count = Annotated[int, Meta(ge=0, le=2**50)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Figure = Annotated[float, Meta(ge=-1e30, le=1e30)]


class ClientRow(Struct, frozen=True, array_like=True):
    client: Count
    name: str
    device: str
    device_title: str
    link: str
    variant: str | None
    reason: str
    memory_predicted_bytes: Count | None
    memory_cap_bytes: Count
    rate_gflops: Figure
    slowdown: Figure | None
    load_w: Figure | None
    idle_w: Figure | None
    samples: Count
    test_samples: Count
    label_counts: str  # JSON list, one count per class


class CapRow(Struct, frozen=True, array_like=True):
    client: Count
    knob: str
    status: str
    backend: str
    asked: Figure | None
    got: Figure | None
    unit: str
    note: str


class RoundRow(Struct, frozen=True, array_like=True):
    """One merge."""

    version: Count
    round: Count
    stage: str
    device_start_s: Seconds
    device_end_s: Seconds
    server_s: Seconds
    host_start_s: Seconds
    host_end_s: Seconds
    merged: Count


class TaskRow(Struct, frozen=True, array_like=True):
    task: Count
    client: Count
    round: Count
    stage: str
    variant: str
    outcome: str
    detail: str
    base_version: Count
    merged_version: Count | None
    staleness: Count | None
    dispatched_s: Seconds
    downloaded_s: Seconds | None
    compute_start_s: Seconds | None
    compute_end_s: Seconds | None
    uploaded_s: Seconds | None
    ended_s: Seconds | None
    waited_s: Seconds | None
    host_queued_s: Seconds
    host_start_s: Seconds | None
    host_end_s: Seconds | None
    plan_s: Seconds
    dilation: Figure | None
    measured_s: Seconds | None
    overrun: Figure | None
    cpu_s: Seconds | None
    throttled_s: Seconds | None
    peak_bytes: Count | None
    anon_bytes: Count | None
    cap_bytes: Count
    gpu_peak_bytes: Count | None
    gpu_w: Figure | None
    plan_flops: Figure | None
    flops: Figure
    bytes_down: Count
    bytes_up: Count | None
    joules: Figure | None
    steps: Count | None
    samples: Count | None
    loss: float | None

    @property
    def end_s(self) -> float:
        """When it ended, device time; in runs that do not say, the end of the last phase that was reached."""
        reached = (self.ended_s, self.uploaded_s, self.compute_end_s, self.compute_start_s, self.downloaded_s)
        return next((moment for moment in reached if moment is not None), self.dispatched_s)

    @property
    def bytes_both(self) -> int:
        return self.bytes_down + (self.bytes_up or 0)

    def phases(self) -> dict[str, float]:
        """Device seconds of each phase that was reached; the last one may have been cut off."""
        steps = (
            ("download", self.dispatched_s, self.downloaded_s),
            ("compute", self.compute_start_s, self.compute_end_s),
            ("upload", self.compute_end_s, self.uploaded_s),
        )
        ends = {name: (start, self.ended_s if end is None else end) for name, start, end in steps}
        return {name: end - start for name, (start, end) in ends.items() if start is not None and end is not None}


class EvaluationRow(Struct, frozen=True, array_like=True):
    """One model's test after a merge. A loss that is None or not finite is that of a model that diverged."""

    version: Count
    round: Count
    device_s: Seconds
    target: str
    variant: str
    client: Count | None
    local: Count
    samples: Count
    accuracy: Annotated[float, Meta(ge=0, le=1)] | None
    loss: float | None

    @property
    def series(self) -> TargetSeries:
        return target_series(self.client, bool(self.local))

    @property
    def diverged(self) -> bool:
        return self.accuracy is None or self.loss is None or not isfinite(self.loss)


class MetricRow(Struct, frozen=True, array_like=True):
    version: Count
    task: Count | None
    name: str
    value: float | None


class NoticeRow(Struct, frozen=True, array_like=True):
    host_s: Seconds
    device_s: Seconds | None
    kind: str
    text: str


class Host(Struct, frozen=True):
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: Count | None = None
    kernel: str | None = None
    python: str | None = None
    gpu: Any = None


class HostKnob(Struct, frozen=True):
    """What the host can do about one limit; `enable` is the command that would give more."""

    knob: str
    status: str
    backend: str = ""
    note: str = ""
    enable: str = ""


class HostProof(Struct, frozen=True):
    """How far off a limit was when the host was last tested."""

    knob: str
    error: Figure | None


class About(Struct, frozen=True):
    """The values of the table `meta` that people read; runs of earlier versions lack some of them."""

    status: str = "running"
    error: str | None = None
    fleetbed_version: str | None = None
    versions: dict[str, Any] | None = None
    host: Host | None = None
    timing: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    command: str | None = None
    started: str | None = None
    degraded: bool | None = None
    host_can: tuple[HostKnob, ...] | None = None
    verify: tuple[HostProof, ...] | None = None
    series: TargetSeries | None = None  # the one that the method's paper reports
