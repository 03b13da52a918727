"""How the peak of memory in the records compares with the kernel's own counts, read from outside, for real clients.

    python tests/benchmarks/peak_memory.py [--clients 6] [--widths 16 32 64] [--steps 40]

Each client trains once, a ResNet10 of each width, in its own process under its memory limit. Meanwhile this script
reads two counts of the kernel again and again: the usage of the client's group (cgroups of version 1), and the dirty
private pages of its process in /proc/PID/smaps_rollup, which are counted independently of cgroups. The peak recurs in
every step, so that the largest of many readings comes close to it from below.

A process also has private pages that are not its own doing: those that the zygote wrote to after the fork. So the pages
are compared by their growth since the client waited for its first task, and so is the peak in the records. In the
table 1.000 is exact.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import NamedTuple

from fleet_runs import MIB, Asked, Running, print_markdown, smaps, spread, title

GROUPS = Path("/sys/fs/cgroup/memory")


class Peak(NamedTuple):
    """The peak of a client in bytes: in the records, and as it was seen; growth is that since its first task."""

    record: int
    usage: int
    record_growth: int
    pages_growth: int


def measure(asked: Asked) -> list[Peak]:
    usage: dict[int, list[int]] = {}
    pages: dict[int, list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        run = Running(asked, Path(name))
        clients: dict[int, int] = {}
        while run.process.poll() is None:
            if len(clients) < asked.clients:
                clients = {process.pid: int(title(process).split()[2]) for process in run.clients()}
            for pid, client in clients.items():
                with contextlib.suppress(OSError):  # it has ended
                    if (group := group_of(pid)) is not None:
                        usage.setdefault(client, []).append(int((group / "memory.usage_in_bytes").read_text()))
                        pages.setdefault(client, []).append(smaps(pid)["Private_Dirty"])
        run.wait()
        with run.records() as db:
            rows = db.execute("SELECT client, peak_bytes FROM tasks WHERE outcome = 'ok'").fetchall()
    assert len(rows) == asked.clients, "each client trains once"
    return [
        Peak(
            record=peak,
            usage=max(usage[client]),
            record_growth=peak - min(usage[client]),
            pages_growth=max(pages[client]) - min(pages[client]),
        )
        for client, peak in rows
    ]


def group_of(pid: int) -> Path | None:
    """The folder of a client in the memory controller's own tree, once it has joined it."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") and Path(path).name.startswith("client"):
            return GROUPS / path.strip("/")
    return None


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
        rows.append(
            [
                width,
                len(found),
                spread([peak.record / MIB for peak in found], 1),
                spread([peak.record / peak.usage for peak in found], 3),
                spread([peak.record_growth / peak.pages_growth for peak in found], 3),
            ]
        )
    print_markdown(["width", "clients", "peak in the records MiB", "over the group's usage", "over its pages"], rows)


if __name__ == "__main__":
    main()
