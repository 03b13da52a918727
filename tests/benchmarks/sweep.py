"""How busy the cores are during a whole sweep: CPU time of a command and all of its processes over wall time.

    python tests/benchmarks/sweep.py [--source modelled] [--jobs 1 2] [--seeds 4] [--rounds 8] [--repetitions 3]

Runs of ten of a hundred clients a round, ResNet10 at 3x32x32, 96 samples, from the command to its end, so with imports,
starts and evaluations.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from round_setting import spread, write_experiment


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(experiment: Path, folder: Path, jobs: int, seeds: int) -> tuple[float, float]:
    """Wall seconds, and the part of all cores that was busy."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [Path(sys.executable).with_name("fleetbed"), "run", experiment, "--profiles", folder]
        command += ["--out", Path(out) / "sweep", "--set", f"seeds={list(range(1, seeds + 1))}", "--jobs", str(jobs)]
        cpu_s, start = children_cpu_s(), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wall_s = time.perf_counter() - start
    return wall_s, (children_cpu_s() - cpu_s) / wall_s / len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="modelled", choices=["modelled", "replay"], help="timing.source")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    asked = parser.parse_args()
    print("| jobs | runs | wall s | cores busy |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        experiment = write_experiment(Path(name), samples=96, rounds=asked.rounds, source=asked.source)
        for jobs in asked.jobs:
            found = [measure(experiment, Path(name), jobs, asked.seeds) for _ in range(asked.repetitions)]
            walls, parts = zip(*found, strict=True)
            print(f"| {jobs} | {asked.seeds} | {spread(walls)} | {spread(parts)} |", flush=True)


if __name__ == "__main__":
    main()
