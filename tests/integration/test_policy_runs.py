"""Policies, methods and availability in whole runs, inline: refusals, outcomes, and the ends of rounds."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from observers import StopAfter
from same_runs import results
from small_runs import FOUR, OWN_MODEL, TINIER, query

from fleetbed.emulator.algorithms import names
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import resume_study, start_study
from fleetbed.emulator.wire.storage import load_bundle
from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.resolve import load_experiment

Start = Callable[..., Path]
PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
POLICIES = {
    "sync": "{kind: sync}",
    "deadline": "{kind: deadline, deadline_s: 2, late: next-round, partial: true}",
    "over-select": "{kind: over-select, invite: 4, take: 3}",
    "async": "{kind: async, concurrency: 3}",
    "buffered": "{kind: buffered, buffer: 2, concurrency: 3}",
}
GRAMS = "fedhenn with client_side_gram"  # the method of two stages
ALGORITHMS = {
    "fedet": "{name: fedet, params: {public: 8, server_steps: 2, server_batch: 4}}",
    "fedgen": "{name: fedgen, params: {server_steps: 2}}",
    "fedgkt": "{name: fedgkt, params: {server_epochs: 1}}",
    "fedhe": "{name: fedhe, params: {batch: 4}}",
    "fedmd": "{name: fedmd, params: {public: 8, pretrain_public: 1, match_batch: 4}}",
    "fedtgp": "{name: fedtgp, params: {server_epochs: 2}}",
    "fd": "{name: fd, params: {batch: 4}}",
    "fedselect": "{name: fedselect, params: {every: 1, alternations: 1}}",
    "feddpa": "{name: feddpa, params: {fisher_samples: 4}}",
    "fedrep": "{name: fedrep, params: {head_epochs: 1}}",
    "fedhenn": "{name: fedhenn, params: {rad: 8}}",
    GRAMS: "{name: fedhenn, params: {rad: 8, client_side_gram: true}}",
    "fedhenn_homo": "{name: fedhenn_homo, params: {rad: 8}, variant: resnet10}",
}
#: one pair of each policy, and both kinds of refusal
QUICK = {
    ("heteroavg", "over-select"),
    ("fedin", "deadline"),
    ("fedrolex", "async"),
    ("fedhe", "async"),
    ("fedhenn", "buffered"),
    ("fedhenn", "async"),
    ("fedrep", "deadline"),
    ("fedproto", "async"),
    ("fedgkt", "buffered"),
    ("fedtgp", "async"),
    ("fd", "buffered"),
    (GRAMS, "sync"),
    (GRAMS, "buffered"),
}


@pytest.fixture
def go(tmp_path: Path) -> Start:
    def start(*sets: str, name: str = "study", observer: Observer | None = None) -> Path:
        experiment = load_experiment("demo", (), (*TINIER, "processes=inline", "training.max_steps=1", *sets))
        return start_study(experiment, tmp_path / name, search=(), command="", observer=observer or Observer())[0]

    return start


def matrix() -> dict[tuple[str, str], bool]:
    """The table of docs/policies.md."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head = next(i for i, row in enumerate(rows) if row[0] == "method")
    found = {}
    for row in rows[head + 1 :]:
        for policy, cell in zip(rows[head][1:], row[1:], strict=True):
            assert cell in ("yes", "no")
            found[row[0].replace("`", ""), policy] = cell == "yes"
    return found


def test_the_table_is_complete() -> None:
    shipped = {name for name in names() if not names()[name].startswith("from ")}
    assert {method for method, _ in matrix()} == shipped | {GRAMS}
    assert {policy for _, policy in matrix()} == set(POLICIES)


