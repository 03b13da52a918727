"""A fleet that is started by the command, as a person would, and watched from outside: when, how much memory, CPU."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec
import psutil

FLEETBED = str(Path(sys.executable).with_name("fleetbed"))
MIB = 1 << 20

EXPERIMENT = """
title: A fleet of one kind of board
fleet: many
data: {{name: fashion-mini, partition: {{kind: iid, min_size: 1}}}}
model: {{family: resnet-stage, variants: [resnet10], options: {{base_width: {base_width}}}}}
training: {{batch: 4, max_steps: {steps}, optimizer: {{name: sgd, lr: 0.02}}}}
algorithms: [{{name: fedavg}}]
seeds: [1]
participation: {{ratio: {ratio}}}
processes: {processes}
timing: {{source: {source}, time_scale: {time_scale}}}
rounds: {rounds}
evaluation: {{every: 1000000}}
"""
FLEET = """
title: {clients} boards
members: [{{device: {device}, count: {clients}}}]
provenance: [{{figure: members, kind: assumed, note: Of a benchmark.}}]
"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    clients: int
    processes: str = "resident"
    source: str = "modelled"
    rounds: int = 5
    part: int = 10  # how many take part in a round
    base_width: int = 8
    steps: int = 2
    time_scale: float | str = "auto"
    device: str = "raspberry-pi-4b-8gb"

    def write(self, folder: Path) -> None:
        (folder / "fleets").mkdir(exist_ok=True)
        (folder / "experiments").mkdir(exist_ok=True)
        (folder / "fleets/many.yaml").write_text(FLEET.format(clients=self.clients, device=self.device))
        text = EXPERIMENT.format(
            base_width=self.base_width,
            steps=self.steps,
            ratio=min(1.0, self.part / self.clients),
            processes=self.processes,
            source=self.source,
            time_scale=self.time_scale,
            rounds=self.rounds,
        )
        (folder / "experiments/bench.yaml").write_text(text)


class Running:
    """`fleetbed run` of what was asked, in a folder of its own."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        asked.write(folder)
        self.out = folder / "out"
        with (folder / "stderr").open("wb") as errors:
            self.begun = time.time()
            self.process = subprocess.Popen(
                [FLEETBED, "run", "bench", "--profiles", str(folder), "--out", str(self.out)],
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self._errors = folder / "stderr"

    def wait(self) -> None:
        if self.process.wait():
            raise SystemExit(f"the run failed: {self._errors.read_text()}")

    def rounds_done(self) -> int:
        with contextlib.suppress(sqlite3.OperationalError), self.records() as db:
            return int(db.execute("SELECT count(*) FROM rounds").fetchone()[0])
        return 0

    def wait_for_round(self, number: int, poll_s: float = 0.02) -> bool:
        """Whether so many rounds were done before the run ended."""
        while self.rounds_done() < number:
            if self.process.poll() is not None:
                self.wait()
                return False
            time.sleep(poll_s)
        return True

    @contextlib.contextmanager
    def records(self) -> Iterator[sqlite3.Connection]:
        path = next(self.out.glob("*/run.sqlite"), "")  # an error, like that of a file without tables
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            yield db

    def first_task_s(self) -> float:
        """From the command to the first task that was handed to a client."""
        with self.records() as db:
            (started,) = db.execute("SELECT value FROM meta WHERE key = 'started'").fetchone()
            (first,) = db.execute("SELECT min(host_start_s) FROM tasks").fetchone()
        return datetime.fromisoformat(msgspec.json.decode(started)).timestamp() + first - self.begun

    def round_s(self, last: int) -> float:
        """The median of all rounds from the second to this one: looking at the processes disturbs those after it."""
        with self.records() as db:
            ends = [
                end
                for (end,) in db.execute("SELECT host_end_s FROM rounds WHERE version <= ? ORDER BY version", (last,))
            ]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))

    def broker(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def clients(self) -> list[psutil.Process]:
        everybody = self.broker().children(recursive=True)
        return [process for process in everybody if title(process).startswith("fleetbed: client")]


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def smaps(pid: int) -> dict[str, int]:
    """Bytes by the kernel's names; `Uss` is what is the process's own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {name.rstrip(":"): int(value) * 1024 for name, value, *_ in (line.split() for line in lines)}
    found["Uss"] = found["Private_Clean"] + found["Private_Dirty"]
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and how far the repetitions lie apart."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def print_markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
