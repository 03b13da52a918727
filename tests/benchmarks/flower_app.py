"""One unmodified Flower app by `fleetbed flower`, by Flower's own simulation, and bare; all in one run.

    python tests/benchmarks/flower_app.py --flower DIR [--rounds 10] [--repetitions 3]

The app is tests/flower/apps/fashion_torch: the network of Flower's quickstart-pytorch, ten clients, 96 samples for
training and 24 for evaluation each, five of ten evaluate. One thread per process, on all cores.

bare      as many processes as cores, which stay and have imported the app; each calls the ClientApp for its part of the
          clients, with a message in memory; no transfer, no strategy, no record
fleetbed  `fleetbed flower`: a process per client, limits on memory, records
Flower    its simulation on Ray, one CPU per client, by `run_simulation`: `flwr run` would first build the app and
          send it to a SuperLink. Its run config is given to the app by a wrapper, because `run_simulation` has none

A round is from its start to that of the next; the first is left out. The whole command is from its start to its end;
fleetbed has measured the host before. They take turns in each repetition; the table has medians and ranges over these.
With --flower Flower is installed into that folder, unless it is there, and borrows the rest from this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from round_cost import install_flower
from round_setting import FLEET, spread

HERE = Path(__file__).parent.absolute()
APP = HERE.parent / "flower" / "apps" / "fashion_torch"
CLIENTS, SAMPLES = 10, 96
Found = tuple[float, float]  # mean seconds of a round, and seconds of the whole command


def timed(command: list[str | Path]) -> tuple[str, float]:
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(APP)))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout, time.perf_counter() - start


def config(rounds: int) -> dict[str, int | bool]:
    return {"num-server-rounds": rounds, "samples": SAMPLES, "server-evaluates": False}


def part(python: Path, name: str, rounds: int) -> Found:
    """Run a function of flower_app_parts.py, which prints the seconds of each round."""
    asked: list[str | Path] = [python, "-c", f"import flower_app_parts; flower_app_parts.{name}()"]
    said, whole_s = timed([*asked, APP, str(CLIENTS), json.dumps(config(rounds))])
    return statistics.mean(json.loads(said.splitlines()[-1])[1:]), whole_s


def ours(python: Path, fleet: Path, rounds: int, folder: Path) -> Found:
    out = folder / "out"
    sets = [part for key, value in config(rounds).items() for part in ("--set", f"{key}={json.dumps(value)}")]
    _, whole_s = timed([python, "-m", "fleetbed.cli.main", "flower", APP, "--fleet", fleet, "--out", out, *sets])
    (records,) = out.rglob("run.sqlite")
    with sqlite3.connect(records) as db:
        assert db.execute("SELECT count(*) FROM tasks WHERE outcome != 'ok'").fetchone() == (0,)
        ends = [end for (end,) in db.execute("SELECT max(host_end_s) FROM rounds GROUP BY round ORDER BY round")]
    shutil.rmtree(out)
    return statistics.mean(later - earlier for earlier, later in pairwise(ends)), whole_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, metavar="DIR", required=True, help="Flower's environment")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    asked = parser.parse_args()
    python = install_flower(asked.flower.absolute())
    if python is None:
        raise SystemExit(1)
    found: dict[str, list[Found]] = {"bare": [], "fleetbed": [], "Flower": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = folder / "ten.yaml"
        fleet.write_text(FLEET.format(members=f"  - {{device: raspberry-pi-5-8gb, count: {CLIENTS}}}"))
        ours(python, fleet, 2, folder)  # measures the host, once for all
        for _ in range(asked.repetitions):
            found["bare"].append(part(python, "bare", asked.rounds))
            found["fleetbed"].append(ours(python, fleet, asked.rounds, folder))
            found["Flower"].append(part(python, "simulation", asked.rounds))
    print("| | s/round | over bare | over fleetbed | whole s | over fleetbed |\n|---|---|---|---|---|---|")
    for who, pairs in found.items():

        def over(other: str, place: int, of: list[Found] = pairs) -> str:
            return spread([one[place] / base[place] for one, base in zip(of, found[other], strict=True)])

        seconds = [spread([pair[place] for pair in pairs]) for place in (0, 1)]
        whole = "- | -" if who == "bare" else f"{seconds[1]} | {over('fleetbed', 1)}"
        print(f"| {who} | {seconds[0]} | {over('bare', 0)} | {over('fleetbed', 0)} | {whole} |")


if __name__ == "__main__":
    main()
