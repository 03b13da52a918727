"""One fleet over the nodes of a Ray cluster: the same results as on one machine, whatever happens to the nodes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_runs import KillIt, in_third_round
from ray_cluster import add_node, needs_ray, ray_cluster
from same_runs import results
from small_runs import TINIER, query

from fleetbed.emulator.cluster.connection import connected
from fleetbed.emulator.engine.engine import Engine
from fleetbed.emulator.engine.evaluation import Evaluations
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.remote.fleet import RayFleet
from fleetbed.emulator.run import run
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment

pytestmark = [pytest.mark.slow, needs_ray]
#: every client keeps a model of its own, which is what is evaluated
SETS = (*TINIER, "algorithms=[{name: fedhe, params: {batch: 4}}]", "rounds=3", "participation.ratio=0.5")
WAIT_S = 60.0
NOTICES = "SELECT text FROM notices WHERE kind = 'node'"


class Disturbances(Observer):
    """Does each of these once, as soon as a result of its round has arrived and another has not."""

    def __init__(self, *acts: tuple[int, Callable[[RayFleet], None]]) -> None:
        self._acts = dict(acts)
        self._engine: Engine | None = None

    def start(self, engine: Engine, evaluations: Evaluations) -> None:
        self._engine = engine

    def tick(self) -> None:
        if self._engine is None:
            return
        progress, fleet = self._engine.progress, self._engine.executor
        assert isinstance(fleet, RayFleet)
        if progress.policy.round in self._acts and any(member.orders for member in fleet._pool.members.values()):
            self._acts.pop(progress.policy.round)(fleet)


def carry_out(folder: Path, *sets: str, observer: Observer | None = None) -> dict[str, Any]:
    (config,) = runs(load_experiment("demo", (), (*SETS, *sets)))
    run.start(config, folder, search=(), command="test", observer=observer or Observer())
    return results(folder)


def fact(folder: Path, key: str) -> Any:
    ((text,),) = query(folder, f"SELECT value FROM meta WHERE key = '{key}'")
    return json.loads(text)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that this process is connected to."""
    with ray_cluster() as found, connected(found.address):
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return carry_out(tmp_path_factory.mktemp("here") / "run", "processes=on-demand")


def below(node: Any, title: str) -> list[psutil.Process]:
    """The processes below a node with this in their command line."""
    found = []
    for each in raylet_of(node).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
            found += [each] if title in " ".join(each.cmdline()) else []
    return found


def raylet_of(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def at_work(cluster: Any, fleet: RayFleet) -> Any:
    """A node that has an order."""
    ids = [id_ for id_, member in fleet._pool.members.items() if member.orders]
    return next(node for node in cluster.worker_nodes if node.node_id in ids)


def test_two_nodes_give_the_bits_of_one_machine_and_nothing_is_left(
    cluster: Any, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    assert carry_out(tmp_path / "run", "processes=ray") == undisturbed
    assert query(tmp_path / "run", NOTICES) == []
    nodes = fact(tmp_path / "run", "nodes")
    assert [node["cores"] for node in nodes] == [1, 1]
    assert all(node["outcomes"] > 0 for node in nodes)
    took_part = "client IN (SELECT client FROM tasks)"
    assert query(tmp_path / "run", f"SELECT DISTINCT status FROM caps WHERE knob = 'memory' AND {took_part}") == [
        ("enforced",)
    ]
    assert list(Path(tempfile.gettempdir()).glob("fleetbed-node-*")) == []
    assert [each for node in cluster.worker_nodes for each in below(node, "fleetbed")] == []


def test_an_actor_and_a_node_that_are_killed_change_nothing(
    cluster: Any, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    lost: list[Any] = []

    def kill_actor(fleet: RayFleet) -> None:
        (actor,) = below(at_work(cluster, fleet), "RayNode")
        actor.kill()

    def kill_node(fleet: RayFleet) -> None:
        lost.append(at_work(cluster, fleet))
        raylet_of(lost[0]).kill()

    observer = Disturbances((1, kill_actor), (2, kill_node))
    assert carry_out(tmp_path / "run", "processes=ray", observer=observer) == undisturbed
    actor, node, *_ = (text for (text,) in query(tmp_path / "run", NOTICES))
    assert "starts again: The actor is dead because its worker process has died" in actor
    assert "queued again" in actor
    assert "queued again" in node
    cluster.remove_node(lost[0])


def test_a_node_that_joins_late_takes_part(cluster: Any, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    def add_one(fleet: RayFleet) -> None:
        before, until_s = len(fleet._pool.ready), time.monotonic() + WAIT_S
        add_node(cluster)
        while len(fleet._pool.ready) == before:
            assert time.monotonic() < until_s
            fleet.pump()

    assert carry_out(tmp_path / "run", "processes=ray", observer=Disturbances((1, add_one))) == undisturbed
    *_, late = fact(tmp_path / "run", "nodes")
    assert late["outcomes"] > 0
    assert query(tmp_path / "run", NOTICES) == [(f"node {late['name']} joins the run",)]


def command(*arguments: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fleetbed.cli.main", "run", *map(str, arguments)]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_command_leaves_nothing_and_resumes(
    cluster: Any, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    at, sets = ("--address", cluster.address), [part for each in (*SETS, "processes=ray") for part in ("--set", each)]
    with command("demo", *sets, "--out", tmp_path / "study", *at) as driver:
        assert driver.stderr is not None
        while "round 1/3" not in (line := driver.stderr.readline()):
            assert line, "it ended early"
        driver.send_signal(signal.SIGINT)
        said = driver.stderr.read()
        assert driver.wait(WAIT_S) == 130, said
    assert f"interrupted; continue with: fleetbed run --resume {tmp_path / 'study'}" in said
    assert list(Path(tempfile.gettempdir()).glob("fleetbed-node-*")) == []
    assert [each for node in cluster.worker_nodes for each in below(node, "fleetbed")] == []
    (config,) = runs(load_experiment("demo", (), (*SETS, "processes=ray")))
    with command("--resume", tmp_path / "study", *at) as driver:
        assert driver.stderr is not None
        said = driver.stderr.read()
        assert driver.wait(WAIT_S) == 0, said
    assert "continuing after merge" in said
    assert results(tmp_path / "study" / config.name) == undisturbed


def start_and_be_killed(address: str, folder: Path, sets: Sequence[str]) -> None:
    (config,) = runs(load_experiment("demo", (), sets))
    with connected(address):
        run.start(config, folder, search=(), command="test", observer=KillIt(in_third_round))


def test_a_killed_driver_resumes_on_the_nodes(cluster: Any, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    sets = (*SETS, "processes=ray")
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=start_and_be_killed, args=(cluster.address, tmp_path / "run", sets))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (config,) = runs(load_experiment("demo", (), sets))
    run.resume(config, tmp_path / "run", search=(), observer=Observer())
    assert results(tmp_path / "run") == undisturbed
