"""A study over the nodes of a Ray cluster: the results of one machine, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import add_node, needs_ray, ray_cluster
from same_runs import results
from small_runs import FOUR, TINIER, query

from fleetbed import node_pool as node_pool_module
from fleetbed import running
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import new_study, start_study
from fleetbed.node_pool import NodePool, node_pool
from fleetbed.over_nodes import run_over_nodes
from fleetbed.profiles.errors import HostCannot
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment, search_folders

pytestmark = [pytest.mark.slow, needs_ray]
WAIT_S = 120.0
OWN = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from fleetbed.emulator.bases.averaging import Averaging, Means

VARIANTS = ("small", "large")
def build(variant, spec):
    width = 8 if variant == "small" else 16
    return nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.ReLU(), nn.Linear(width, spec.outputs))
def make(samples):
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(x, (x[:, 0] > 0).long())
def train(): return make(200)
def test(): return make(40)

class Params(Means, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gate: str

class Method(Averaging):
    '''Stops after its second merge for as long as there is no gate.'''
    params: Params
    merges = 0
    def merge(self, state, arrivals):
        self.merges += 1
        while self.merges > 2 and not Path(self.params.gate).exists():
            time.sleep(0.05)
        return super().merge(state, arrivals)
"""


class Bench:
    """An experiment of runs that stop in the middle until the gate is opened, and what they give undisturbed."""

    def __init__(self, folder: Path, cluster: Any) -> None:
        self.cluster = cluster
        self.gate = folder / "gate"
        (folder / "gated.py").write_text(OWN)
        self.file = folder / "gated.yaml"
        self.file.write_text(
            "title: gated\nfleet: demo\ndata: {name: ./gated.py, partition: {kind: iid}}\nmodel: {family: ./gated.py}\n"
            f"algorithms: [{{name: ./gated.py, params: {{gate: {self.gate}}}}}]\nseeds: [1, 2, 3]\nrounds: 5\n"
            "processes: inline\ntiming: {source: modelled}\n"
        )
        self.search = search_folders((), str(self.file))
        self.experiment = load_experiment(str(self.file), self.search, ())
        self.names = [config.name for config in runs(self.experiment)]
        self.gate.touch()
        start_study(self.experiment, folder / "here", search=self.search, command="", observer=Observer())
        self.undisturbed = {name: results(folder / "here" / name) for name in self.names}

    def results(self, study: Path) -> dict[str, Any]:
        assert sorted(path.name for path in study.iterdir()) == sorted([*self.names, "study.json", "study.lock"])
        return {name: results(study / name) for name in self.names}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def bench(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("gated"), cluster)


