"""Training that diverges is a result: the run continues or stops as set, and is recorded, resumed and evaluated."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from observers import Listener
from small_runs import OWN_MODEL, TINIER, query, tiny
from test_bad_replies import METHODS

from fleetbed.analysis.tables.runs import open_run
from fleetbed.emulator.algorithms import heteroavg
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.method.algorithm import Arrival
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.records.records import Records
from fleetbed.emulator.records.tables import SCHEMA_VERSION
from fleetbed.emulator.resume.checkpoint import Checkpoints
from fleetbed.emulator.run import run
from fleetbed.profiles.errors import FleetbedError

Start = Callable[..., Path]
QUICK = ("heteroavg",)
LARGER = {"scalefl": "1e12"}  # all of its exits normalise, so that their losses stay finite for long
STATUS = "SELECT value FROM meta WHERE key = 'status'"
OUTCOMES = "SELECT task, client, round, outcome, detail, uploaded_s, loss, merged_version FROM tasks ORDER BY task"
EVALUATIONS = "SELECT version, round, device_s, target, accuracy, loss FROM evaluations ORDER BY version, target"
NOTICES = "SELECT device_s, kind, text FROM notices ORDER BY kind"


def sets(method: str, lr: str = "100", policy: str = "{kind: sync}") -> tuple[str, ...]:
    return (
        *TINIER,
        f"algorithms=[{METHODS[method]}]",
        f"training.optimizer.lr={lr}",
        f"policies=[{policy}]",
        "processes=inline",
        "data.public=20",
        "rounds=4",
        *OWN_MODEL.get(method, ()),
    )


@pytest.mark.parametrize("method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_every_method_goes_on_to_the_end_and_says_so(start: Start, method: str) -> None:
    observer = Listener()
    folder = start(*sets(method, LARGER.get(method, "100")), observer=observer)
    assert query(folder, STATUS) == [('"done"',)]
    assert query(folder, "SELECT max(round) FROM tasks") == [(4,)]
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome NOT IN ('ok', 'diverged')") == [(0,)]
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome = 'diverged' AND merged_version IS NOT NULL") == [
        (0,)
    ]
    said = [text for text in observer.said if text.startswith("training diverged: ")]
    assert 1 <= len(said) <= 2
    assert sorted(said) == sorted(text for _, _, text in query(folder, NOTICES))
    assert not query(folder, "SELECT 1 FROM evaluations WHERE abs(loss) = 9e999 OR accuracy NOT BETWEEN 0 AND 1")
    open_run(folder)  # what the reports read


@pytest.mark.parametrize(
    "policy", ["{kind: async}", "{kind: buffered, buffer: 3}", "{kind: over-select, invite: 8, take: 5}"]
)
def test_a_run_in_which_everything_diverges_ends_under_every_policy(start: Start, tmp_path: Path, policy: str) -> None:
    with contextlib.suppress(FleetbedError):  # a run that merged nothing may call that a failure
        start(*sets("heteroavg", "1e12", policy))
    folder = tmp_path / "run"
    assert query(folder, "SELECT DISTINCT outcome FROM tasks WHERE outcome != 'late'") == [("diverged",)]
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome = 'diverged'") == [(32,)]


class Stopped(Observer):
    """Interrupts the run when a client has diverged and a round has passed since."""

    def __init__(self) -> None:
        self._engine: object = None

    def start(self, engine: object, evaluations: object) -> None:
        self._engine = engine

    def tick(self) -> None:
        if self._engine is not None and self._engine.progress.policy.round == 4:  # type: ignore[attr-defined]
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["heteroavg", pytest.param("fedhenn", marks=pytest.mark.slow)])
def test_a_diverged_run_is_resumed_to_the_same_result(start: Start, method: str) -> None:
    whole = start(*sets(method), name="whole")
    with pytest.raises(KeyboardInterrupt):
        start(*sets(method), name="cut", observer=Stopped())
    cut = whole.parent / "cut"
    run.resume(tiny(*sets(method)), cut, search=(), observer=Observer())
    for sql in (OUTCOMES, EVALUATIONS, NOTICES):
        assert query(cut, sql) == query(whole, sql)
    assert query(cut, "SELECT count(*) FROM evaluations WHERE loss IS NULL") != [(0,)]


def test_it_stops_on_divergence_and_again_when_it_is_resumed(start: Start, tmp_path: Path) -> None:
    told = (*sets("heteroavg"), "training.on_divergence=stop")
    with pytest.raises(FleetbedError) as caught:
        start(*told)
    assert str(caught.value).startswith("training diverged: ")
    assert "training.on_divergence is stop" in str(caught.value)
    assert caught.value.exit_code == 1
    folder = tmp_path / "run"
    assert query(folder, STATUS) == [('"failed"',)]
    assert len(query(folder, NOTICES)) == 1
    with pytest.raises(FleetbedError) as again:
        run.resume(tiny(*told), folder, search=(), observer=Observer())
    assert str(again.value) == str(caught.value)
    assert len(query(folder, NOTICES)) == 1


def test_a_merge_that_overflows_is_reported_and_does_not_crash(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    merge = heteroavg.Method.merge

    def overflows(self: heteroavg.Method, state: Bundle, arrivals: list[Arrival]) -> object:
        merged = merge(self, state, arrivals)
        if arrivals[0].assignment.round == 2:
            merged.state.tensors["fc.bias"] = torch.full_like(merged.state.tensors["fc.bias"], math.inf)
            merged.metrics["theta"] = math.nan
        return merged

    monkeypatch.setattr(heteroavg.Method, "merge", overflows)
    folder = start(*sets("heteroavg", "0.01"))
    ((_, kind, text), *_) = query(folder, NOTICES + " DESC")
    assert kind == "model-diverged"
    assert text == "training diverged: merge 2, in round 2, made fc.bias of the server's state not finite"
    assert query(folder, "SELECT version, name, value FROM metrics WHERE task IS NULL") == [(2, "theta", None)]
    assert query(folder, "SELECT DISTINCT outcome FROM tasks WHERE round > 2") == [("diverged",)]


# records of the first version


OLD = """
ALTER TABLE evaluations RENAME TO e; ALTER TABLE metrics RENAME TO m;
CREATE TABLE evaluations (
    version INTEGER NOT NULL, round INTEGER NOT NULL, device_s REAL NOT NULL, target TEXT NOT NULL,
    variant TEXT NOT NULL, client INTEGER, local INTEGER NOT NULL, samples INTEGER NOT NULL,
    accuracy REAL NOT NULL, loss REAL NOT NULL, PRIMARY KEY (version, target)
);
CREATE TABLE metrics (version INTEGER NOT NULL, task INTEGER, name TEXT NOT NULL, value REAL NOT NULL);
INSERT INTO evaluations
    SELECT version, round, device_s, target, variant, client, local, samples, accuracy, loss FROM e;
