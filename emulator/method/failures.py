"""Failures of code that methods and policies bring: one sentence that says where the error is.

The records stay whole and the run can be resumed, once the code is fixed.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fleetbed.profiles.errors import FleetbedError

TORCH = str(Path(torch.__file__).parent)


class CodeFailed(FleetbedError):
    """The code of a method or policy raised an error, or returned something invalid."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.trace = trace


@contextmanager
def named(who: str, hook: str) -> Iterator[None]:
    """Turn whatever a hook raises into one sentence; `who` is e.g. `the method fedavg`."""
    try:
        yield
    except FleetbedError:  # its sentence says what is wrong
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # torch raises deep inside itself; the author of a method can change the line that called it
        place = next((each for each in reversed(frames) if not each.filename.startswith(TORCH)), frames[-1])
        said = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]
        raise CodeFailed(
            f"{who} failed in {hook} at {place.filename}:{place.lineno}: {said}", traceback.format_exc()
        ) from error
