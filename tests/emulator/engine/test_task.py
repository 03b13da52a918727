"""What a task has cost when it was cut off in any of its phases, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from handmade_tasks import make_task

from fleetbed.emulator.engine.task import Task, task_row
from fleetbed.emulator.wire.messages import Trained
from fleetbed.profiles.resolve import load_device
from fleetbed.profiles.types import Power

DEVICE = msgspec.structs.replace(load_device("raspberry-pi-4b-4gb", (), ""), power=Power(load_w=6.0, idle_w=2.0))


def task(**changes: Any) -> Task:
    """Dispatched at 10 s, planned to compute for 4 s."""
    planned = {"dispatched_s": 10.0, "plan_s": 4.0, "flops": 100.0, "bytes_down": 1000}
    return make_task(**{"number": 3, "client": 1, **planned, **changes})


DOWNLOADING = task()
COMPUTING = task(downloaded_s=12.0, compute_start_s=12.0)
UPLOADING = task(downloaded_s=12.0, compute_start_s=12.0, compute_end_s=16.0, bytes_up=500)
ARRIVED = task(
    downloaded_s=12.0,
    compute_start_s=12.0,
    compute_end_s=16.0,
    bytes_up=500,
    uploaded_s=17.0,
    ended_s=17.0,
    outcome="ok",
)


@pytest.mark.parametrize(
    ("before", "ended_s", "compute_s", "flops", "joules"),
    [
        (DOWNLOADING, 11.0, 0.0, 0.0, 2.0 * 1),
        (COMPUTING, 13.0, 1.0, 25.0, 2.0 * 2 + 6.0 * 1),
        (COMPUTING, 18.0, 6.0, 100.0, 2.0 * 2 + 6.0 * 6),
        (UPLOADING, 16.5, 4.0, 100.0, 2.0 * 2.5 + 6.0 * 4),
        (ARRIVED, 17.0, 4.0, 100.0, 2.0 * 3 + 6.0 * 4),
    ],
    ids=["downloading", "computing", "overrunning", "uploading", "arrived"],
)
def test_what_a_task_has_used_when_it_ends(
    before: Task, ended_s: float, compute_s: float, flops: float, joules: float
) -> None:
    ended = msgspec.structs.replace(before, ended_s=ended_s)
    assert ended.compute_s == compute_s
    assert ended.done_flops == flops
    assert ended.joules(DEVICE) == pytest.approx(joules)


def test_a_task_that_overruns_has_done_its_work_by_its_real_end() -> None:
    slow = task(compute_start_s=12.0, measured_s=8.0, ended_s=14.0)
    assert slow.done_flops == 25.0


def test_a_device_without_figures_has_no_energy() -> None:
    unknown = msgspec.structs.replace(DEVICE, power=Power())
    assert ARRIVED.joules(unknown) is None
    assert DOWNLOADING.joules(DEVICE) is None, "it has not ended"


@pytest.mark.parametrize(
    ("before", "down", "up"),
    [(DOWNLOADING, 250, None), (COMPUTING, 1000, None), (UPLOADING, 1000, 125)],
    ids=["downloading", "computing", "uploading"],
)
def test_only_the_part_of_a_transfer_that_has_passed_counts(before: Task, down: int, up: int | None) -> None:
    cut = msgspec.structs.replace(before)
    cut.cut(0.25)
    assert (cut.bytes_down, cut.bytes_up) == (down, up)


def test_the_phase_of_a_task_in_words() -> None:
    phases = [each.doing for each in (DOWNLOADING, COMPUTING, UPLOADING, ARRIVED)]
    assert phases == ["downloads", "trains", "uploads", "waits for the merge"]


def test_the_meters_of_an_answer_are_taken_over_and_figures_that_are_not_finite_are_none() -> None:
    answer = Trained(
        task=3,
        keep="file",
        metrics={"loss": math.nan, "norm": 2.0, "ratio": math.inf},
        steps=7,
        samples=28,
        seconds=1.0,
        cpu_s=0.5,
        throttled_s=0.25,
        peak_bytes=11,
        anon_bytes=9,
        gpu_peak_bytes=5,
        gpu_w=1.5,
    )
    taken = task()
    taken.take(answer)
    assert (taken.keep, taken.steps, taken.samples, taken.cpu_s, taken.throttled_s) == ("file", 7, 28, 0.5, 0.25)
    assert (taken.peak_bytes, taken.anon_bytes, taken.gpu_peak_bytes, taken.gpu_w) == (11, 9, 5, 1.5)
    assert taken.loss is None
    assert taken.metrics == {"norm": 2.0, "ratio": None}


def test_the_row_of_a_task_tells_planned_from_done() -> None:
    row = task_row(msgspec.structs.replace(COMPUTING, ended_s=13.0, time_scale=2.0), DEVICE)
    assert (row.task, row.plan_flops, row.flops, row.time_scale) == (3, 100.0, 25.0, 2.0)