@pytest.mark.parametrize(
    ("method", "policy"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in matrix()],
)
def test_every_method_under_every_policy(go: Start, method: str, policy: str) -> None:
    algorithm = ALGORITHMS.get(method, f"{{name: {method}}}")
    kind = POLICIES[policy]
    if method in (GRAMS, "fedmd"):  # a late result may be of the other stage
        kind = kind.replace("late: next-round, ", "")
    sets = (*FOUR, f"algorithms=[{algorithm}]", f"policies=[{kind}]", "participation.ratio=0.75", "data.public=8")
    sets += OWN_MODEL.get(method, ())
    if not matrix()[method, policy]:
        with pytest.raises(BadInput, match=rf"{method.split()[0]}.* {policy}"):
            go(*sets)
        return
    folder = go(*sets)
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome NOT IN ('ok', 'late')") == [(0,)]
    assert query(folder, "SELECT max(round) FROM rounds") == [(2,)]
    ((accuracies,),) = query(folder, "SELECT count(DISTINCT round) FROM evaluations")
    assert accuracies == 3


def test_late_results_of_a_method_with_stages_are_refused(go: Start) -> None:
    with pytest.raises(
        BadInput, match=r"fedhenn goes through 2 stages a round, and a late result .*: set late to drop"
    ):
        go(f"algorithms=[{ALGORITHMS[GRAMS]}]", f"policies=[{POLICIES['deadline']}]", "data.public=8")


def test_a_deadline_that_no_client_can_meet_is_refused_with_the_shortest_possible(go: Start, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"deadline_s is 0\.001.*fastest client, 00\d \(.*\), needs (\S+) s") as refused:
        go("policies=[{kind: deadline, deadline_s: 0.001}]")
    assert not (tmp_path / "study").exists()
    found = re.search(r"needs (\S+) s", str(refused.value))
    assert found is not None
    folder = go(f"policies=[{{kind: deadline, deadline_s: {3 * float(found[1])}}}]", name="possible")
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome = 'ok'")[0][0] > 0


@pytest.mark.parametrize("partial", [False, True])
def test_partial_work_fits_the_deadline_and_other_tasks_are_complete(go: Start, tmp_path: Path, partial: bool) -> None:
    fleet = tmp_path / "two.yaml"
    fleet.write_text(
        "title: a fast one and a slow one\nmembers:\n"
        "  - {device: raspberry-pi-4b-4gb, count: 1, override: {cpu.fp32_gflops: 0.02}}\n"
        "  - {device: raspberry-pi-4b-4gb, count: 1, override: {cpu.fp32_gflops: 0.005}}\n"
    )
    sets = (f"fleet={fleet}", "training.max_steps=8", "rounds=1")
    whole = query(go(*sets, name="whole"), "SELECT plan_s, uploaded_s FROM tasks ORDER BY client")
    limit_s = whole[1][1] - 0.45 * whole[1][0]  # the slow one can do half of it, and not one step more
    folder = go(*sets, f"policies=[{{kind: deadline, deadline_s: {limit_s}, partial: {str(partial).lower()}}}]")
    rows = query(folder, "SELECT outcome, steps, plan_s, plan_flops FROM tasks JOIN clients USING (client)")
    assert rows[0][:2] == ("ok", 8)
    assert rows[1][:2] == (("ok", 4) if partial else ("late", None))
    assert rows[1][2] == pytest.approx(whole[1][0] * (0.5 if partial else 1.0))


def test_partial_work_reckons_with_the_trace_of_the_link(go: Start, tmp_path: Path) -> None:
    """Over its trace the model takes seconds, over the link of its profile next to nothing."""
    fleet = tmp_path / "one.yaml"
    fleet.write_text(
        "title: a slow one\nmembers:\n  - {device: raspberry-pi-4b-4gb, count: 1, override: {cpu.fp32_gflops: 0.005}}\n"
    )
    (tmp_path / "slow").write_text("0\t0.5\n1000\t0.5\n")
    sets = (f"fleet={fleet}", "training.max_steps=8", "rounds=1", f"availability.bandwidth={tmp_path / 'slow'}")
    ((plan_s, end_s),) = query(go(*sets, name="whole"), "SELECT plan_s, uploaded_s FROM tasks")
    deadline_s = end_s - 0.4 * plan_s  # 4.8 steps fit: what jitter and losses took is less than a step
    folder = go(*sets, f"policies=[{{kind: deadline, deadline_s: {deadline_s}, partial: true}}]")
    assert query(folder, "SELECT outcome, steps FROM tasks") == [("ok", 4)]


