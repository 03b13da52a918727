"""Resolves the lines of a fleet: the number of clients of each line, and its device with the line's overrides."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec

from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.loading import decode
from fleetbed.profiles.rates import RULE_FIGURES, scaled
from fleetbed.profiles.types import Device, Fleet, Link, Provenance, Rates


def sizes(fleet: Fleet) -> list[int]:
    """Return the number of clients of each member, in file order."""
    if fleet.total is not None and fleet.members[0].weight is not None:
        return apportion([member.weight or 0.0 for member in fleet.members], fleet.total)
    return [member.count or 0 for member in fleet.members]


def apportion(weights: list[float], total: int) -> list[int]:
    """Divide `total` by largest remainder: each gets the whole part of its share, the rest go to the largest fractions.

    The arithmetic is exact (a weight is the decimal as written), so that ties are real ties; the earlier one wins.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    shares = [weight * total / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number], number))
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


def overridden(device: Device, override: dict[str, int | float | str], where: str, prefix: str) -> Device:
    """Return the device with some figures replaced, checked like a file."""
    if not override:
        return device
    tree = _without_null(msgspec.to_builtins(device))
    for path, value in override.items():
        _put(tree, path, value, f"{where}: {prefix}")
    kept = [entry for entry in tree.get("provenance", ()) if entry["figure"] not in override]
    ours = [{"figure": path, "kind": "assumed", "note": "Set by the fleet."} for path in override]
    made = decode({**tree, "provenance": [*kept, *ours]}, Device, where, prefix)
    if made.rates is None or made.rates != device.rates or not set(override) & set(RULE_FIGURES):
        return made
    return _with_scaled_rates(device, made.rates, made)


def _with_scaled_rates(device: Device, rates: Rates, made: Device) -> Device:
    """Scale the rates in the device's file with the figures that the fleet changes, by the rule for derived rates."""
    others = tuple(entry for entry in made.provenance if entry.figure.split(".")[0] != "rates")
    note = "The device's own rates, scaled by rule with the figures that the fleet sets."
    entry = Provenance(figure="rates", kind="derived", note=note)
    return msgspec.structs.replace(made, rates=scaled(rates, device, made), provenance=(*others, entry))


def on_own_link(device: Device, link: Link) -> Link:
    """Return the device's default link with the rates measured on this device."""
    if device.link_override is None:
        return link
    return msgspec.structs.replace(
        link, down_mbit_s=device.link_override.down_mbit_s, up_mbit_s=device.link_override.up_mbit_s
    )


def _put(tree: dict[str, Any], path: str, value: int | float | str, at: str) -> None:
    *groups, last = path.split(".")
    if path.split(".")[0] == "provenance":
        raise BadInput(f"{at}: provenance cannot be overridden, only figures can.")
    for group in groups:
        inner = tree.setdefault(group, {})
        if not isinstance(inner, dict):
            raise BadInput(f"{at}: {path!r} goes below {group}, which is a single value: shorten the key path.")
        tree = inner
    if isinstance(tree.get(last), dict):
        raise BadInput(f"{at}: {path!r} is a group, but only single figures can be overridden: choose one below it.")
    tree[last] = value


def _without_null(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_null(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }
