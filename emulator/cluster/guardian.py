"""Ends what a Ray that was started here leaves behind, also when the process that started it was killed.

Ray's own processes watch each other, but after a kill some of them stay for minutes. So a small process outlives the
one that starts Ray: it waits until that one closes its end of a pipe, or dies, and then ends every process that holds a
file of Ray's folder open, and removes the folder. The environment would not do as a mark: Ray's agents overwrite it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fleetbed.emulator.machine import interpreter

CLEAN_S = 5.0  # in which the processes must end by themselves
PAUSE_S = 0.05
LONGEST_S = 30.0  # a process may hang in the kernel


@contextlib.contextmanager
def guarded_folder(prefix: str) -> Iterator[Path]:
    """Make a folder, guarded, and remove it at the end, together with those that a crash of the host has left.

    It is below the folder for temporary files, because the path of a socket must be short. Its name has the prefix and
    the id of this process.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)  # another user's is not ours to remove
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")).resolve()
    with guarded(folder):
        yield folder


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Meanwhile let a guardian watch this process; at the end wait until it has cleaned up."""
    command = interpreter.module_command("fleetbed.emulator.cluster.guardian", folder, os.getpid())
    # in a session of its own, so that Ctrl-C does not end it
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert guardian.stdin is not None  # asked for in Popen
        guardian.stdin.close()
        guardian.wait()


def main() -> None:
    """Wait for the end of the input, then clean up the folder in the first argument; the second is who started it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder, owner = Path(sys.argv[1]), int(sys.argv[2])
    sys.stdin.buffer.read()
    end_users(folder, spared={owner, os.getpid()})
    shutil.rmtree(folder, ignore_errors=True)


def end_users(folder: Path, spared: set[int]) -> None:
    """End all processes that hold a file below the folder open: ask them at first, kill them later."""
    started_s = time.monotonic()
    asked: set[int] = set()
    while (elapsed_s := time.monotonic() - started_s) < LONGEST_S:
        found = _users(folder) - spared
        if not found:
            return
        for pid in found if elapsed_s > CLEAN_S else found - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
                os.kill(pid, signal.SIGKILL if elapsed_s > CLEAN_S else signal.SIGTERM)
        asked |= found
        time.sleep(PAUSE_S)


def _users(folder: Path) -> set[int]:
    """The processes that hold a file below this folder open."""
    below = f"{folder}{os.sep}"
    found = set()
    for files in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(_target(file).startswith(below) for file in files.iterdir()):
                found.add(int(files.parent.name))
    return found


def _target(file: Path) -> str:
    """What the descriptor refers to; nothing if it was closed by now."""
    try:
        return os.readlink(file)
    except OSError:
        return ""
