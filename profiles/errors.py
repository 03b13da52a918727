"""The one tree of errors. A message says what was wanted, what was found and what to do.

FleetbedError          exit code 1: the run failed
├── BadInput           exit code 2: file, key, what was found, what is allowed
└── HostCannot         exit code 3: this host cannot do what was asked, and what would enable it
"""

from __future__ import annotations


class FleetbedError(Exception):
    """The base: the command ends with one sentence and this exit code, never with a traceback."""

    exit_code = 1


class BadInput(FleetbedError):
    """The user's file, option or data is wrong."""

    exit_code = 2


class HostCannot(FleetbedError):
    """What was asked is sound, but not on this host."""

    exit_code = 3
