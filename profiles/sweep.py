"""The points of a sweep: every combination of the values that an experiment lists for some of its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec

from fleetbed.profiles.settings import put_value
from fleetbed.profiles.yaml_text import shorten

E = TypeVar("E", bound=msgspec.Struct)
Sweep = Mapping[str, Sequence[Any]]

#: keys that make no sense in a sweep, and why
NOT_SWEPT = {
    "algorithms": "list them under algorithms, or sweep a key of one, such as algorithms.0.params.mu",
    "policies": "list them under policies, or sweep a key of one, such as policies.0.deadline_s",
    "seeds": "list them under seeds",
    "rounds": "a longer run contains the shorter one",
    "title": "it changes nothing in a run",
    "sweep": "it is the sweep itself",
}


def points(sweep: Sweep, algorithm: int, policy: int) -> list[dict[str, Any]]:
    """Return the combinations for the algorithm and the policy with these numbers; an empty one without a sweep.

    A key of another algorithm or policy is left out, because the run would be the same for each of its values.
    """
    keys = _keys(sweep, algorithm, policy)
    return [dict(zip(keys, values, strict=True)) for values in product(*(sweep[key] for key in keys))]


def count_points(sweep: Sweep, algorithm: int, policy: int) -> int:
    return prod(len(sweep[key]) for key in _keys(sweep, algorithm, policy))


def _keys(sweep: Sweep, algorithm: int, policy: int) -> list[str]:
    own = {"algorithms": str(algorithm), "policies": str(policy)}
    steps = {key: key.split(".") for key in sweep}
    return [key for key, (top, *rest) in steps.items() if top not in own or rest[:1] == [own[top]]]


def at_point(experiment: E, point: Mapping[str, Any]) -> E:
    """Return the experiment with the values of a point, and without a sweep."""
    return msgspec.convert(tree_at(experiment, point), type(experiment))


def tree_at(experiment: msgspec.Struct, point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same as a plain mapping, in which a value may be wrong."""
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(experiment))
    for key, value in point.items():
        put_value(tree, key, value, f"sweep.{key}")
    tree.pop("sweep", None)
    return tree


def point_text(point: Mapping[str, Any]) -> str:
    """Return the point for names and labels: each key by as much of its end as distinguishes it, with its value."""
    steps = [key.split(".") for key in point]
    length = next((n for n in range(1, 33) if len({tuple(each[-n:]) for each in steps}) == len(steps)), 1)
    names = [".".join(each[-length:]) for each in steps]
    return ", ".join(f"{name}={_value(value)}" for name, value in zip(names, point.values(), strict=True))


def _value(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return msgspec.json.encode(value).decode().replace('"', "").replace("/", "_")
    return PurePath(value).stem if isinstance(value, str) and "/" in value else shorten(value, 200).strip('"')
