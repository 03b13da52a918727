"""The same configuration and seed give the same bits, however the host carries the run out."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from same_runs import ROUNDS, TASKS, failures, results, weights
from small_runs import TINIER, query

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.machine.calibration import Calibration, HostRate, Store, host_fingerprint
from fleetbed.emulator.processes.broker import Broker
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.resolve import load_experiment

Start = Callable[..., Path]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Carry a run out in a folder of its name; all runs of a test share one cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def start(name: str, *sets: str) -> Path:
        experiment = load_experiment("demo", (), (*TINIER, "participation.ratio=0.5", *sets))
        folder = start_study(experiment, tmp_path / name, search=(), command="", observer=Observer())[0]
        assert failures(folder) == []  # first, for it would explain every difference
        return folder

    return start


@contextmanager
def one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def calibrate() -> None:
    """Keep made-up rates for this host; reference times are measured on top of them and then kept as well."""
    rate = HostRate(alone_gflops=50.0, busy_gflops=40.0, cores=2, alone_spread=0.0, busy_spread=0.0, other_cores=0.0)
    Store().save(Calibration(host_fingerprint(), "2020-01-01", rate))


@pytest.mark.parametrize("policy", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_modelled_repeats_on_one_core_and_with_clients_started_in_another_order(
    go: Start, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    sets = (f"policies=[{{kind: {policy}}}]",)
    first = results(go("inline", *sets, "processes=inline"))
    real = Broker.start
    monkeypatch.setattr(Broker, "start", lambda self, names: real(self, names[::-1]))
    with one_core():
        assert results(go("one-core", *sets)) == first


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_all_ways_of_running_give_the_same(go: Start, policy: str) -> None:
    sets = (f"policies=[{{kind: {policy}}}]",)
    first = results(go("resident", *sets))
    for mode in ("resident", "on-demand", "inline"):
        assert results(go(f"{mode}-again", *sets, f"processes={mode}")) == first
    with one_core():
        for mode in ("resident", "on-demand", "inline"):
            assert results(go(f"{mode}-one", *sets, f"processes={mode}")) == first


@pytest.mark.slow
def test_the_state_of_a_client_is_available_however_early_the_host_finished(go: Start) -> None:
    """Processes write their files when the host is done, which under async may be many merges before the task ends."""
    sets = ("algorithms=[{name: fedhe, params: {batch: 4}}]", "policies=[{kind: async, concurrency: 4}]", "rounds=3")
    assert results(go("resident", *sets)) == results(go("inline", *sets, "processes=inline"))


def test_another_seed_is_another_run(go: Start) -> None:
    first, second = (go(f"seed-{seed}", "processes=inline", "rounds=1", f"seeds=[{seed}]") for seed in (1, 2))
    assert weights(first) != weights(second)
    assert query(first, TASKS) != query(second, TASKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "{kind: async, concurrency: 3}",
        pytest.param("{kind: over-select, invite: 4, take: 2}", marks=pytest.mark.slow),
    ],
    ids=["async", "over-select"],
)
def test_an_enforced_run_is_replayed_with_its_merges_and_device_times(go: Start, policy: str) -> None:
    calibrate()
    sets = (f"policies=[{policy}]",)
    enforced = go("enforced", *sets, "timing.source=enforced")
    replayed = go("replayed", *sets, f"timing={{source: replay, replay: {enforced}}}", "processes=inline")
    # the plan of a replay is what was measured, so that column is another
    columns = TASKS.replace("plan_s, ", "")
    assert query(replayed, columns) == query(enforced, columns)
    assert query(replayed, ROUNDS) == query(enforced, ROUNDS)
    assert weights(replayed) == weights(enforced)


@pytest.mark.slow
def test_the_time_scale_is_fixed_unless_a_fast_one_is_asked_for(go: Start) -> None:
    calibrate()
    sets = ("timing.source=enforced", "rounds=5")
    folder = go("fixed", *sets)
    ((scale,),) = query(folder, "SELECT DISTINCT time_scale FROM tasks")
    assert query(folder, "SELECT json_extract(value, '$.time_scale') FROM meta WHERE key = 'timing'") == [(scale,)]
    fast = go("fast", *sets, "timing.time_scale=fast")
    first, *later = [scale for (scale,) in query(fast, "SELECT time_scale FROM tasks ORDER BY task")]
    assert first == pytest.approx(scale)
    assert len(set(later)) > 1
    assert max(later) <= 2 * first
    asked = go("asked", *sets, f"timing.time_scale={2 * first}")
    assert query(asked, "SELECT DISTINCT time_scale FROM tasks") == [(pytest.approx(2 * first),)]


def test_a_replay_cuts_tasks_to_the_steps_that_fitted_the_deadline(go: Start, tmp_path: Path) -> None:
    fleet = tmp_path / "two.yaml"
    fleet.write_text(
        "title: a fast one and a slow one\nmembers:\n"
        "  - {device: raspberry-pi-4b-4gb, count: 1, override: {cpu.fp32_gflops: 0.02}}\n"
        "  - {device: raspberry-pi-4b-4gb, count: 1, override: {cpu.fp32_gflops: 0.005}}\n"
    )
    sets = ("processes=inline", f"fleet={fleet}", "participation.ratio=1", "training.max_steps=8", "rounds=1")
    whole = go("whole", *sets)
    ((end_s, plan_s),) = query(whole, "SELECT uploaded_s, plan_s FROM tasks WHERE client = 1")
    cut = (*sets, f"policies=[{{kind: deadline, deadline_s: {end_s - 0.45 * plan_s}, partial: true}}]")
    first = go("first", *cut)
    assert query(first, "SELECT steps FROM tasks ORDER BY client") == [(8,), (4,)]
    assert results(go("replayed", *cut, f"timing={{source: replay, replay: {first}}}")) == results(first)


def test_a_replay_repeats_that_an_answer_was_refused(go: Start) -> None:
    first = go("first", "processes=inline", "rounds=1")
    with sqlite3.connect(first / "run.sqlite") as db:  # as the records have it: nothing of it was uploaded
        db.execute("UPDATE tasks SET outcome = 'refused', detail = 'invalid', bytes_up = NULL WHERE task = 1")
    replayed = go("replayed", "processes=inline", "rounds=1", f"timing={{source: replay, replay: {first}}}")
    outcomes = "SELECT task, outcome, detail FROM tasks ORDER BY task"
    assert query(replayed, outcomes) == [(0, "ok", ""), (1, "refused", "invalid"), (2, "ok", ""), (3, "ok", "")]
    assert query(replayed, "SELECT merged FROM rounds") == [(3,)]


def test_a_replay_takes_the_variants_that_were_chosen_whatever_was_measured(go: Start) -> None:
    sets = ("processes=inline", "rounds=1", "budgets.round_s=5", "budgets.all_must_fit=true")
    first = go("first", *sets)
    with sqlite3.connect(first / "run.sqlite") as db:
        db.execute("UPDATE tasks SET measured_s = 7 WHERE task = 0")  # as by a host that was busy
    replayed = go("replayed", *sets, f"timing={{source: replay, replay: {first}}}")
    variants = "SELECT client, variant FROM clients ORDER BY client"
    assert query(replayed, variants) == query(first, variants)
    assert query(replayed, "SELECT plan_s FROM tasks WHERE task = 0") == [(7,)]


def test_a_replay_of_another_configuration_is_refused_with_the_differences(go: Start) -> None:
    first = go("first", "processes=inline", "rounds=1")
    with pytest.raises(BadInput, match=r"these keys differ: experiment\.training\.batch, seed$"):
        go("replayed", "rounds=1", "training.batch=5", "seeds=[2]", f"timing={{source: replay, replay: {first}}}")
