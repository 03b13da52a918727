"""How long a fleet takes from the command to its first task, and what its processes hold while they wait.

    python tests/benchmarks/start_and_memory.py [--clients 100 500] [--processes resident] [--source calibrated]

A small ResNet10 on the shipped data; so many clients take part in a round. One run before those that count prepares the
data and the calibration. Memory is read half-way: USS is what a client has of its own, PSS counts shared pages in
parts, so that its sum over broker, zygote, services and clients is what the whole fleet takes of the host.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from fleet_runs import MIB, Asked, Running, print_markdown, smaps, spread


class Figures(NamedTuple):
    start_s: float
    round_s: float
    uss_mib: float  # median of the clients
    uss_most_mib: float
    pss_mib: float  # of everybody
    broker_mib: float


def measure(asked: Asked) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        run = Running(asked, Path(name))
        run.wait_for_round(asked.rounds // 2)
        clients, everybody = [], []
        for process in [run.broker(), *run.broker().children(recursive=True)]:
            with contextlib.suppress(OSError):  # clients that live for one task come and go
                everybody.append(smaps(process.pid))
                if process in run.clients():
                    clients.append(everybody[-1]["Uss"] / MIB)
        broker_mib = smaps(run.process.pid)["Rss"] / MIB
        run.wait()
        return Figures(
            run.first_task_s(),
            run.round_s(),
            statistics.median(clients or [0.0]),
            max(clients or [0.0]),
            sum(each["Pss"] for each in everybody) / MIB,
            broker_mib,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--part", type=int, help="how many take part in a round; a tenth of the fleet unless given")
    parser.add_argument("--processes", choices=["resident", "on-demand"], default="resident")
    parser.add_argument("--source", choices=["calibrated", "modelled"], default="calibrated")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    about = {"processes": arguments.processes, "source": arguments.source, "rounds": arguments.rounds}
    rows = []
    for number, clients in enumerate(arguments.clients):
        asked = Asked(clients=clients, part=arguments.part or max(1, clients // 10), **about)
        if number == 0:
            measure(Asked(clients=10, **{**about, "rounds": 2}))
        figures = [measure(asked) for _ in range(arguments.repetitions)]
        columns = list(zip(*figures, strict=True))
        rows.append([clients, asked.part, *(spread(column) for column in columns[:4]), *map(spread, columns[4:])])
    print(f"processes {arguments.processes}, timing {arguments.source}")
    print_markdown(
        [
            "clients",
            "take part",
            "first task s",
            "round s",
            "USS of a client MiB",
            "largest USS MiB",
            "PSS of all MiB",
            "broker RSS MiB",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
