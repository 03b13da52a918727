"""How busy the cores are while rounds go on, and with what: CPU time of clients, broker and zygote over wall time.

    python tests/benchmarks/core_use.py [--source modelled enforced] [--samples 96] [--rounds 12]

Ten of a hundred clients a round, ResNet10 at 3x32x32, as in round_cost.py. Measured from the end of the second round
to the end of the last but one; `enforced` goes as fast as tasks stay on time; by how much they did not stands beside:
the 95th percentile and the largest of measured over planned, over all tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from round_setting import spread, write_experiment

POLL_S = 0.02
TICKS = os.sysconf("SC_CLK_TCK")
ROLES = ("clients", "services", "zygote", "broker")


def cpu_s(broker: int) -> dict[str, float]:
    """CPU seconds of the run's processes until now, by role."""
    found = dict.fromkeys(ROLES, 0.0)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            title = (entry / "cmdline").read_text()
            if entry.name == str(broker):
                role = "broker"
            elif title.startswith("fleetbed: client"):
                role = "clients"
            elif title.startswith("fleetbed: zygote"):
                role = "zygote"
            elif title.startswith("fleetbed: service"):
                role = "services"
            else:
                continue
            stat = (entry / "stat").read_text()
            fields = stat[stat.rindex(")") + 2 :].split()
            found[role] += (int(fields[11]) + int(fields[12])) / TICKS
    return found


def rounds_done(out: Path) -> int:
    for path in out.rglob("run.sqlite"):
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(path)) as db:
            return int(db.execute("SELECT count(*) FROM rounds").fetchone()[0])
    return 0


def overruns(out: Path) -> list[float]:
    """Measured over planned, of the tasks of a run that were paced."""
    (path,) = out.rglob("run.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db:
        return [overrun for (overrun,) in db.execute("SELECT overrun FROM tasks WHERE overrun IS NOT NULL")]


def measure(experiment: Path, folder: Path, rounds: int) -> tuple[float, dict[str, float], list[float]]:
    """Wall seconds and CPU seconds by role, of one round; and how late the tasks were."""
    out = folder / "out"
    command = Path(sys.executable).with_name("fleetbed")
    run = subprocess.Popen(
        [command, "run", experiment, "--profiles", folder, "--out", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first = None
    while run.poll() is None:
        done = rounds_done(out)
        if first is None and done >= 2:
            first = (done, time.monotonic(), cpu_s(run.pid))
        if first is not None and done >= rounds - 1:
            wall_s, after, counted = time.monotonic() - first[1], cpu_s(run.pid), done - first[0]
            run.wait()
            late = overruns(out)
            shutil.rmtree(out)
            return wall_s / counted, {role: (after[role] - first[2][role]) / counted for role in ROLES}, late
        time.sleep(POLL_S)
    raise SystemExit(f"the run ended by exit status {run.returncode} before it could be measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", default=["modelled", "enforced"], help="timing.source")
    parser.add_argument("--samples", type=int, default=96, help="samples per client")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--devices", nargs="+", default=["raspberry-pi-5-8gb"], help="their profiles, in equal parts")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    roles = " | ".join(f"{role} CPU s/round" for role in ROLES)
    print(f"| timing | s/round | {roles} | clients' part | all | overrun, 95 % | largest |")
    print("|---|" + "---|" * (len(ROLES) + 5))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in asked.source:
            experiment = write_experiment(
                folder,
                samples=asked.samples,
                rounds=asked.rounds,
                source=source,
                per_round=asked.per_round,
                devices=asked.devices,
            )
            found = [measure(experiment, folder, asked.rounds) for _ in range(asked.repetitions)]
            walls = [wall_s for wall_s, _, _ in found]
            by_role = [f"{statistics.median(used[role] for _, used, _ in found):.3f}" for role in ROLES]
            clients = [used["clients"] / (wall_s * cores) for wall_s, used, _ in found]
            everything = [sum(used.values()) / (wall_s * cores) for wall_s, used, _ in found]
            cells = [source, spread(walls), *by_role, spread(clients), spread(everything)]
            if all(late for _, _, late in found):
                cells += [spread([statistics.quantiles(late, n=20)[-1] for _, _, late in found])]
                cells += [spread([max(late) for _, _, late in found])]
            else:
                cells += ["-", "-"]
            print(f"| {' | '.join(cells)} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
