"""What a run costs while everybody waits: CPU of broker, zygote, services and idle clients, in parts of one core.

    python tests/benchmarks/idle_cpu.py [--clients 100] [--seconds 20]

One client of the fleet is held to a thousandth of its speed, so that it sleeps between its steps and all others wait.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from fleet_runs import Asked, Running, cpu_s, print_markdown, spread, title

ROLES = ("broker", "zygote", "services", "idle clients", "busy client")


def cpu_by_role(run: Running) -> dict[str, float]:
    found = dict.fromkeys(ROLES, 0.0)
    for process in [run.broker(), *run.broker().children(recursive=True)]:
        name = title(process)
        if process.pid == run.process.pid:
            role = "broker"
        elif name.startswith("fleetbed: zygote"):
            role = "zygote"
        elif name.startswith("fleetbed: client"):
            role = f"client {process.pid}"
        else:
            role = "services"
        found[role] = found.get(role, 0.0) + cpu_s(process.pid)
    return found


def measure(clients: int, seconds: float) -> dict[str, float]:
    """Cores in use by role."""
    with tempfile.TemporaryDirectory() as name:
        asked = Asked(clients=clients, part=1, source="enforced", time_scale=1000.0, rounds=2, steps=100)
        run = Running(asked, Path(name))
        try:
            while len(run.clients()) < clients:
                time.sleep(0.1)
            time.sleep(5.0)  # until the first order is on its way and memory has been given back
            before, begun = cpu_by_role(run), time.monotonic()
            time.sleep(seconds)
            after, lasted = cpu_by_role(run), time.monotonic() - begun
        finally:
            run.process.terminate()
            run.process.wait()
    used = {role: (after[role] - before[role]) / lasted for role in before}
    each = sorted(used.pop(role) for role in list(used) if role.startswith("client "))
    return {**used, "idle clients": sum(each[:-1]), "busy client": each[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for clients in arguments.clients:
        found = [measure(clients, arguments.seconds) for _ in range(arguments.repetitions)]
        idle = [sum(each[role] for role in ROLES[:-1]) for each in found]
        rows.append(
            [
                clients,
                *(spread([100 * each[role] for each in found]) for role in ROLES),
                spread([100 * i for i in idle]),
            ]
        )
    print_markdown(["clients", *(f"{role} %" for role in ROLES), "all but the busy client %"], rows)


if __name__ == "__main__":
    main()
