"""How long a fleet takes from the command to its first task, and what its processes hold while they wait.

    python tests/benchmarks/start_and_memory.py [--clients 100 500] [--processes resident] [--source modelled]

A small ResNet10 on the shipped data; so many clients take part in a round. One run before those that count prepares the
data and the calibration. Memory is read near the end: USS is what a client has of its own, PSS counts shared pages in
parts, so that its sum over broker, zygote, services and clients is what the whole fleet takes of the host.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from fleet_runs import MIB, Asked, Running, cpu_s, print_markdown, smaps, spread, title

IDLE_S = 0.1  # who uses next to no CPU for so long is waiting


class Figures(NamedTuple):
    start_s: float
    round_s: float
    fresh_mib: float  # the median of those who wait and have not trained yet
    trained_mib: float  # the largest of those who wait and have trained
    all_mib: float
    broker_mib: float


def measure(asked: Asked) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        run = Running(asked, Path(name))
        look = asked.rounds // 2
        run.wait_for_round(look)
        fresh, trained = idle_uss(run)
        everybody = []
        for process in [run.broker(), *run.broker().children(recursive=True)]:
            with contextlib.suppress(OSError):  # clients that live for one task come and go
                everybody.append(smaps(process.pid))
        run.wait()
        return Figures(
            run.first_task_s(),
            run.round_s(look),
            statistics.median(fresh or [math.nan]),
            max(trained or [math.nan]),
            sum(each["Pss"] for each in everybody) / MIB,
            everybody[0]["Rss"] / MIB,
        )


def idle_uss(run: Running) -> tuple[list[float], list[float]]:
    """MiB of the clients that wait, before their first task and after it."""
    clients = run.clients()
    numbers = [int(title(process).split()[2]) for process in clients]
    before = {process.pid: cpu_s(process.pid) for process in clients}
    time.sleep(IDLE_S)
    with run.records() as db:
        have_trained = {client for (client,) in db.execute("SELECT client FROM tasks")}
    found: tuple[list[float], list[float]] = ([], [])
    for number, process in zip(numbers, clients, strict=True):
        with contextlib.suppress(OSError):
            if cpu_s(process.pid) - before[process.pid] < IDLE_S / 100:
                found[number in have_trained].append(smaps(process.pid)["Uss"] / MIB)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--part", type=int, help="how many take part in a round; a tenth of the fleet unless given")
    parser.add_argument("--processes", choices=["resident", "on-demand"], default="resident")
    parser.add_argument("--source", choices=["modelled", "enforced"], default="modelled")
    parser.add_argument("--rounds", type=int, default=30, help="enough to look at the clients meanwhile")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    about = {"processes": arguments.processes, "source": arguments.source, "rounds": arguments.rounds}
    rows = []
    for number, clients in enumerate(arguments.clients):
        asked = Asked(clients=clients, part=arguments.part or max(1, clients // 10), **about)
        if number == 0:
            measure(Asked(clients=10, **{**about, "rounds": 4}))
        figures = [measure(asked) for _ in range(arguments.repetitions)]
        columns = list(zip(*figures, strict=True))
        rows.append([clients, asked.part, *(spread(column) for column in columns)])
    print(f"processes {arguments.processes}, timing {arguments.source}")
    print_markdown(
        [
            "clients",
            "take part",
            "first task s",
            "round s",
            "USS idle, fresh MiB",
            "USS idle, trained, largest MiB",
            "PSS of all MiB",
            "broker RSS MiB",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
