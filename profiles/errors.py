"""The errors of fleetbed. A message says what was wanted, what was found and what to do.

FleetbedError          exit code 1: the run failed
├── BadInput           exit code 2: file, key, what was found, what is allowed
└── HostCannot         exit code 3: this host cannot do what was asked, and what would enable it
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FleetbedError(Exception):
    """The base class: the command ends with one sentence and this exit code, never with a traceback."""

    exit_code = 1


class BadInput(FleetbedError):
    """The user's file, option or data is wrong."""

    exit_code = 2


class HostCannot(FleetbedError):
    """The request is valid, but this host cannot do it."""

    exit_code = 3


def nearest(name: str, allowed: Iterable[str], what: str, where: str) -> BadInput:
    """Return the error for an unknown name, with the nearest known ones; the sentence starts with `where`."""
    known = sorted(allowed)
    inside = [each for each in known if len(name) > 2 and name.lower() in each.lower()]
    close = inside[:3] or get_close_matches(name[:200], known, n=3, cutoff=0.5)
    hints = [f"did you mean {' or '.join(close)}?"] if close else []
    if len(known) <= 24:
        hints.append(f"allowed are {', '.join(known)}." if known else "there are none.")
    elif not close:
        hints.append(f"there are {len(known)}, from {known[0]} to {known[-1]}.")
    shown = name if len(name) <= 60 else name[:57] + "..."
    lead = f"{where}: " if where else ""
    return BadInput(f"{lead}there is no {what} {shown!r}; {' '.join(hints)}")
