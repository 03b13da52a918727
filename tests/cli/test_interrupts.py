"""An interrupt that arrives inside a finalizer or a weakref callback still stops the command, without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, time, weakref
from fleetbed.cli.interrupts import stop_cleanly

class Thing:
    pass

def interrupt(_):
    os.kill(os.getpid(), signal.{signal})
    for _ in range(1000):
        pass

stop_cleanly()
thing = Thing()
watcher = weakref.ref(thing, interrupt)
try:
    del thing
    time.sleep(20)
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.parametrize("name", [signal.SIGINT.name, signal.SIGTERM.name])
def test_interrupt_in_a_weakref_callback(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(signal=name)], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("stopped\n", "", 0)


def test_other_exceptions_are_still_shown() -> None:
    program = "from fleetbed.cli.interrupts import stop_cleanly\nstop_cleanly()\n" + (
        "class Thing:\n    def __del__(self):\n        raise ValueError('seen')\nThing()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "ValueError: seen" in ended.stderr