def wait_for(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def below(node: Any, title: str) -> list[psutil.Process]:
    """The processes of a node with this in their command line."""
    found = []
    for each in psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(each.cmdline()):
                found.append(each)
    return found


def has_begun(run: Path) -> bool:
    return (run / "state").is_dir() and any((run / "state").glob("checkpoint-*"))


def carry_out(bench: Bench, study: Path, meanwhile: Callable[[list[str]], None]) -> list[str]:
    """Carry out the study on the cluster, and do something meanwhile; return what was said."""
    said: list[str] = []
    bench.gate.unlink(missing_ok=True)
    with (
        node_pool(bench.cluster.address, bench.experiment, bench.search) as pool,
        new_study(bench.experiment, study, search=bench.search, command=""),
        ThreadPoolExecutor(1) as aside,  # nodes can be added in the main thread only
    ):
        runs_done = aside.submit(run_over_nodes, study, runs(bench.experiment), bench.search, pool, said.append)
        try:
            meanwhile(said)
        finally:
            bench.gate.touch()
        runs_done.result(WAIT_S)
    return said


def test_a_killed_node_and_one_that_joins_change_nothing_without_a_shared_folder(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all nodes of this machine see its folders
    monkeypatch.setattr(NodePool, "_ask_for_folder", lambda *_: None)
    study = tmp_path / "study"

    def lose_one(said: list[str]) -> None:
        wait_for(lambda: sum(has_begun(study / name) for name in bench.names) == 2)
        node = next(iter(bench.cluster.worker_nodes))
        psutil.Process(node.all_processes["raylet"][0].process.pid).kill()
        wait_for(lambda: any("was lost" in line for line in said))
        add_node(bench.cluster)
        wait_for(lambda: any("has joined" in line for line in said))

    said = carry_out(bench, study, lose_one)
    assert bench.results(study) == bench.undisturbed
    assert sum("continuing after merge" in line for line in said) == 1
    (notice,) = [row for name in bench.names for row in query(study / name, "SELECT kind, text FROM notices")]
    assert notice[0] == "node"
    assert "was lost" in notice[1]
    wait_for(lambda: not list(Path(tempfile.gettempdir()).glob("fleetbed-run-*")))


def test_a_killed_worker_changes_nothing_in_a_shared_folder(bench: Bench, tmp_path: Path) -> None:
    study = tmp_path / "study"

    def kill_worker(said: list[str]) -> None:
        wait_for(lambda: any(has_begun(study / name) for name in bench.names))
        actor = next(each for node in bench.cluster.worker_nodes for each in below(node, "PlacedRun"))
        actor.kill()
        wait_for(lambda: any("was lost" in line for line in said))

    carry_out(bench, study, kill_worker)
    assert bench.results(study) == bench.undisturbed


def command(bench: Bench, *arguments: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fleetbed.cli.main", "run", *map(str, arguments), "--on", "ray"]
    return subprocess.Popen([*line, "--address", bench.cluster.address], stderr=subprocess.PIPE, text=True)


def test_a_command_that_is_interrupted_or_killed_resumes(bench: Bench, tmp_path: Path) -> None:
    study, name = tmp_path / "study", bench.names[0]
    bench.gate.unlink(missing_ok=True)
    ends = []
    for how, arguments in (
        (signal.SIGINT, (bench.file, "--out", study)),
        (signal.SIGKILL, ("--resume", study)),
    ):
        with command(bench, *arguments) as driver:
            assert driver.stderr is not None
            wait_for(lambda: f"{name}: starting 8 clients" in driver.stderr.readline())
            driver.send_signal(how)
            ends.append((driver.wait(WAIT_S), driver.stderr.read()))
    assert ends[0][0] == 130
    assert f"interrupted; continue with: fleetbed run --on ray --resume {study}" in ends[0][1]
    assert ends[1][0] == -signal.SIGKILL
    bench.gate.touch()
    with command(bench, "--resume", study) as driver:
        assert driver.stderr is not None
        said = driver.stderr.read()
        assert driver.wait() == 0, said
    assert bench.results(study) == bench.undisturbed
    wait_for(lambda: not [each for node in bench.cluster.worker_nodes for each in below(node, "fleetbed")])


def short_of_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node_pool_module, "SERVER_BYTES", 1 << 60)


def another_torch(patch: pytest.MonkeyPatch) -> None:
    original = metadata.version
    patch.setattr(metadata, "version", lambda name: "0.1" if name == "torch" else original(name))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (short_of_memory, r"^a run of this study needs a node with 1 free core and \d+\.0 GB of memory, but the Ray"),
        (another_torch, r"^--address \S+: on node .+ torch has version .+, but here it is 0\.1; install the same"),
    ],
    ids=["memory", "torch"],
)
def test_nodes_that_do_not_fit_are_refused_before_anything_starts(
    change: Callable[[pytest.MonkeyPatch], None],
    why: str,
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch)
    with pytest.raises(HostCannot, match=why):
        running.run(bench.file, out=tmp_path / "study", on="ray", address=bench.cluster.address)
    assert not (tmp_path / "study").exists()


def test_an_enforced_run_has_a_node_to_itself_and_its_own_calibration(cluster: Any, tmp_path: Path) -> None:
    sets = (*TINIER, *FOUR, "timing.source=enforced", "rounds=1", "training.max_steps=1")
    experiment = load_experiment("demo", (), sets)
    (config,) = runs(experiment)
    said: list[tuple[str, int]] = []  # with the cores that were free on both nodes
    with (
        node_pool(cluster.address, experiment, ()) as pool,
        new_study(experiment, tmp_path / "study", search=(), command="") as study,
    ):
        places = pool.places.values()
        run_over_nodes(study, [config], (), pool, lambda text: said.append((text, sum(one.cores for one in places))))
    assert {cores for text, cores in said if "starting 4 clients" in text} == {1}
    meta = dict(query(tmp_path / "study" / config.name, "SELECT key, value FROM meta"))
    assert json.loads(meta["calibration"])["rate"]["alone_gflops"] > 0
    assert {knob["knob"] for knob in json.loads(meta["host_can"])} >= {"memory", "cpu"}


def test_a_cluster_that_does_not_answer_is_refused_before_anything_starts(bench: Bench, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "fleetbed.cli.main", "run", str(bench.file), "--out", str(tmp_path / "study")]
    done = subprocess.run(
        [*line, "--on", "ray", "--address", "127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "--address 127.0.0.1:1: no Ray cluster answers there" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "study").exists()
