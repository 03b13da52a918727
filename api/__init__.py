"""fleetbed: emulate a fleet of unequal IoT devices on one machine, and run federated learning on it.

    import fleetbed

    results = fleetbed.run("demo", set={"rounds": 5}, out="runs/mine")
    results = fleetbed.load("runs/mine")  # finished, still running or killed
    results.tasks.to_pandas()

Every name is imported when it is first used, so that `import fleetbed` imports neither torch nor matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetbed.choosing import fit
    from fleetbed.emulator.method.algorithm import (
        Algorithm,
        Arrival,
        Assignment,
        Client,
        Context,
        Expected,
        Job,
        Merged,
        Needs,
        Reply,
        Spec,
        Target,
    )
    from fleetbed.emulator.method.bundle import Bundle
    from fleetbed.emulator.timeline.policies import Rounds, Stream
    from fleetbed.models.base import Family, InputSpec, Net, Options
    from fleetbed.models.work import Work
    from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
    from fleetbed.results import RecordTable, Results, compare, load
    from fleetbed.running import StudyInterrupted, run

    __version__: str

__all__ = [
    "Algorithm",
    "Arrival",
    "Assignment",
    "BadInput",
    "Bundle",
    "Client",
    "Context",
    "Expected",
    "Family",
    "FleetbedError",
    "HostCannot",
    "InputSpec",
    "Job",
    "Merged",
    "Needs",
    "Net",
    "Options",
    "RecordTable",
    "Reply",
    "Results",
    "Rounds",
    "Spec",
    "Stream",
    "StudyInterrupted",
    "Target",
    "Work",
    "__version__",
    "compare",
    "fit",
    "load",
    "run",
]

#: the module that each public name comes from
_MODULES = {
    "running": ("run", "StudyInterrupted"),
    "results": ("load", "compare", "Results", "RecordTable"),
    "choosing": ("fit",),
    "emulator.method.algorithm": (
        *("Algorithm", "Arrival", "Assignment", "Client", "Context", "Expected"),
        *("Job", "Merged", "Needs", "Reply", "Spec", "Target"),
    ),
    "emulator.method.bundle": ("Bundle",),
    "emulator.timeline.policies": ("Rounds", "Stream"),
    "models.base": ("Family", "InputSpec", "Net", "Options"),
    "models.work": ("Work",),
    "profiles.errors": ("BadInput", "FleetbedError", "HostCannot"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # takes longer than the rest of this import

        return version("fleetbed")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"fleetbed.{module}"), name)
    raise AttributeError(f"module 'fleetbed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
