"""How the peak of memory in the records compares with the kernel's own counts, read from outside, for real clients.

    python tests/benchmarks/peak_memory.py [--clients 6] [--widths 16 32 64] [--steps 40]

Each client trains once, a ResNet10 of each width, in its own process under its memory limit. Meanwhile this script
reads two counts of the kernel again and again: the dirty private pages in /proc/PID/smaps_rollup, which are what the
process added or changed since its fork, independent of cgroups; and, with cgroups of version 1, the usage of the
client's group. The peak recurs in every step, so that the largest of many readings comes close to it from below. The
table has the ratios of the records to both; 1.000 is exact.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fleet_runs import MIB, Asked, Running, print_markdown, smaps, spread, title

GROUPS = Path("/sys/fs/cgroup/memory")


def measure(asked: Asked) -> list[tuple[float, float, float | None]]:
    """The peak of each client: by the records, by its pages, and by its group; in bytes."""
    pages: dict[int, int] = {}
    usage: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as name:
        run = Running(asked, Path(name))
        clients: dict[int, int] = {}
        while run.process.poll() is None:
            if len(clients) < asked.clients:
                clients = {process.pid: int(title(process).split()[2]) for process in run.clients()}
            for pid, client in clients.items():
                with contextlib.suppress(OSError):  # it has ended
                    pages[client] = max(pages.get(client, 0), smaps(pid)["Private_Dirty"])
                    if (group := group_of(pid)) is not None:
                        found = int((group / "memory.usage_in_bytes").read_text())
                        usage[client] = max(usage.get(client, 0), found)
        run.wait()
        with run.records() as db:
            rows = db.execute("SELECT client, peak_bytes FROM tasks WHERE outcome = 'ok'").fetchall()
    assert len(rows) == asked.clients, "each client trains once"
    return [(peak, pages[client], usage.get(client)) for client, peak in rows]


def group_of(pid: int) -> Path | None:
    """The folder of a process in the memory controller's own tree, if the host has one."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return GROUPS / path.strip("/")
    return None


def ratios(pairs: Sequence[tuple[float, float | None]]) -> str:
    found = [one / other for one, other in pairs if other is not None]
    return spread(found, 3) if found else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    rows = []
    for width in arguments.widths:
        asked = Asked(
            clients=arguments.clients, part=arguments.clients, rounds=1, base_width=width, steps=arguments.steps
        )
        found = measure(asked)
        peaks = spread([record / MIB for record, _, _ in found], 1)
        by_pages = ratios([(record, pages) for record, pages, _ in found])
        by_group = ratios([(record, usage) for record, _, usage in found])
        rows.append([width, len(found), peaks, by_pages, by_group])
    print_markdown(["width", "clients", "peak in the records MiB", "over its pages", "over its group's usage"], rows)


if __name__ == "__main__":
    main()
