"""The decisions of a run before its loop begins."""

from __future__ import annotations

from dataclasses import dataclass

from fleetbed.emulator.engine.participant import Participant
from fleetbed.emulator.engine.timing import Timing
from fleetbed.emulator.machine.calibration import Calibration
from fleetbed.emulator.method.algorithm import ServerHalf


@dataclass(frozen=True, kw_only=True)
class Prepared:
    participants: dict[int, Participant]
    timing: Timing
    method: ServerHalf
    calibration: Calibration | None  # the time scale was derived from it
    keep_heap: bool  # clients keep their heap between tasks
