"""What the table `meta` says about a run, as types. Other tables: `fleetbed.emulator.records.tables`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from fleetbed.emulator.method.series import TargetSeries
from fleetbed.emulator.records.tables import Count, Figure


class Host(Struct, frozen=True):
    name: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: Count | None = None
    kernel: str | None = None
    python: str | None = None
    gpu: Any = None


class HostNode(Struct, frozen=True):
    """A node that carried out tasks, with the number of outcomes that it gave."""

    name: str
    cpu: str
    cores: int
    outcomes: int


class HostKnob(Struct, frozen=True):
    """What the host can do about one limit; `enable` says what would give more, mostly a command."""

    knob: str
    status: str
    backend: str = ""
    note: str = ""
    enable: str = ""


class HostProof(Struct, frozen=True):
    """How far off a limit was when the host was last tested."""

    knob: str
    error: Figure | None


class About(Struct, frozen=True):
    """The values of the table `meta` that people read; runs of earlier versions lack some of them."""

    status: str = "running"
    error: str | None = None
    fleetbed_version: str | None = None
    versions: dict[str, Any] | None = None
    files: dict[str, str] | None = None  # the user's own code: the SHA-256 of each file
    host: Host | None = None
    nodes: tuple[HostNode, ...] | None = None  # None: the host carried out the tasks
    timing: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    command: str | None = None
    started: str | None = None
    degraded: bool | None = None
    host_can: tuple[HostKnob, ...] | None = None
    verify: tuple[HostProof, ...] | None = None
    in_rounds: bool | None = None  # whether its policy has rounds, which cannot be told from the name of a user's own
    series: TargetSeries | None = None  # the one that the method's paper reports
