"""From a YAML file to a frozen type in one pass, and the checks that need more than one key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Experiment, Policy, runs
from fleetbed.profiles.explain import explain
from fleetbed.profiles.types import Device, Fleet, Link, Profile
from fleetbed.profiles.yaml_text import read_mapping, shorten

T = TypeVar("T", bound=Profile)
Kind = Literal["device", "link", "fleet", "experiment"]

TYPES: Final[dict[Kind, type[Profile]]] = {
    "device": Device,
    "link": Link,
    "fleet": Fleet,
    "experiment": Experiment,
}
MAX_CLIENTS: Final = 100_000
MAX_RUNS: Final = 10_000
WEIGHT_TOLERANCE: Final = 1e-3

# The keys that only some kinds of policy read; elsewhere they would silently do nothing.
_POLICY_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "deadline_s": ("deadline",),
    "late": ("deadline",),
    "partial": ("deadline",),
    "invite": ("over-select",),
    "take": ("over-select",),
    "buffer": ("buffered",),
    **dict.fromkeys(
        ("concurrency", "mixing", "staleness", "exponent", "hinge_a", "hinge_b"),
        ("async", "buffered"),
    ),
}
_PLAIN: Final = Policy()  # what is not given is as here
_POLICY_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "deadline": ("deadline_s",),
    "over-select": ("invite", "take"),
    "buffered": ("buffer",),
}


def read(path: Path, type_: type[T]) -> T:
    """The profile in the file, checked."""
    return decode(read_mapping(path), type_, str(path))


def decode(tree: dict[str, Any], type_: type[T], where: str, prefix: str = "") -> T:
    """The checked profile that a plain mapping describes. `where` and `prefix` lead the error sentence."""
    try:
        profile = msgspec.convert(tree, type_)
    except msgspec.ValidationError as error:
        raise explain(error, tree, type_, where, prefix) from None
    check: Callable[[Any, str], None] = _CHECKS[type_]
    check(profile, f"{where}: {prefix}." if prefix else f"{where}: ")
    return profile


def figures(profile: Profile) -> Iterator[str]:
    """The dotted key path of every number of a profile that it states itself."""
    yield from _numbers(_stated(profile), "")


def without_provenance(profile: Device | Link) -> list[str]:
    """The figures that no provenance entry covers."""
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


def _check_provenance(profile: Device | Link | Fleet, at: str) -> None:
    tree = msgspec.to_builtins(profile)
    del tree["provenance"]
    known = set(_keys(tree))
    for number, entry in enumerate(profile.provenance):
        if entry.figure not in known:
            raise nearest(entry.figure, known, "key", f"{at}provenance.{number}.figure")


def check_device(device: Device, at: str) -> None:
    """`at` is what a sentence starts with: the file, and the key path above the device."""
    memory, power = device.memory, device.power
    for lower, upper in (("available_mib", "visible_mib"), ("visible_mib", "installed_mib")):
        low, high = getattr(memory, lower), getattr(memory, upper)
        if low > high:
            raise BadInput(f"{at}memory.{lower} is {low:g}, but at most memory.{upper} = {high:g} is possible.")
    if memory.runtime_mib >= memory.available_mib:
        raise BadInput(
            f"{at}memory.runtime_mib is {memory.runtime_mib:g}, but less than memory.available_mib = "
            f"{memory.available_mib:g} is needed, or nothing is left for training."
        )
    if power.idle_w is not None and power.load_w is not None and power.idle_w > power.load_w:
        raise BadInput(
            f"{at}power.idle_w is {power.idle_w:g}, but at most power.load_w = {power.load_w:g} is possible."
        )
    if device.trains_on == "gpu" and (
        device.gpu is None or not (device.gpu.fp32_gflops_sustained or device.gpu.fp32_gflops_peak)
    ):
        raise BadInput(
            f"{at}trains_on is gpu, but gpu.fp32_gflops_sustained and gpu.fp32_gflops_peak are both missing: "
            "give one of them, or let it train on the cpu."
        )
    _check_provenance(device, at)


def check_fleet(fleet: Fleet, at: str) -> None:
    """Counts or weights, not both; weights sum; not more clients than can be handled."""
    weighted = [member.weight is not None for member in fleet.members]
    for number, member in enumerate(fleet.members):
        if (member.count is None) == (member.weight is None):
            given = "neither count nor weight" if member.count is None else "both count and weight"
            raise BadInput(f"{at}members.{number} has {given}, but exactly one of them is needed.")
        if weighted[number] != weighted[0]:
            given, missing = ("weight", "count") if weighted[number] else ("count", "weight")
            raise BadInput(
                f"{at}members.{number} has a {given}, but members.0 has a {missing}: "
                "give every member a count or every member a weight."
            )
        if member.link is not None and any(key.split(".")[0] == "link_override" for key in member.override):
            raise BadInput(
                f"{at}members.{number}.override has link_override, which is of the device's own link, but "
                f"members.{number}.link is {member.link}: remove one of them."
            )
    if weighted[0]:
        _check_weights(fleet, at)
    counted = sum(member.count or 0 for member in fleet.members)
    if not weighted[0] and fleet.total is not None and fleet.total != counted:
        raise BadInput(f"{at}total is {fleet.total}, but the counts sum to {counted}: correct or remove total.")
    if (size := fleet.total or counted) > MAX_CLIENTS:
        raise BadInput(f"{at}the fleet has {size} clients, but at most {MAX_CLIENTS} are possible.")
    _check_provenance(fleet, at)


def _check_weights(fleet: Fleet, at: str) -> None:
    if fleet.total is None:
        raise BadInput(f"{at}total is missing: weights need the number of clients as total.")
    weights = sum(member.weight or 0.0 for member in fleet.members)
    if all(abs(weights - whole) > whole * WEIGHT_TOLERANCE for whole in (1, 100)):
        raise BadInput(f"{at}the weights of members sum to {weights:g}, but 1 or 100 is needed: correct the weights.")


def check_experiment(experiment: Experiment, at: str) -> None:
    """What one key says about another."""
    _check_paths(experiment, at)
    for number, policy in enumerate(experiment.policies):
        _check_policy(policy, f"{at}policies.{number}.")
    _check_differ([str(seed) for seed in experiment.seeds], f"{at}seeds", "remove one of them")
    _check_differ([choice.title for choice in experiment.algorithms], f"{at}algorithms", "give one a label")
    _check_differ([policy.title for policy in experiment.policies], f"{at}policies", "give one a label")
    if (size := len(experiment.algorithms) * len(experiment.policies) * len(experiment.seeds)) > MAX_RUNS:
        raise BadInput(f"{at}algorithms, policies and seeds make {size} runs, but at most {MAX_RUNS} can be: split it.")
    _check_differ([run.name for run in runs(experiment)], f"{at}the names of the runs", "change a label")


def _check_differ(names: list[str], at: str, fix: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadInput(f"{at}: {shorten(name)} is there twice, but each must differ: {fix}.")
        seen.add(name)


def _check_paths(experiment: Experiment, at: str) -> None:
    partition, availability, timing = experiment.data.partition, experiment.availability, experiment.timing
    for key, needed, path_key, path in (
        ("data.partition.kind", partition.kind == "file", "data.partition.file", partition.file),
        ("availability.kind", availability.kind == "trace", "availability.trace", availability.trace),
        ("timing.source", timing.source == "replay", "timing.replay", timing.replay),
    ):
        value = path_key.rsplit(".", 1)[1]
        if needed and not path:
            raise BadInput(f"{at}{key} is {value}, but {path_key} is missing: give the path there.")
        if path and not needed:
            raise BadInput(
                f"{at}{path_key} is given, but only {key}: {value} reads it: set that, or remove {path_key}."
            )


def _check_policy(policy: Policy, at: str) -> None:
    for key in _POLICY_NEEDS.get(policy.kind, ()):
        if getattr(policy, key) is None:
            raise BadInput(f"{at}kind is {policy.kind}, but {at.rsplit(' ', 1)[-1]}{key} is missing: add it.")
    for key, kinds in _POLICY_KEYS.items():
        if getattr(policy, key) != getattr(_PLAIN, key) and policy.kind not in kinds:
            raise BadInput(
                f"{at}{key} is given, but kind is {policy.kind} and only {' and '.join(kinds)} "
                f"read{'s' * (len(kinds) == 1)} it: remove it or change kind."
            )
    if policy.take is not None and policy.invite is not None and policy.take > policy.invite:
        raise BadInput(f"{at}take is {policy.take}, but at most invite = {policy.invite} is possible.")


_CHECKS: Final[dict[type[Profile], Callable[[Any, str], None]]] = {
    Device: check_device,
    Link: _check_provenance,
    Fleet: check_fleet,
    Experiment: check_experiment,
}
