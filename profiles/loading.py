"""Reads a YAML file into a frozen type in one pass, and checks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from fleetbed.profiles.checks.devices import check_device
from fleetbed.profiles.checks.experiments import check_experiment
from fleetbed.profiles.checks.fleets import check_fleet
from fleetbed.profiles.checks.provenance import check_provenance
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import FLOWER, Experiment
from fleetbed.profiles.explain import convert
from fleetbed.profiles.types import Device, Fleet, Link, Profile
from fleetbed.profiles.yaml_text import read_mapping

T = TypeVar("T", bound=Profile)
Kind = Literal["device", "link", "fleet", "experiment"]

TYPES: Final[dict[Kind, type[Profile]]] = {
    "device": Device,
    "link": Link,
    "fleet": Fleet,
    "experiment": Experiment,
}
_CHECKS: Final[dict[type[Profile], Callable[[Any, str], Iterator[BadInput]]]] = {
    Device: check_device,
    Link: check_provenance,
    Fleet: check_fleet,
    Experiment: check_experiment,
}


def read_profile(path: Path, type_: type[T]) -> T:
    """Read and check the profile in a file."""
    return decode(read_mapping(path), type_, str(path))


def decode(tree: dict[str, Any], type_: type[T], where: str, prefix: str = "") -> T:
    """Convert a plain mapping to a profile and check it. Error sentences start with `where` and `prefix`."""
    profile = convert(tree, type_, where, prefix)
    for mistake in contradictions(profile, f"{where}: {prefix}." if prefix else f"{where}: "):
        raise mistake
    return profile


def with_app(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in what an experiment with a Flower app need not say: the app is its one algorithm, and it is metered."""
    flower = tree.get("flower")
    if isinstance(flower, dict) and isinstance(flower.get("app"), str):
        tree.setdefault("algorithms", [{"name": FLOWER, "label": Path(flower["app"]).name}])
        if isinstance(timing := tree.setdefault("timing", {}), dict):
            timing.setdefault("source", "metered")
    return tree


def contradictions(profile: Profile, at: str) -> Iterator[BadInput]:
    """Yield the mistakes of a profile whose values are valid one by one. Sentences start with `at`."""
    yield from _CHECKS[type(profile)](profile, at)
