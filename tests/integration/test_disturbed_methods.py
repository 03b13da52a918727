"""Each method in real processes: killed and resumed, and with a client that steps down; the results stay the same."""

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
    "scaffold": "{name: scaffold}",
    "fednova": "{name: fednova}",
    "moon": "{name: moon}",
    "inclusivefl": "{name: inclusivefl}",
    "fedrep": "{name: fedrep, params: {head_epochs: 1}}",
    "fedper": "{name: fedper}",
    "lgfedavg": "{name: lgfedavg}",
    "fedproto": "{name: fedproto}",
    "fd": "{name: fd, params: {batch: 4}}",
    "heterofl": "{name: heterofl}",
    "fedrolex": "{name: fedrolex}",
}
BY_WIDTH = ("heterofl", "fedrolex")
#: with which clients step down in processes of their own too: by width, with a part of a model, with means per class
IN_PROCESSES = ("heterofl", "fedrep", "fedproto")
DEPTHS = ("resnet10", "resnet14")
WIDTHS = ("resnet26-quarter", "resnet26-half")
REAL, INLINE = "processes=resident", "processes=inline"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "two.yaml"
    path.write_text("title: two alike\nmembers:\n  - {device: raspberry-pi-4b-4gb, count: 2}\n")
    return path


def settings(method: str, fleet: Path) -> tuple[str, ...]:
    """Two clients, which begin with the larger of two variants, and three rounds."""
    width = (f"model.variants=[{', '.join(WIDTHS)}]", "model.family=resnet-width", "model.options={base_width: 8}")
    sets = (*TINIER, f"algorithms=[{METHODS[method]}]", f"fleet={fleet}", "data.train_limit=60", "rounds=3")
    return (*sets, *(width if method in BY_WIDTH else ()))


def study(folder: Path, *sets: str) -> Path:
    return start_study(load_experiment("demo", (), sets), folder, search=(), command="", observer=Observer())[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_killed_and_resumed_gives_the_same_results(tmp_path: Path, fleet: Path, method: str) -> None:
    sets = settings(method, fleet)
    whole = study(tmp_path / "whole", *sets, INLINE)
    start_and_be_killed(tmp_path / "killed", (*sets, REAL))
    (resumed,) = resume_study(tmp_path / "killed", Observer())
    assert results(resumed) == results(whole)
    assert failures(resumed) == []
    assert workers_in(resumed) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_client_of_any_method_can_step_down(tmp_path: Path, fleet: Path, method: str) -> None:
    """A client runs out of memory in the second round, by a recording: the host's own memory would decide otherwise."""
    sets = settings(method, fleet)
    recorded = study(tmp_path / "recorded", *sets, INLINE)
    with sqlite3.connect(recorded / "run.sqlite") as db:
        db.execute("UPDATE tasks SET outcome = 'oom', detail = 'made up' WHERE round = 2 AND client = 1")
    again = (*sets, f"timing={{source: replay, replay: {recorded}}}")
    whole = study(tmp_path / "inline", *again, INLINE)
    if method in IN_PROCESSES:
        assert results(study(tmp_path / "real", *again, REAL)) == results(whole)
    small, large = WIDTHS if method in BY_WIDTH else DEPTHS
    rows = query(whole, "SELECT round, client, variant, outcome FROM tasks ORDER BY round, client")
    assert rows == [
        (1, 0, large, "ok"),
        (1, 1, large, "ok"),
        (2, 0, large, "ok"),
        (2, 1, large, "oom"),
        (3, 0, large, "ok"),
        (3, 1, small, "ok"),
    ]
    assert query(whole, "SELECT kind FROM notices WHERE kind = 'step-down'") == [("step-down",)]
    assert query(whole, "SELECT round, merged FROM rounds") == [(1, 2), (2, 1), (3, 2)]
