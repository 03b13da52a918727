"""Which figures of a profile have a source, and whether the sources name figures that exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.types import Device, Fleet, Link, Profile


def figures(profile: Profile) -> Iterator[str]:
    """Yield the dotted key path of every number in a profile that is not a default."""
    yield from _numbers(_stated(profile), "")


def without_provenance(profile: Device | Link) -> list[str]:
    """Return the figures that have no provenance entry."""
    covered = {entry.figure for entry in profile.provenance}
    return [figure for figure in figures(profile) if not covered & set(_groups(figure))]


def _stated(profile: Profile) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(profile)
    tree.pop("provenance", None)
    defaults = {field.name: field.default for field in msgspec.structs.fields(profile)}
    return {key: value for key, value in tree.items() if value != defaults[key]}


def _numbers(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key


def _groups(figure: str) -> list[str]:
    parts = figure.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if value is not None:
            yield prefix + key
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def check_provenance(profile: Device | Link | Fleet, at: str) -> Iterator[BadInput]:
    tree = msgspec.to_builtins(profile)
    del tree["provenance"]
    known = set(_keys(tree))
    for number, entry in enumerate(profile.provenance):
        if entry.figure not in known:
            yield nearest(entry.figure, known, "key", f"{at}provenance.{number}.figure")
