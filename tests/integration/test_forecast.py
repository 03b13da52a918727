"""A dry run predicts the run: device time, tasks and lost work; and gives advice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from observers import Listener
from small_runs import FOUR, OWN_MODEL, TINIER, query

from fleetbed.emulator.algorithms import names
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.forecast import Forecast, forecast, total
from fleetbed.emulator.run.study import start_study
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment

Both = Callable[..., tuple[Forecast, Path]]
#: those whose defaults are too large here, and settings whose messages or work change on the way
ALGORITHMS = {
    "fedet": "{name: fedet, params: {public: 8, server_steps: 2, server_batch: 4}}",
    "fedgen": "{name: fedgen, params: {server_steps: 2}}",
    "fedgkt": "{name: fedgkt, params: {server_epochs: 1}}",
    "fedhe": "{name: fedhe, params: {batch: 4}}",
    "fedhenn": "{name: fedhenn, params: {rad: 8}}",
    "fedhenn, all": "{name: fedhenn, params: {rad: 8, kbar_over: all}}",
    "fedhenn, grams by clients": "{name: fedhenn, params: {rad: 8, client_side_gram: true}}",
    "fedhenn, once an epoch": "{name: fedhenn, params: {rad: 8, rad_every: epoch}}",
    "fedhenn_homo": "{name: fedhenn_homo, params: {rad: 8}, variant: resnet10}",
    "fedmd": "{name: fedmd, params: {public: 8, match_batch: 4}}",
    "fedtgp": "{name: fedtgp, params: {server_epochs: 2}}",
    "fedin v1": "{name: fedin, params: {version: v1}}",
    "fedin, apart": "{name: fedin, params: {aggregation: same-architecture}}",
    "inco over fedin": "{name: inco, params: {base: fedin}}",
}
SHIPPED = [name for name, where in names().items() if not where.startswith("from ")]
QUICK = {"fedin"}


@pytest.fixture
def both(tmp_path: Path) -> Both:
    """The forecast of a run, and the run."""

    def go(*sets: str, observer: Observer | None = None) -> tuple[Forecast, Path]:
        settings = (*TINIER, "processes=inline", "data.public=8", "rounds=3", *sets)
        experiment = load_experiment("demo", (), settings)
        (config,) = runs(experiment)
        told = forecast(config, search=(), observer=Observer())
        number = len(list(tmp_path.iterdir()))
        (folder,) = start_study(
            experiment, tmp_path / f"study-{number}", search=(), command="", observer=observer or Observer()
        )
        return told, folder

    return go


def lasted_s(folder: Path) -> float:
    ((end_s,),) = query(folder, "SELECT max(device_end_s) FROM rounds")
    return float(end_s)


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted({*SHIPPED, *ALGORITHMS})],
)
def test_the_forecast_follows_every_method_over_its_rounds(both: Both, method: str) -> None:
    algorithm = ALGORITHMS.get(method, f"{{name: {method}}}")
    told, folder = both(*FOUR, f"algorithms=[{algorithm}]", *OWN_MODEL.get(method, ()))
    assert told.device_s == pytest.approx(lasted_s(folder), rel=0.01)
    assert query(folder, "SELECT count(*) FROM tasks") == [(told.tasks,)]
    assert told.host_s > 0
    assert told.warnings == []


@pytest.mark.parametrize("policy", ["{kind: async, concurrency: 3}", "{kind: over-select, invite: 6, take: 4}"])
def test_the_forecast_follows_other_policies(both: Both, policy: str) -> None:
    told, folder = both("algorithms=[{name: fedin}]", f"policies=[{policy}]")
    assert told.device_s == pytest.approx(lasted_s(folder), rel=0.01)
    assert query(folder, "SELECT count(*) FROM tasks") == [(told.tasks,)]


FLEET = """title: fast ones and slow ones
members:
  - {device: raspberry-pi-5-8gb, count: 2, override: {cpu.fp32_gflops: 0.02}}
  - {device: raspberry-pi-4b-4gb, count: 2, override: {cpu.fp32_gflops: 0.002}}
