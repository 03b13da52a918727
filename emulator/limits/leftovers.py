"""Finds and removes what killed runs left behind in the cgroup trees."""

from __future__ import annotations

import os
from pathlib import Path

from fleetbed.emulator.limits import v2
from fleetbed.emulator.limits.cgroup import CONTROLLERS, places, read_words, remove
from fleetbed.emulator.limits.owner import PROC, is_leftover


def leftovers(proc: Path = PROC) -> list[Path]:
    """The folders of runs whose owner has died, wherever in the trees they were nested."""
    found = []
    for mount in {place.mount for place in places(proc) if place.controllers & CONTROLLERS or place.version == 2}:
        for path, names, _ in os.walk(mount):
            dead = [name for name in names if is_leftover(name, proc)]
            found += [Path(path) / name for name in dead]
            names[:] = [name for name in names if name not in dead]
    return found


def clean_leftovers(proc: Path = PROC) -> list[str]:
    """Remove what killed runs left behind, except for those of other users."""
    cleaned = []
    for folder in leftovers(proc):
        try:
            remove(folder)
            v2.release(folder.parent, CONTROLLERS & set(read_words(folder.parent / "cgroup.subtree_control")))
        except PermissionError:
            continue
        cleaned.append(str(folder))
    return cleaned