def test_a_stream_merges_all_that_its_rounds_ask_for_however_slow_the_server_is(go: Start, tmp_path: Path) -> None:
    server = tmp_path / "slow.yaml"
    server.write_text(
        "title: a slow server\ntrains_on: cpu\ncpu: {description: x, cores: 1, fp32_gflops: 0.00001}\n"
        "memory: {installed_mib: 1000, visible_mib: 900, available_mib: 800, bandwidth_gb_s_measured: 2}\n"
        "link: ethernet_1g\n"
    )
    folder = go(f"server.device={server}", "policies=[{kind: async}]")
    assert query(folder, "SELECT count(*), max(round) FROM rounds") == [(16, 2)]
    assert query(folder, "SELECT count(*) FROM evaluations WHERE version = 16")[0][0] > 0


def test_a_merge_that_ends_several_rounds_is_evaluated_as_the_last_of_them(go: Start) -> None:
    policy = "policies=[{kind: buffered, buffer: 8, concurrency: 8}]"
    folder = go(policy, "participation.ratio=0.25", "rounds=8", "evaluation.every=3")
    # eight results are four rounds of two: the third ends with the first merge, the sixth and the last with the second
    assert query(folder, "SELECT DISTINCT version, round FROM evaluations") == [(0, 0), (1, 4), (2, 8)]


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_the_final_state_is_evaluated_when_time_ends_the_run(go: Start, policy: str) -> None:
    sets = (f"policies=[{{kind: {policy}}}]", "evaluation.every=10")
    ends = query(go(*sets, name="whole"), "SELECT device_end_s FROM rounds ORDER BY version")
    limit_s = 1.2 * ends[0][0] if policy == "sync" else ends[10][0]  # in the second round
    folder = go(*sets, f"device_time_limit_s={limit_s}", name="cut")
    last = query(folder, "SELECT max(version), round, device_end_s FROM rounds")
    assert last[0][1] == (1 if policy == "sync" else 2)
    assert query(folder, "SELECT DISTINCT version, round, device_s FROM evaluations") == [(0, 0, 0.0), *last]


def spoil(folder: Path, task: int, outcome: str) -> None:
    """Have the records of a run say that the process of a task failed: a replay takes that over."""
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("UPDATE tasks SET outcome = ?, detail = 'made up' WHERE task = ?", (outcome, task))


@pytest.mark.parametrize(("policy", "needed"), [("{kind: buffered, buffer: 8}", 8), ("{kind: sync}", 1)])
def test_a_run_ends_when_too_few_clients_are_left_for_a_merge(
    go: Start, tmp_path: Path, policy: str, needed: int
) -> None:
    """Clients come and leave for ever, so that the timeline never ends by itself."""

    class EndIt(Observer):
        left = 500

        def tick(self) -> None:
            self.left -= 1
            assert self.left, "it goes on for ever"

    trace = stays(tmp_path, *((client, 0, 999) for client in range(7)), (7, 0, 1000))
    sets = ("model.assign=[resnet10]", "rounds=1", f"policies=[{policy}]", trace)  # what is assigned never steps down
    recorded = go(*sets, name="recorded")
    for task in range(9 - needed):
        spoil(recorded, task, "oom")
    with pytest.raises(FleetbedError, match=rf"take part: {needed - 1}, needed for a merge: {needed};"):
        go(*sets, f"timing={{source: replay, replay: {recorded}}}", name="replayed", observer=EndIt())


def test_the_smaller_model_of_a_client_that_steps_down_is_evaluated_and_stored(go: Start) -> None:
    sets = (f"algorithms=[{ALGORITHMS['fedhe']}]",)
    recorded = go(*sets, name="recorded")
    ((task, client),) = query(
        recorded, "SELECT task, client FROM tasks WHERE round = 1 AND variant = 'resnet14' ORDER BY task LIMIT 1"
    )
    spoil(recorded, task, "oom")
    folder = go(*sets, f"timing={{source: replay, replay: {recorded}}}", name="replayed")
    mine = f"FROM evaluations WHERE client = {client} ORDER BY version"
    assert query(folder, f"SELECT variant {mine}") == [("resnet14",), ("resnet10",), ("resnet10",)]
    stored = load_bundle(folder / "models" / f"client-{client:03d}.safetensors")
    assert stored.values["variant"] == "resnet10"
    (kept,) = (folder / "state" / f"client-{client:03d}").glob("task-*")
    assert stored.tensors.keys() == load_bundle(kept).under("model/").keys()


