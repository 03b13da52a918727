"""Each method in real processes, killed and resumed, with a client that steps down: the results stay the same."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from killed_runs import start_and_be_killed
from same_runs import failures, results, workers_in
from small_runs import TINIER, query

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import resume_study, start_study
from fleetbed.profiles.resolve import load_experiment

pytestmark = pytest.mark.slow

METHODS = {
    "scaffold": "{}",
    "fednova": "{}",
    "moon": "{}",
    "inclusivefl": "{}",
    "fedrep": "{head_epochs: 1}",
    "fedper": "{}",
    "lgfedavg": "{}",
    "fedproto": "{}",
    "fd": "{batch: 4}",
    "heterofl": "{}",
    "fedrolex": "{}",
    "fedgkt": "{server_epochs: 1}",
    "fedmd": "{public: 8, pretrain_public: 1, match_batch: 4}",
    "scalefl": "{gamma: 0.5, start: 0.3}",
    "fedgen": "{server_steps: 2}",
    "fedfomo": "{}",
    "fedet": "{public: 8, server_steps: 2, server_batch: 4}",
    "feddpa": "{}",
    "fedselect": "{every: 1}",
    "depthfl": "{alpha: 0.1, ramp: 2}",  # clients keep their g, the server h
    "fedtgp": "{server_epochs: 1}",
    "fedepth": "{}",
}
#: family, smaller and larger variant, and width of the models
USUAL = ("resnet-stage", "resnet10", "resnet14", 4)
MODELS = {
    "heterofl": ("resnet-width", "resnet26-quarter", "resnet26-half", 8),
    "fedrolex": ("resnet-width", "resnet26-quarter", "resnet26-half", 8),
    "scalefl": ("resnet-exit", "level1", "level2", 4),
    "depthfl": ("resnet-depth", "depth1", "depth2", 4),
    "fedepth": ("resnet-segment", "resnet26-in-3", "resnet26-in-1", 4),
}


def settings(method: str, fleet: Path) -> tuple[str, ...]:
    """Two clients, which begin with the larger of two variants, and three rounds."""
    family, small, large, width = MODELS.get(method, USUAL)
    return (
        *TINIER,
        f"algorithms=[{{name: {method}, params: {METHODS[method]}}}]",
        f"model.family={family}",
        f"model.variants=[{small}, {large}]",
        f"model.options={{base_width: {width}}}",
        f"fleet={fleet}",
        "data.train_limit=60",
        "training.optimizer={name: adam, lr: 0.001}",  # it has the most state, also at servers that train
        f"data.public={8 if 'public' in METHODS[method] else 0}",
        "rounds=3",
    )


def study(folder: Path, *sets: str) -> Path:
    return start_study(load_experiment("demo", (), sets), folder, search=(), command="", observer=Observer())[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_killed_and_loses_memory_gives_the_same_results(tmp_path: Path, method: str) -> None:
    """A client runs out of memory in the second round, and the run is killed in the third.

    The client does so by a recording: the host's own memory would decide otherwise.
    """
    fleet = tmp_path / "two.yaml"
    fleet.write_text("title: two alike\nmembers:\n  - {device: raspberry-pi-4b-4gb, count: 2}\n")
    sets = settings(method, fleet)
    recorded = study(tmp_path / "recorded", *sets, "processes=inline")
    with sqlite3.connect(recorded / "run.sqlite") as db:
        first = "SELECT min(task) FROM tasks WHERE round = 2 AND client = 1"
        db.execute(f"UPDATE tasks SET outcome = 'oom', detail = 'made up' WHERE task = ({first})")
    sets = (*sets, f"timing={{source: replay, replay: {recorded}}}")
    whole = study(tmp_path / "whole", *sets, "processes=inline")
    start_and_be_killed(tmp_path / "killed", (*sets, "processes=resident"))
    (resumed,) = resume_study(tmp_path / "killed", Observer())
    assert results(resumed) == results(whole)
    assert [(client, outcome) for _, client, outcome, _ in failures(resumed)] == [(1, "oom")]
    assert workers_in(resumed) == []
    _, small, large, _ = MODELS.get(method, USUAL)
    rows = query(resumed, "SELECT DISTINCT client, round, variant, outcome FROM tasks ORDER BY client, round, task")
    assert rows == [
        (0, 1, large, "ok"),
        (0, 2, large, "ok"),
        (0, 3, large, "ok"),
        (1, 1, large, "ok"),
        (1, 2, large, "oom"),
        (1, 3, small, "ok"),
    ]
    assert query(resumed, "SELECT kind FROM notices WHERE kind = 'step-down'") == [("step-down",)]
    assert query(resumed, "SELECT round, min(merged) FROM rounds GROUP BY round") == [(1, 2), (2, 1), (3, 2)]
