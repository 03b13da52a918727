"""Carries out several runs of a study at the same time, each in its own command, whose output is passed on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fleetbed.emulator.machine.interpreter import module_command
from fleetbed.emulator.machine.parent import die_with
from fleetbed.emulator.resume.run_folder import standing
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot

#: the error to raise, by the exit code of a run's command
ERRORS = {2: BadInput, 3: HostCannot}


def run_side_by_side(folder: Path, names: Sequence[str], jobs: int, say: Callable[[str], None]) -> None:
    """Carry out these runs, `jobs` at a time. If one fails, or on Ctrl-C, stop the others cleanly.

    A run that ended without a result has not failed: it is finished, and the others continue.
    """
    at_work: set[subprocess.Popen[str]] = set()
    failed: list[FleetbedError] = []
    end_with_us = partial(die_with, os.getpid(), signal.SIGTERM)  # a clean stop, as with Ctrl-C

    def carry_out(name: str) -> None:
        if failed:
            return
        command = module_command("fleetbed.cli.main", "run", "--resume", folder, "--only", name, function="program")
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=end_with_us,
        ) as process:
            at_work.add(process)
            if failed:  # another run, while this one started
                process.terminate()
            assert process.stderr is not None
            for line in process.stderr:
                say(f"{name}: {line.rstrip()}")
            status = process.wait()
            at_work.discard(process)
        if (error := error_of_command(folder, name, status)) is not None and not failed:
            failed.append(error)
            end_all()

    def end_all() -> None:
        for process in tuple(at_work):
            process.terminate()

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for _ in pool.map(carry_out, names):
                pass
        except BaseException:
            failed.append(FleetbedError("interrupted"))  # so that no waiting run starts
            end_all()
            raise
    if failed:
        raise failed[0]


def error_of_command(folder: Path, name: str, status: int) -> FleetbedError | None:
    """Return the error for a run whose command ended with this status; None if the run is finished.

    The exit code alone does not decide: the records must show that the run is finished.
    """
    found = standing(folder / name)
    if found == "empty" or (found == "done" and status == 0):
        return None
    how = f"was ended by signal {-status}" if status < 0 else f"failed with exit code {status}"
    return ERRORS.get(status, FleetbedError)(
        f"run {name} {how}, see its output above; continue with: fleetbed run --resume {folder}"
    )
