"""Applies `--set key.path=value`: changes one value of a mapping before it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.yaml_text import MAX_DEPTH, QUOTE, parse, shorten


def plain_tree(value: Any, where: str) -> Any:
    """Return a Python value as the mappings, lists, numbers and text that a YAML file can hold."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_simpler))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"{where} has a value that YAML cannot hold: {' '.join(str(error).split())}.") from None


def as_settings(values: Mapping[str, Any]) -> list[str]:
    """Return a Python mapping of key paths to values as the settings that `--set` takes; JSON is YAML too."""
    return [f"{key}={msgspec.json.encode(plain_tree(value, f'set {key!r}')).decode()}" for key, value in values.items()]


def _simpler(value: Any) -> Any:
    """Convert what is neither YAML nor a type of msgspec: paths, and the scalars and arrays of numpy and torch."""
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def apply_settings(tree: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Apply the settings to the mapping, in order. A number in a key path is a position in a list.

    Missing mappings and lists on the path are created; the position after the last one appends to a list.
    """
    for item in sets:
        key, equals, text = item.partition("=")
        where = f"--set {shorten(item, 80).strip(QUOTE)}"
        if not equals or not key.strip():
            raise BadInput(f"{where}: key.path=value is needed, for example --set rounds=20.")
        put_value(tree, key.strip(), parse(text, where), where)
    return tree


def put_value(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Put a value into the mapping at a key path. Sentences start with `where`."""
    steps = key.split(".")
    if len(steps) > MAX_DEPTH:
        raise BadInput(f"{where}: the key path has {len(steps)} parts, but at most {MAX_DEPTH} are allowed.")
    if "" in steps:
        raise BadInput(f"{where}: the key path has an empty part: write it as in algorithms.0.params.mu.")
    _put(tree, steps, value, where)


def _put(tree: Any, steps: list[str], value: Any, where: str) -> None:
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        new = value if last else [] if steps[number + 1].isdecimal() else {}
        path = ".".join(steps[:number]) or "the top"
        if isinstance(tree, list):
            tree = _in_list(tree, step, new, last, f"{where}: {path}")
        elif isinstance(tree, dict):
            if last or tree.get(step) is None:
                tree[step] = new
            tree = tree[step]
        else:
            raise BadInput(f"{where}: {path} is {shorten(tree)}, which has nothing below it: shorten the key path.")


def _in_list(items: list[Any], step: str, new: Any, last: bool, at: str) -> Any:
    if not step.isdecimal() or len(step) > 9 or int(step) > len(items):
        raise BadInput(f"{at} is a list of {len(items)}, but {shorten(step)} was asked for: use 0 to {len(items)}.")
    place = int(step)
    if place == len(items):
        items.append(new)
    elif last or items[place] is None:
        items[place] = new
    return items[place]
