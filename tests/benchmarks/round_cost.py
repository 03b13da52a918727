"""What a round costs beside the training in it: fleetbed against two bare processes and against Flower.

    python tests/benchmarks/round_cost.py [--samples 96 16] [--rounds 20] [--repetitions 3] [--flower DIR]

A hundred clients, ten a round, ResNet10 at 3x32x32, FedAvg, SGD, batch 16, one thread per process, on all cores.

- *bare*: as many processes as cores, which stay; each loads the same weights into its one model and trains, client by
  client, by a loop written by hand with torch's fused SGD. No message, no merge, no record, no checkpoint.
- *fleetbed*: `fleetbed run` with a process per client, records, a checkpoint after every round and the caps on memory.
  A round is from the end of the one before it to its own end; the first one is left out, later ones in which a client
  trains for the first time are not.
- *Flower*: its simulation on Ray, one CPU per client, the clients' code as that of the bare processes; measured
  between the starts of rounds. With `--flower` it is installed into that folder, once; torch is borrowed from here.

The three take turns in each repetition. The table has medians and ranges over the repetitions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from round_setting import bare, spread, write_experiment


@dataclass
class Figures:
    bare_s: list[float] = field(default_factory=list)
    ours_s: list[float] = field(default_factory=list)
    ours_whole_s: list[float] = field(default_factory=list)


def ours(experiment: Path, folder: Path) -> tuple[float, float]:
    """Mean seconds of a round, and of the whole command."""
    out = folder / "out"
    command = Path(sys.executable).with_name("fleetbed")
    start = time.perf_counter()
    subprocess.run(
        [command, "run", experiment, "--profiles", folder, "--out", out], check=True, stdout=subprocess.DEVNULL
    )
    whole_s = time.perf_counter() - start
    ((found),) = out.rglob("run.sqlite")
    with sqlite3.connect(found) as db:
        ends = [end for (end,) in db.execute("SELECT host_end_s FROM rounds ORDER BY version")]
    shutil.rmtree(out)
    return (ends[-1] - ends[0]) / (len(ends) - 1), whole_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[96, 16], help="samples per client")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--source", default="modelled", choices=["modelled", "calibrated"], help="timing.source")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print("| samples per client | bare s/round | fleetbed s/round | fleetbed / bare |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for samples in asked.samples:
            experiment = write_experiment(folder, samples=samples, rounds=asked.rounds, source=asked.source)
            data = folder / f"noise-100x{samples}.npz"
            figures = Figures()
            for _ in range(asked.repetitions):
                figures.bare_s.append(statistics.mean(bare(data, samples, asked.rounds, cores)))
                round_s, whole_s = ours(experiment, folder)
                figures.ours_s.append(round_s)
                figures.ours_whole_s.append(whole_s)
            ratios = [mine / theirs for mine, theirs in zip(figures.ours_s, figures.bare_s, strict=True)]
            print(f"| {samples} | {spread(figures.bare_s)} | {spread(figures.ours_s)} | {spread(ratios)} |", flush=True)
            print("whole", spread(figures.ours_whole_s))


if __name__ == "__main__":
    main()