"""


@pytest.fixture
def slow_kind(both: Both, tmp_path: Path) -> tuple[tuple[str, ...], float, float]:
    """A fleet with a slow kind, a deadline between what the fast and the slow ones need, and what these need."""
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    sets = (f"fleet={fleet}", "data.partition.kind=iid", "training.max_steps=4", "algorithms=[{name: fedin}]")
    _, folder = both(*sets)
    needed = dict(query(folder, "SELECT client, max(ended_s - dispatched_s) FROM tasks GROUP BY client"))
    return sets, (max(needed[0], needed[1]) + min(needed[2], needed[3])) / 2, max(needed.values())


@pytest.mark.slow
def test_a_deadline_that_a_kind_of_device_misses_is_reported_in_forecast_and_run(
    both: Both, slow_kind: tuple[tuple[str, ...], float, float]
) -> None:
    sets, deadline_s, needed_s = slow_kind
    heard = Listener()
    told, folder = both(*sets, f"policies=[{{kind: deadline, deadline_s: {deadline_s}}}]", observer=heard)
    (warning,) = told.warnings
    assert "6 of 6 tasks on raspberry-pi-4b-4gb (100%) would miss deadline_s" in warning
    late = query(folder, "SELECT device, count(*) FROM tasks JOIN clients USING (client) WHERE outcome = 'late'")
    assert late == [("raspberry-pi-4b-4gb", 6)]
    (said,) = [line for line in heard.said if "deadline_s" in line]
    assert said.startswith("no client on raspberry-pi-4b-4gb (2 of 4) can meet deadline_s")
    assert query(folder, "SELECT text FROM notices WHERE kind = 'deadline'") == [(said,)]
    for sentence in (warning, said):
        found = re.search(r"set deadline_s to (\S+) or more", sentence)
        assert found is not None
        assert float(found[1]) == pytest.approx(needed_s, rel=0.02)
    longer = re.search(r"set deadline_s to (\S+) or more", warning)
    assert longer is not None
    told, folder = both(*sets, f"policies=[{{kind: deadline, deadline_s: {longer[1]}}}]")
    assert told.warnings == []
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome = 'late'") == [(0,)]


@pytest.mark.slow
def test_the_budget_that_is_named_helps(both: Both, slow_kind: tuple[tuple[str, ...], float, float]) -> None:
    sets, _, needed_s = slow_kind
    policy = f"policies=[{{kind: deadline, deadline_s: {0.9 * needed_s}}}]"  # a smaller variant meets it
    told, _ = both(*sets, policy)
    found = re.search(r"set budgets\.round_s to (\S+), with which they train resnet10,", told.warnings[0])
    assert found is not None
    told, folder = both(*sets, policy, f"budgets.round_s={found[1]}")
    assert told.warnings == []
    assert query(folder, "SELECT count(*) FROM tasks WHERE outcome = 'late'") == [(0,)]


@pytest.mark.slow
def test_a_deadline_that_can_be_met_gives_no_warning(
    both: Both, slow_kind: tuple[tuple[str, ...], float, float]
) -> None:
    sets, _, needed_s = slow_kind
    heard = Listener()
    told, _ = both(*sets, f"policies=[{{kind: deadline, deadline_s: {1.1 * needed_s}}}]", observer=heard)
    assert told.warnings == []
    assert [line for line in heard.said if "deadline_s" in line] == []


def test_a_study_is_the_sum_of_its_runs() -> None:
    one = Forecast(run="a", clients=2, unfit=0, tasks=4, device_s=2.0, host_s=3.0, disk_bytes=10, warnings=[])
    together = total([one, one, one])
    assert (together.runs, together.tasks) == (3, 12)
    assert (together.device_s, together.host_s, together.disk_bytes) == (6.0, 9.0, 30)


def test_a_link_that_is_all_but_down_does_not_keep_the_forecast(both: Both, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}").write_text("0\t0.000001\n5\t0.000001\n" if number < 4 else "0\t10\n1000\t10\n")
    policy = "policies=[{kind: deadline, deadline_s: 30}]"
    told, run_folder = both("algorithms=[{name: heteroavg}]", policy, f"availability.bandwidth={folder}")
    lost = query(run_folder, "SELECT count(*) FROM tasks WHERE outcome = 'late'")[0][0]
    assert lost > 0
    assert sum(int(warning.split(": ")[1].split(" of ")[0]) for warning in told.warnings) == lost
    assert not any("set deadline_s" in warning for warning in told.warnings)


def test_a_method_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, both: Both) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("it cannot")

    monkeypatch.setattr("fleetbed.emulator.processes.task_runner.TaskRunner.train", broken)
    with pytest.raises(FleetbedError, match=r"a trial task of resnet\d+ \(train\).* failed: RuntimeError: it cannot"):
        both()