def stays(folder: Path, *lines: tuple[int, float, float]) -> str:
    path = folder / "stays.tsv"
    path.write_text("".join(f"{client}\t{start}\t{stop}\n" for client, start, stop in lines))
    return f"availability={{kind: trace, trace: {path}}}"


def test_a_client_that_leaves_is_an_outcome_and_the_round_goes_on(go: Start, tmp_path: Path) -> None:
    trace = stays(tmp_path, (0, 0, 0.01), *((client, 0, 1000) for client in range(1, 8)))
    folder = go(trace, "participation.selection=available")
    assert query(folder, "SELECT task, client, outcome, detail, round FROM tasks WHERE outcome != 'ok'") == [
        (0, 0, "offline", "it left before its result had arrived", 1)
    ]
    ((ended_s, down, joules),) = query(folder, "SELECT ended_s, bytes_down, joules FROM tasks WHERE task = 0")
    same = "variant = (SELECT variant FROM tasks WHERE task = 0) AND outcome = 'ok'"
    ((whole,),) = query(folder, f"SELECT DISTINCT bytes_down FROM tasks WHERE {same}")
    assert ended_s == 0.01
    assert 0 < down < whole
    assert joules > 0
    assert query(folder, "SELECT merged FROM rounds") == [(7,), (7,)]


def test_uniform_selection_invites_absent_clients(go: Start, tmp_path: Path) -> None:
    trace = stays(
        tmp_path, *((client, 900, 1000) for client in range(4)), *((client, 0, 1000) for client in range(4, 8))
    )
    folder = go(trace)
    rows = query(folder, "SELECT client, detail, plan_s, flops, bytes_down FROM tasks WHERE outcome = 'offline'")
    assert rows == [(client, "it was away when it was invited", 0, 0, 0) for client in (*range(4), *range(4))]
    assert query(folder, "SELECT merged FROM rounds") == [(4,), (4,)]


def test_without_available_clients_the_timeline_advances_to_the_next_arrival(go: Start, tmp_path: Path) -> None:
    trace = stays(tmp_path, *((client, 500 + client / 100, 600) for client in range(8)))
    for policy, concurrency in (("sync", 1), ("async", 8)):
        folder = go(trace, f"policies=[{{kind: {policy}}}]", "rounds=1", name=policy)
        starts = query(folder, "SELECT client, min(dispatched_s) FROM tasks GROUP BY client ORDER BY client")
        assert starts[:concurrency] == [(client, 500 + client / 100) for client in range(concurrency)]


def test_stays_that_are_too_short_for_a_task_end_the_run(go: Start, tmp_path: Path) -> None:
    trace = stays(tmp_path, *((client, 0, 0.002) for client in range(7)), (7, 1.0, 1.002))
    with pytest.raises(FleetbedError, match=r"\d+ tasks failed in a row"):
        go(trace, "policies=[{kind: async}]")


