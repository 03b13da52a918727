"""What a round costs over Ray nodes, against the same round on one machine: seconds, and CPU seconds by who spent them.

    python tests/benchmarks/ray_rounds.py [--nodes 1 2 4] [--samples 96] [--rounds 6] [--repetitions 2] [--keep FILE]

The setting is that of `round_cost.py`: a hundred clients, ten a round, ResNet10 (19.7 MB), FedAvg, `modelled`.

here      `fleetbed run` with a resident process per client, on as many cores as there are nodes
Ray       the same with `processes: ray`, on a cluster of single-core nodes that all share this machine

A round is from the end of the one before to its own end; the first is left out. The ratio is that of the quickest
rounds, which other programs disturbed least, if there are any; medians stand beside it. CPU seconds do not count time
spent waiting for a core: those of the tasks are from the records, the head is the command itself, the nodes are their
actors, and Ray is the rest of its processes. With more nodes than cores the nodes share the cores, so there is nothing
to gain: that row shows what the nodes themselves cost. The figures are added to those of earlier runs in --keep, a JSON
file that `ray_growth.py` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from round_setting import write_experiment

STORE_BYTES = 300 << 20
WHO = ("tasks", "head", "nodes", "Ray")  # who spends CPU time
FLEETBED = Path(sys.executable).with_name("fleetbed")


class Cpu(threading.Thread):
    """Samples the CPU seconds of a command, of the actors on the nodes, and of Ray's other processes."""

    def __init__(self, command: psutil.Process, ray: list[psutil.Process]) -> None:
        super().__init__(daemon=True)
        self._command, self._ray = command, ray
        self._actors: dict[int, psutil.Process] = {}
        self._samples: list[tuple[float, float, float, float]] = []

    def run(self) -> None:
        while self._command.is_running() and self._command.status() != psutil.STATUS_ZOMBIE:
            if self._ray and len(self._samples) % 10 == 0:
                found = psutil.process_iter(["name"])  # which leaves out those that end meanwhile
                self._actors |= {each.pid: each for each in found if "RayNode" in (each.info["name"] or "")}
            groups = [self._command], self._actors.values(), self._ray
            self._samples.append((time.time(), *(sum(map(_cpu_s, group)) for group in groups)))
            time.sleep(0.1)

    def between(self, start_s: float, end_s: float) -> list[float]:
        """CPU seconds of the three groups between two times."""
        times, *groups = zip(*self._samples, strict=True)
        return [float(np.diff(np.interp([start_s, end_s], times, group))[0]) for group in groups]


def _cpu_s(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


@contextmanager
def cluster(nodes: int) -> Iterator[tuple[str, list[psutil.Process]]]:
    """A cluster of so many nodes with one core each, and a head with none; yields its address and Ray's processes."""
    folder = tempfile.mkdtemp(prefix="fb-", dir="/tmp")  # the path of a socket must be short
    os.environ |= {"TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    from ray.cluster_utils import Cluster  # reads the environment

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            found.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield found.address, psutil.Process().children(recursive=True)
    finally:
        found.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def rounds(experiment: Path, folder: Path, cores: int, *options: str, ray: list[psutil.Process]) -> dict[str, Any]:
    """Carry out a run on so many cores; returns the seconds of each round, and mean CPU seconds of a round."""
    out = folder / "out"
    command = [FLEETBED, "run", experiment, "--profiles", folder, "--out", out, *options]
    everywhere = sorted(os.sched_getaffinity(0))
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, everywhere[:cores]),
    )
    cpu = Cpu(psutil.Process(process.pid), ray)
    cpu.start()
    _, said = process.communicate()
    cpu.join()
    if process.returncode:
        raise SystemExit(said)
    (records,) = out.rglob("run.sqlite")
    with sqlite3.connect(records) as db:
        ends = [end for (end,) in db.execute("SELECT host_end_s FROM rounds ORDER BY version")]
        (tasks_s,) = db.execute("SELECT sum(cpu_s) FROM tasks WHERE round > 1").fetchone()
        ((started,),) = db.execute("SELECT value FROM meta WHERE key = 'started'").fetchall()
    shutil.rmtree(out)
    start_s, counted = datetime.fromisoformat(json.loads(started)).timestamp(), len(ends) - 1
    spent = [each / counted for each in (tasks_s, *cpu.between(start_s + ends[0], start_s + ends[-1]))]
    return {"round_s": [end - start for start, end in pairwise(ends)], "cpu_s": dict(zip(WHO, spent, strict=True))}


def row(nodes: int, found: list[dict[str, Any]]) -> str:
    here, there = ([second for each in found for second in each[key]["round_s"]] for key in ("here", "ray"))
    cells = [f"{min(here):.2f} ({statistics.median(here):.2f})", f"{min(there):.2f} ({statistics.median(there):.2f})"]
    cells += [f"{min(there) / min(here):.2f}"]
    for where, whose in (("here", WHO[:2]), ("ray", WHO)):
        cells += [f"{statistics.median(each[where]['cpu_s'][who] for each in found):.2f}" for who in whose]
    return f"| {nodes} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=96, help="samples per client")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add to the figures in this file, print them all")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    heads = ["nodes", "here: quickest round (median) s", "Ray: quickest round (median) s", "Ray/here"]
    heads += [f"here: {who} CPU s/round" for who in WHO[:2]] + [f"Ray: {who} CPU s/round" for who in WHO]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    found: list[dict[str, Any]] = []
    if asked.keep is not None and asked.keep.exists():
        found = json.loads(asked.keep.read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment = write_experiment(folder, samples=asked.samples, rounds=asked.rounds, source="modelled")
        for nodes in asked.nodes:
            for _ in range(asked.repetitions):
                here = rounds(experiment, folder, min(nodes, cores), ray=[])
                with cluster(nodes) as (address, processes):
                    there = rounds(
                        experiment, folder, cores, "--set", "processes=ray", "--address", address, ray=processes
                    )
                found.append({"nodes": nodes, "here": here, "ray": there})
                if asked.keep is not None:
                    asked.keep.write_text(json.dumps(found))
            print(row(nodes, [each for each in found if each["nodes"] == nodes]), flush=True)


if __name__ == "__main__":
    main()
