"""The trackers that runs can be sent to. Each stays on this host unless its own environment variable says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fleetbed.analysis.tables.writing import missing_extra
from fleetbed.profiles.errors import nearest

if TYPE_CHECKING:
    from fleetbed.analysis.tables.runs import Run
    from fleetbed.analysis.tracking.points import TrackedPoint


class TrackedRun(Protocol):
    """One run in a tracker. Whatever goes wrong there is an exception of any kind."""

    id: str  # by which the tracker finds the run again

    def send(self, points: Sequence[TrackedPoint], before: int) -> None:
        """Send points; `before` is how many were sent already, in earlier processes too."""
        ...

    def end(self, status: str | None, report: Path | None) -> None:
        """Say how the run ended, keep its report, and close. With None the run goes on, and may be opened again."""
        ...


class Opener(Protocol):
    def __call__(self, run: Run, folder: Path, known: str | None) -> TrackedRun:
        """Begin a run in the tracker, or continue the `known` one. The folder is for what stays on this host."""
        ...


def _tensorboard() -> Opener:
    from fleetbed.analysis.tracking.to_tensorboard import TensorBoardRun

    return TensorBoardRun


def _mlflow() -> Opener:
    from fleetbed.analysis.tracking.to_mlflow import MlflowRun

    return MlflowRun


def _wandb() -> Opener:
    from fleetbed.analysis.tracking.to_wandb import WandbRun

    return WandbRun


@dataclass(frozen=True)
class Tracker:
    title: str
    opener: Callable[[], Opener]  # imports its library


#: by name, which is also that of the module and of the extra
TRACKERS = {
    "tensorboard": Tracker("TensorBoard", _tensorboard),
    "mlflow": Tracker("MLflow", _mlflow),
    "wandb": Tracker("Weights & Biases", _wandb),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise the error of a tracker that is unknown or not installed, without importing any."""
    for name in names:
        if name not in TRACKERS:
            raise nearest(name, TRACKERS, "tracker", "track")
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb leaves behind, is no library
            raise missing_extra(f"track {name}", TRACKERS[name].title, name)
