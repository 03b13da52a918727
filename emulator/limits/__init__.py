"""Limits of a client process: the best that this host can enforce, each labelled with its back end.

The zygote calls `best_limits(run)`, then `create(plan)` per client; the child calls `Group.join()` right
after the fork. `clean_leftovers()` removes what killed runs left behind.
"""

from __future__ import annotations

from pathlib import Path

from fleetbed.emulator.limits import cgroup, v2
from fleetbed.emulator.limits.cgroup import CONTROLLERS, Place
from fleetbed.emulator.limits.gpu import Driver, Hardware
from fleetbed.emulator.limits.group import Group, Limits, Tree
from fleetbed.emulator.limits.leftovers import clean_leftovers
from fleetbed.emulator.limits.owner import PROC, folder_name
from fleetbed.emulator.limits.plan import Cap, GpuPlan, LimitPlan, Usage

__all__ = ["Cap", "GpuPlan", "Group", "LimitPlan", "Limits", "Usage", "best_limits", "clean_leftovers"]


def best_limits(run: str, proc: Path = PROC, driver: Driver | None = None) -> Limits:
    """Choose the back end of each controller: cgroup v2 where it is writable, else v1, else the fallback."""
    name = folder_name(run, proc)
    trees: list[Tree] = []
    why_not = dict.fromkeys(CONTROLLERS, "this host mounts no cgroup with this controller")
    open_still = set(CONTROLLERS)
    for place in sorted(cgroup.places(proc), key=lambda place: -place.version):
        wanted = place.controllers & open_still
        if not wanted:
            continue
        try:
            tree = _open(place, wanted, name)
        except OSError as error:
            why_not.update(dict.fromkeys(wanted, f"{place.own} cannot be used: {error.strerror}"))
            continue
        trees.append(tree)
        open_still -= wanted
    return Limits(trees, why_not, driver or Hardware())


def _open(place: Place, wanted: frozenset[str], name: str) -> Tree:
    base = place.own if place.version == 1 else v2.base_of(place.own)
    folder = base / name
    cgroup.make(folder)
    if place.version == 2:
        try:
            v2.enable(base, wanted)
            v2.enable(folder, wanted)
        except OSError:
            cgroup.drop(folder)
            v2.release(base, wanted)
            raise
    return Tree(place.version, wanted, place.mount, folder)
