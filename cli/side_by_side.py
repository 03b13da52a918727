"""Several runs of a study at the same time, each by a command of its own; what they say is passed on, line by line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fleetbed.emulator.forks import die_with
from fleetbed.profiles.errors import FleetbedError


def run_side_by_side(folder: Path, names: Sequence[str], jobs: int, say: Callable[[str], None]) -> None:
    """Carry these runs out, so many at once. One that fails, or Ctrl-C, ends the others in order."""
    at_work: set[subprocess.Popen[str]] = set()
    failed: list[str] = []
    end_with_us = partial(die_with, os.getpid(), signal.SIGTERM)  # in order, as by Ctrl-C

    def carry_out(name: str) -> None:
        if failed:
            return
        command = [sys.executable, "-m", "fleetbed.cli.main", "run", "--resume", str(folder), "--only", name]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_us
        ) as process:
            at_work.add(process)
            assert process.stderr is not None
            for line in process.stderr:
                say(f"{name}: {line.rstrip()}")
            status = process.wait()
            at_work.discard(process)
        if status and not failed:
            failed.append(name)
            end_all()

    def end_all() -> None:
        for process in tuple(at_work):
            process.terminate()

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for _ in pool.map(carry_out, names):
                pass
        except BaseException:
            failed.append("")  # none of those that wait is begun
            end_all()
            raise
    if failed:
        raise FleetbedError(f"run {failed[0]} failed, which it says above; go on with: fleetbed run --resume {folder}")
