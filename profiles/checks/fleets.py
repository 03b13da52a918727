"""Checks the keys of a fleet that depend on each other: counts or weights, and its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fleetbed.profiles.checks.provenance import check_provenance
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.types import MAX_CLIENTS, Fleet

WEIGHT_TOLERANCE: Final = 1e-3


def check_fleet(fleet: Fleet, at: str) -> Iterator[BadInput]:
    """Check that a fleet has counts or weights, not both, that weights sum to 1 or 100, and its size."""
    weighted = [member.weight is not None for member in fleet.members]
    for number, member in enumerate(fleet.members):
        if (member.count is None) == (member.weight is None):
            given = "neither count nor weight" if member.count is None else "both count and weight"
            yield BadInput(f"{at}members.{number} has {given}, but exactly one of them is needed.")
        if weighted[number] != weighted[0]:
            given, missing = ("weight", "count") if weighted[number] else ("count", "weight")
            yield BadInput(
                f"{at}members.{number} has a {given}, but members.0 has a {missing}: "
                "give every member a count or every member a weight."
            )
        if member.link is not None and any(key.split(".")[0] == "link_override" for key in member.override):
            yield BadInput(
                f"{at}members.{number}.override has link_override, which belongs to the device's own link, but "
                f"members.{number}.link is {member.link}: remove one of them."
            )
    if weighted[0]:
        yield from _check_weights(fleet, at)
    counted = sum(member.count or 0 for member in fleet.members)
    if not weighted[0] and fleet.total is not None and fleet.total != counted:
        yield BadInput(f"{at}total is {fleet.total}, but the counts sum to {counted}: correct or remove total.")
    if (size := fleet.total or counted) > MAX_CLIENTS:
        yield BadInput(f"{at}the fleet has {size} clients, but at most {MAX_CLIENTS} are possible.")
    yield from check_provenance(fleet, at)


def _check_weights(fleet: Fleet, at: str) -> Iterator[BadInput]:
    if fleet.total is None:
        yield BadInput(f"{at}total is missing: weights need the number of clients as total.")
    weights = sum(member.weight or 0.0 for member in fleet.members)
    if all(abs(weights - whole) > whole * WEIGHT_TOLERANCE for whole in (1, 100)):
        yield BadInput(f"{at}the weights of members sum to {weights:g}, but 1 or 100 is needed: correct the weights.")