INSERT INTO metrics SELECT * FROM m;
DROP TABLE e; DROP TABLE m;
UPDATE meta SET value = '1' WHERE key = 'schema_version';
"""


def test_a_run_of_the_first_version_is_read_and_resumed(start: Start) -> None:
    """Its tables become those of today, and its configuration lacks the keys that came later."""
    whole = start(*sets("heteroavg"), name="whole")
    with pytest.raises(KeyboardInterrupt):
        start(*sets("heteroavg"), name="cut", observer=Stopped())
    cut = whole.parent / "cut"
    with sqlite3.connect(cut / "run.sqlite") as db:
        db.execute("DELETE FROM evaluations WHERE loss IS NULL")
        db.executescript(OLD)
        db.execute(
            "UPDATE meta SET value = json_remove(value, '$.experiment.training.schedule', "
            "'$.experiment.training.on_divergence', '$.experiment.training.optimizer.decay_biases', "
            "'$.experiment.participation.last_ratio') WHERE key = 'config'"
        )
    before = query(cut, "SELECT * FROM evaluations")
    assert [msg.version for msg in open_run(cut).evaluations] == [row[0] for row in before]
    Records(cut / "run.sqlite").close()
    assert query(cut, "SELECT * FROM evaluations") == [(*row, None, None) for row in before]  # no F1, no MAE
    assert query(cut, "SELECT value FROM meta WHERE key = 'schema_version'") == [(str(SCHEMA_VERSION),)]
    assert Checkpoints(cut).found()
    run.resume(tiny(*sets("heteroavg")), cut, search=(), observer=Observer())
    assert query(cut, OUTCOMES) == query(whole, OUTCOMES)