@pytest.mark.parametrize(
    "sets",
    [
        ("availability={kind: on-off, mean_on_s: 1, mean_off_s: 1}", "policies=[{kind: async}]"),
        pytest.param(
            (
                "availability={kind: charging, battery_wh: 1.0e-3, charge_w: 0.01, day_s: 1}",
                "policies=[{kind: sync}]",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["on-off", "charging"],
)
def test_coming_and_going_survives_an_interruption(go: Start, tmp_path: Path, sets: tuple[str, ...]) -> None:
    sets = (*sets, "rounds=4")
    whole = go(*sets, name="whole")
    assert query(whole, "SELECT count(*) FROM tasks WHERE outcome = 'offline'")[0][0] > 0
    with pytest.raises(KeyboardInterrupt):
        go(*sets, name="stopped", observer=StopAfter(60, KeyboardInterrupt))
    (resumed,) = resume_study(tmp_path / "stopped", Observer())
    assert results(resumed) == results(whole)


def test_a_link_is_as_fast_as_its_trace(go: Start, tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("0\t0.5\n1000\t0.5\n")
    folder = go(f"availability.bandwidth={tmp_path / 'slow'}", "rounds=1")
    # nothing else limits it: the time is that of the bits, and half a round trip with its jitter
    for seconds, size in query(folder, "SELECT uploaded_s - compute_end_s, bytes_up FROM tasks"):
        assert 8 * size / 0.5e6 < seconds < 8 * size / 0.5e6 + 1.0


@pytest.mark.slow
def test_late_tasks_are_charged_up_to_their_cut_off(go: Start, tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("0\t0.5\n1000\t0.5\n")
    sets = (f"availability.bandwidth={tmp_path / 'slow'}", "rounds=3", "training.max_steps=8")
    whole = go(*sets, name="whole")
    ends = [end for (end,) in query(whole, "SELECT uploaded_s FROM tasks WHERE round = 1 ORDER BY uploaded_s")]
    deadline_s = (ends[3] + ends[4]) / 2
    policy = f"policies=[{{kind: deadline, deadline_s: {deadline_s}}}]"
    cut = go(*sets, policy, name="cut")
    sizes = dict(query(whole, "SELECT variant, max(bytes_up) FROM tasks GROUP BY variant"))
    late = query(cut, "SELECT variant, bytes_up, ended_s - compute_end_s FROM tasks WHERE outcome = 'late'")
    assert len(late) >= 6
    for variant, size, seconds in late:
        assert size <= min(sizes[variant], 0.5e6 * seconds / 8)
        # a few segments are sent twice, and the last moments may be latency alone
        assert size == sizes[variant] or size > 0.9 * 0.5e6 * seconds / 8 - 1
    assert sum(size < sizes[variant] for variant, size, _ in late) >= 3
    costs = "SELECT sum(bytes_up), sum(joules) FROM tasks"
    assert all(less < more for less, more in zip(query(cut, costs)[0], query(whole, costs)[0], strict=True))

    with pytest.raises(KeyboardInterrupt):
        go(*sets, policy, name="stopped", observer=StopAfter(40, KeyboardInterrupt))
    (resumed,) = resume_study(tmp_path / "stopped", Observer())
    assert results(resumed) == results(cut)


@pytest.mark.parametrize("policy", ["{kind: sync}", "{kind: async, concurrency: 3}"])
def test_a_client_waits_from_the_end_of_its_task_to_the_next_dispatch(go: Start, policy: str) -> None:
    folder = go(f"policies=[{policy}]", "rounds=3")
    free_since = dict.fromkeys(range(8), 0.0)
    waits = 0
    for client, dispatched_s, ended_s, waited_s in query(
        folder, "SELECT client, dispatched_s, ended_s, waited_s FROM tasks ORDER BY task"
    ):
        assert waited_s == dispatched_s - free_since[client]
        free_since[client] = ended_s
        waits += waited_s > 0
    assert waits > 8


def test_an_absent_client_has_no_waiting_time(go: Start, tmp_path: Path) -> None:
    trace = stays(tmp_path, *((client, 500, 600) for client in range(8)))
    folder = go(trace, "rounds=1", "participation.selection=available")
    assert query(folder, "SELECT dispatched_s, waited_s FROM tasks") == [(500.0, 0.0)]


def test_a_link_that_is_down_for_a_while_stalls_and_goes_on(go: Start, tmp_path: Path) -> None:
    plain = go("rounds=1", name="plain")
    (tmp_path / "gaps").write_text("0\t0\n20\t1000\n20.5\t0\n60\t1")
    folder = go(f"availability.bandwidth={tmp_path / 'gaps'}", "rounds=1", name="stalled")
    end = "SELECT max(uploaded_s) FROM tasks"
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome = 'ok'") == [(8,)]
    assert query(folder, end)[0][0] > query(plain, end)[0][0] + 10
