"""Runs of the methods that train exits or segments: interrupted in the middle, and by each device's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from observers import StopAfter
from small_runs import OWN_MODEL, TINIER, query

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import resume_study, start_study
from fleetbed.emulator.wire.storage import load_bundle
from fleetbed.profiles.resolve import load_experiment

METHODS = {
    "scalefl": "{name: scalefl, params: {gamma: 0.5, start: 0.3}}",
    "depthfl": "{name: depthfl, params: {alpha: 0.1, ramp: 2}}",  # clients keep their g, the server h
    "fedepth": "{name: fedepth}",
}
EVALUATIONS = "SELECT version, round, device_s, target, accuracy, loss FROM evaluations ORDER BY version, target"
TASKS = "SELECT task, client, variant, round, outcome, bytes_up, flops, loss FROM tasks ORDER BY task"


def start(folder: Path, *sets: str, observer: Observer | None = None) -> Path:
    experiment = load_experiment("demo", (), (*TINIER, "processes=inline", "training.max_steps=1", *sets))
    return start_study(experiment, folder, search=(), command="", observer=observer or Observer())[0]


def outcome(folder: Path) -> object:
    models = {path.name: load_bundle(path).tensors for path in sorted((folder / "models").iterdir())}
    values = {(file, name): t.tolist() for file, tensors in models.items() for name, t in tensors.items()}
    return query(folder, TASKS), query(folder, EVALUATIONS), values


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path, method: str) -> None:
    sets = (f"algorithms=[{METHODS[method]}]", *OWN_MODEL[method], "rounds=3", "participation.ratio=0.5")
    whole = start(tmp_path / "whole", *sets)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "stopped", *sets, observer=StopAfter(20, KeyboardInterrupt))
    (stopped,) = [path.parent for path in (tmp_path / "stopped").rglob("run.sqlite")]
    assert 0 < len(query(stopped, TASKS)) < len(query(whole, TASKS))
    (resumed,) = resume_study(tmp_path / "stopped", Observer())
    assert outcome(resumed) == outcome(whole)


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
