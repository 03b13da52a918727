"""Runs of the methods that train exits or segments, by each device's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import TINIER, query

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.resolve import load_experiment


def start(folder: Path, *sets: str) -> Path:
    experiment = load_experiment("demo", (), (*TINIER, "processes=inline", "training.max_steps=1", *sets))
    return start_study(experiment, folder, search=(), command="", observer=Observer())[0]


@pytest.mark.slow
def test_small_devices_train_the_same_model_in_more_segments(tmp_path: Path) -> None:
    """`demo` with a model that a device of its fleet cannot train as a whole."""
    folder = start(
        tmp_path / "study",
        "algorithms=[{name: fedepth}]",
        "fleet=tiny-iot",
        "model.family=resnet-segment",
        "model.variants=[]",
        "model.options={base_width: 24}",
        "rounds=1",
        "participation.ratio=1",
        "data.train_limit=400",
    )
    used = query(folder, "SELECT DISTINCT variant, flops, bytes_up FROM tasks WHERE outcome = 'ok' GROUP BY variant")
    segments = {int(variant.rpartition("-")[2]): (flops, size) for variant, flops, size in used}
    assert len(segments) > 1
    assert len({size for _, size in segments.values()}) == 1  # all send the whole model
    by_number = sorted(segments)
    assert [segments[n][0] for n in by_number] == sorted(flops for flops, _ in segments.values())
    peaks = dict(query(folder, "SELECT variant, max(memory_predicted_bytes) FROM clients GROUP BY variant"))
    assert peaks[f"resnet26-in-{by_number[-1]}"] < peaks[f"resnet26-in-{by_number[0]}"]
