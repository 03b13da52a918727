"""Several runs of a study at the same time, each by a command of its own; what they say is passed on, line by line."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fleetbed.profiles.errors import BadInput, FleetbedError
from fleetbed.profiles.experiment import Experiment

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
#: the sources of time for which it does not matter what else the host does
UNDISTURBED = ("modelled", "replay")


def check_jobs(jobs: int, experiment: Experiment) -> None:
    source = experiment.timing.source
    if jobs > 1 and source not in UNDISTURBED:
        raise BadInput(
            f"--jobs {jobs}: runs with timing.source {source} need the host for themselves; "
            f"leave --jobs out, or set timing.source to {' or '.join(UNDISTURBED)}."
        )


def run_side_by_side(folder: Path, names: Sequence[str], jobs: int, say: Callable[[str], None]) -> None:
    """Carry these runs out, so many at once. One that fails, or Ctrl-C, ends the others in order."""
    at_work: set[subprocess.Popen[str]] = set()
    failed: list[str] = []

    def carry_out(name: str) -> None:
        if failed:
            return
        command = [sys.executable, "-m", "fleetbed.cli.main", "run", "--resume", str(folder), "--only", name]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=_end_with_parent
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


def _end_with_parent() -> None:
    """In the new process: end in order when the thread ends that waits for it, whatever ended that."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
