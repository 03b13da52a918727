"""Commands that accompany a study in a process of their own, so that they do not disturb it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from fleetbed.emulator.machine.interpreter import module_command
from fleetbed.profiles.yaml_text import plain

#: how long a tracker may take to send what is left when a study has ended
LAST_POINTS_S = 120.0


@contextlib.contextmanager
def beside(name: str, *arguments: object, wait_s: float) -> Iterator[None]:
    """Run a command of fleetbed that ends when its input does: with this block, or when this process is killed.

    What it says goes to standard error, which may be a notebook's. It has `wait_s` to end.
    """
    command = module_command("fleetbed.cli.main", name, *arguments, "--until-input-ends", function="program")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that Ctrl-C stops the run first
    )
    assert process.stdin is not None
    assert process.stderr is not None
    relay = threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True)
    relay.start()
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"fleetbed: fleetbed {name} did not end in time and was stopped", file=sys.stderr, flush=True)
        relay.join(timeout=5)
        process.stderr.close()


def _pass_on(lines: Iterator[str]) -> None:
    for line in lines:
        print(plain(line.rstrip()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def tracked(folder: Path, trackers: Sequence[str]) -> Iterator[None]:
    """Send the runs in the folder to these trackers while they go on."""
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(trackers):
            stack.enter_context(beside("track", name, folder, wait_s=LAST_POINTS_S))
        yield
