"""Training rates of this machine by class of operation, measured in a separate process."""

from __future__ import annotations

import os
import subprocess

import msgspec
from msgspec import Struct

from fleetbed.emulator.machine import host, interpreter
from fleetbed.emulator.machine.calibration import THREAD_VARIABLES
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.types import Rates

MEASURE_S = 20.0
#: the largest spread of a step's times at which the rates are reliable
STEADY = 0.1


class TrainingStep(Struct, frozen=True):
    """Measured and predicted time of a real training step."""

    model: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class ClassTimes(Struct, frozen=True, kw_only=True):
    """Measured rates. `spread` is the range of a step's times, 10th to 90th percentile, relative to the median."""

    rates: Rates
    steps: list[TrainingStep]
    turns: int
    spread: float


def measure_classes(threads: int, seconds: float = MEASURE_S) -> ClassTimes:
    """Measure the rates with this many threads, and how well they predict two real training steps."""
    command = interpreter.module_command("fleetbed.emulator.checks.class_timing", threads, seconds)
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
    if answer.returncode != 0:
        raise FleetbedError("the process that measures training rates ended early; see its output above")
    return msgspec.json.decode(answer.stdout, type=ClassTimes)


def host_rates(seconds: float = MEASURE_S) -> tuple[ClassTimes, float]:
    """Return the rates of one core of this host, and the cores that other processes used during the measurement.

    With these rates `seconds_of` gives the host seconds of any work, as it gives device seconds with a device's rates.
    """
    meter = host.LoadMeter()
    found = measure_classes(1, seconds)
    return found, meter.other_cores()
