"""A study over the nodes of a Ray cluster: the results of one machine, whatever is killed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from same_runs import results

from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import new_study, start_study
from fleetbed.node_pool import node_pool
from fleetbed.over_nodes import run_over_nodes
from fleetbed.profiles.experiment import runs
from fleetbed.profiles.resolve import load_experiment, search_folders

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(each.metadata["Name"] == "ray" for each in metadata.distributions()),
        reason="Ray is not installed: pip install 'fleetbed[ray]'",
    ),
]
STORE_BYTES = 80 << 20
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
    """A cluster with a head without cores and two nodes with one each."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="fb-", dir="/tmp")  # the path of a socket must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        found = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                add_node(found)
            yield found
        finally:
            found.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def bench(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("gated"), cluster)


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


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
    failed: list[BaseException] = []

    def disturb() -> None:
        try:
            meanwhile(said)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)
        finally:
            bench.gate.touch()

    bench.gate.unlink(missing_ok=True)
    with (
        node_pool(bench.cluster.address, bench.experiment, bench.search) as pool,
        new_study(bench.experiment, study, search=bench.search, command=""),
    ):
        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            run_over_nodes(study, runs(bench.experiment), bench.search, pool, said.append)
        finally:
            thread.join()
    assert not failed, (failed, said)
    return said


def test_a_killed_worker_changes_nothing_in_a_shared_folder(bench: Bench, tmp_path: Path) -> None:
    study = tmp_path / "study"

    def kill_worker(said: list[str]) -> None:
        wait_for(lambda: any(has_begun(study / name) for name in bench.names))
        actor = next(each for node in bench.cluster.worker_nodes for each in below(node, "PlacedRun"))
        actor.kill()
        wait_for(lambda: any("was lost" in line for line in said))

    carry_out(bench, study, kill_worker)
    assert bench.results(study) == bench.undisturbed


def test_a_cluster_that_does_not_answer_is_refused_before_anything_starts(bench: Bench, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "fleetbed.cli.main", "run", str(bench.file), "--out", str(tmp_path / "study")]
    done = subprocess.run(
        [*line, "--on", "ray", "--address", "127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "--address 127.0.0.1:1: no Ray cluster answers there" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "study").exists()
