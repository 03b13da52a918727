"""Measures what it costs to place runs on the nodes of a Ray cluster on this machine.

    python tests/benchmarks/placed_runs.py [--repeats 3]

One run is carried out alternately by `fleetbed run` alone and with `--on ray` on a cluster that is up already; then a
study of 8 runs with `--jobs 1` and on two nodes of one core each. The hashes are over all tasks, rounds, evaluations
and final models. Ray's own processes share the machine with the runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from same_runs import results
from small_runs import TINIER

COMMAND = [sys.executable, "-m", "fleetbed.cli.main", "run", "demo"]
SETS = (*TINIER, "processes=inline", "rounds=5")
ALGORITHMS = "algorithms=[{name: heteroavg}, {name: fedprox}]"
STORE_BYTES = 80 << 20


def carry_out(out: Path, *arguments: str, sets: tuple[str, ...]) -> float:
    """Run the command; return how long it took."""
    options = [part for each in sets for part in ("--set", each)]
    began_s = time.monotonic()
    subprocess.run([*COMMAND, *options, "--out", str(out), *arguments], check=True, capture_output=True)
    return time.monotonic() - began_s


def digests(study: Path) -> dict[str, str]:
    return {
        run.name: hashlib.sha256(repr(results(run)).encode()).hexdigest()[:12]
        for run in sorted(study.iterdir())
        if (run / "run.sqlite").exists()
    }


def cpu_s() -> float:
    """CPU seconds of Ray's own processes so far, without those of its workers."""
    total = 0.0
    for each in psutil.process_iter(["name", "cmdline", "cpu_times"]):
        line = " ".join(each.info["cmdline"] or ())
        if each.info["name"] in ("raylet", "gcs_server") or "/ray/" in line or "ray::Dashboard" in line:
            total += each.info["cpu_times"].user + each.info["cpu_times"].system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    folder = Path(tempfile.mkdtemp(prefix="fb-", dir="/tmp"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    from ray.cluster_utils import Cluster  # reads the environment

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        placed = ("--on", "ray", "--address", cluster.address)
        carry_out(folder / "warm", *placed, sets=(*SETS, "seeds=[1]"))
        found: dict[str, list[float]] = {"here": [], "placed": []}
        for repeat in range(repeats):
            found["here"].append(carry_out(folder / f"here{repeat}", sets=(*SETS, "seeds=[1]")))
            found["placed"].append(carry_out(folder / f"placed{repeat}", *placed, sets=(*SETS, "seeds=[1]")))
        for name, times in found.items():
            print(f"one run, {name}: median {statistics.median(times):.2f} s, {[round(each, 2) for each in times]}")
        extra_s = statistics.median(found["placed"]) - statistics.median(found["here"])
        print(f"overhead of a placed run: {extra_s:.2f} s")
        study = (*SETS, ALGORITHMS, "seeds=[1, 2, 3, 4]", "rounds=20")
        one_s = carry_out(folder / "jobs1", sets=study)
        before_s = cpu_s()
        two_s = carry_out(folder / "ray2", *placed, sets=study)
        print(f"8 runs: --jobs 1 {one_s:.1f} s, on two nodes {two_s:.1f} s, Ray's CPU {cpu_s() - before_s:.1f} s")
        here, there = digests(folder / "jobs1"), digests(folder / "ray2")
        for name in here:
            print(
                f"  {name}: {here[name]} {there.get(name)} {'equal' if here[name] == there.get(name) else 'DIFFERENT'}"
            )
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
