"""Reads a YAML file into a frozen type in one pass, and makes the checks that involve several keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import (
    FLOWER,
    UNDISTURBED,
    Data,
    Evaluation,
    Experiment,
    Model,
    Participation,
    Policy,
    PolicyKind,
    Training,
    count_runs,
    runs,
    settings_of,
)
from fleetbed.profiles.explain import explain
from fleetbed.profiles.rates import lacks_bandwidth
from fleetbed.profiles.sweep import NOT_SWEPT, point_text, tree_at
from fleetbed.profiles.types import MAX_CLIENTS, Device, Fleet, Link, Profile
from fleetbed.profiles.yaml_text import QUOTE, read_mapping, shorten

T = TypeVar("T", bound=Profile)
Kind = Literal["device", "link", "fleet", "experiment"]

TYPES: Final[dict[Kind, type[Profile]]] = {
    "device": Device,
    "link": Link,
    "fleet": Fleet,
    "experiment": Experiment,
}
MAX_RUNS: Final = 10_000
MAX_NAME_BYTES: Final = 200  # file systems allow 255, and the names of locks and parts are a little longer
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
_PLAIN: Final = Policy()  # the defaults
_POLICY_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "deadline": ("deadline_s",),
    "over-select": ("invite", "take"),
    "buffered": ("buffer",),
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


def convert(tree: dict[str, Any], type_: type[T], where: str, prefix: str = "") -> T:
    """Convert a plain mapping to a profile whose values are valid one by one."""
    try:
        return msgspec.convert(tree, type_)
    except msgspec.ValidationError as error:
        raise explain(error, tree, type_, where, prefix) from None


def contradictions(profile: Profile, at: str) -> Iterator[BadInput]:
    """Yield the mistakes of a profile whose values are valid one by one. Sentences start with `at`."""
    yield from _CHECKS[type(profile)](profile, at)


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


def _check_provenance(profile: Device | Link | Fleet, at: str) -> Iterator[BadInput]:
    tree = msgspec.to_builtins(profile)
    del tree["provenance"]
    known = set(_keys(tree))
    for number, entry in enumerate(profile.provenance):
        if entry.figure not in known:
            yield nearest(entry.figure, known, "key", f"{at}provenance.{number}.figure")


def _check_device(device: Device, at: str) -> Iterator[BadInput]:
    """Check a device. Sentences start with `at`: the file, and the key path above the device."""
    memory, power = device.memory, device.power
    for lower, upper in (("available_mib", "visible_mib"), ("visible_mib", "installed_mib")):
        low, high = getattr(memory, lower), getattr(memory, upper)
        if low > high:
            yield BadInput(f"{at}memory.{lower} is {low:g}, but at most memory.{upper} = {high:g} is possible.")
    if device.runtime_mib >= memory.available_mib:
        whose = "memory.runtime_mib is" if memory.runtime_mib is not None else f"runtime {device.runtime} takes"
        yield BadInput(
            f"{at}{whose} {device.runtime_mib:g}, but less than memory.available_mib = "
            f"{memory.available_mib:g} is needed; otherwise no memory is left for training."
        )
    if power.idle_w is not None and power.load_w is not None and power.idle_w > power.load_w:
        yield BadInput(
            f"{at}power.idle_w is {power.idle_w:g}, but at most power.load_w = {power.load_w:g} is possible."
        )
    if device.trains_on == "gpu" and (
        device.gpu is None or not (device.gpu.fp32_gflops_sustained or device.gpu.fp32_gflops_peak)
    ):
        yield BadInput(
            f"{at}trains_on is gpu, but gpu.fp32_gflops_sustained and gpu.fp32_gflops_peak are both missing: "
            "add one of them, or set trains_on to cpu."
        )
    if lacks_bandwidth(device):
        yield BadInput(
            f"{at}there are no rates, and no memory.bandwidth_gb_s_measured to derive them from: add the copy rate of "
            "one core in GB/s (tinymembench's memcpy), or add rates, or run `fleetbed profiles measure` on the device."
        )
    yield from _check_provenance(device, at)


def _check_fleet(fleet: Fleet, at: str) -> Iterator[BadInput]:
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
    yield from _check_provenance(fleet, at)


def _check_weights(fleet: Fleet, at: str) -> Iterator[BadInput]:
    if fleet.total is None:
        yield BadInput(f"{at}total is missing: weights need the number of clients as total.")
    weights = sum(member.weight or 0.0 for member in fleet.members)
    if all(abs(weights - whole) > whole * WEIGHT_TOLERANCE for whole in (1, 100)):
        yield BadInput(f"{at}the weights of members sum to {weights:g}, but 1 or 100 is needed: correct the weights.")


def _check_experiment(experiment: Experiment, at: str) -> Iterator[BadInput]:
    """Check the keys of an experiment that depend on each other, at every point of a sweep."""
    if experiment.sweep:
        yield from _check_sweep(experiment, at)
        return
    yield from _check_paths(experiment, at)
    yield from _check_flower(experiment, at)
    yield from _check_ray(experiment, at)
    for number, policy in enumerate(experiment.policies):
        yield from _check_policy(policy, f"{at}policies.{number}.")
    yield from _check_schedule([change.round for change in experiment.training.schedule], at)
    for number, choice in enumerate(experiment.algorithms):
        yield from _check_path_part(choice.title, f"{at}algorithms.{number}.{'label' if choice.label else 'name'}")
    for number, policy in enumerate(experiment.policies):
        yield from _check_path_part(policy.title, f"{at}policies.{number}.{'label' if policy.label else 'kind'}")
    doubles = [
        *_check_differ([str(seed) for seed in experiment.seeds], f"{at}seeds", "remove one of them"),
        *_check_differ([choice.title for choice in experiment.algorithms], f"{at}algorithms", "give one a label"),
        *_check_differ([policy.title for policy in experiment.policies], f"{at}policies", "give one a label"),
    ]
    yield from doubles
    if not doubles:  # duplicates would make duplicate runs too
        yield from _check_runs(experiment, at)


def _check_sweep(experiment: Experiment, at: str) -> Iterator[BadInput]:
    """Check each value by itself, then what the combinations contradict, then the runs that they make."""
    mistakes: dict[str, BadInput] = {}
    wrong: list[str] = []
    for key, values in experiment.sweep.items():
        known = len(mistakes)
        where = f"{at}sweep.{shorten(key).strip(QUOTE)}"
        if key in NOT_SWEPT:
            mistakes[key] = BadInput(f"{where} cannot be swept: {NOT_SWEPT[key]}.")
            wrong.append(key)
            continue
        for mistake in _check_differ([point_text({key: value}) for value in values], where, "remove one of them"):
            mistakes[str(mistake)] = mistake
        for value in values:
            told = f"{at.removesuffix(': ')} with sweep {shorten(point_text({key: value})).strip(QUOTE)}"
            try:
                convert(tree_at(experiment, {key: value}), Experiment, told)
            except BadInput as error:
                text = str(error) if str(error).startswith(told) else f"{at}{error}"
                mistakes[text] = BadInput(text)
        if len(mistakes) > known:
            wrong.append(key)
    rest = replace(experiment, sweep={key: values for key, values in experiment.sweep.items() if key not in wrong})
    if count_runs(rest) <= MAX_RUNS:
        for one in settings_of(rest):
            mistakes |= {str(mistake): mistake for mistake in _check_experiment(one, at)}
    yield from mistakes.values() if mistakes else _check_runs(experiment, at)


def _check_runs(experiment: Experiment, at: str) -> Iterator[BadInput]:
    if (size := count_runs(experiment)) > MAX_RUNS:
        yield BadInput(
            f"{at}algorithms, policies, seeds and sweep make {size} runs, but at most {MAX_RUNS} are possible: "
            "split it."
        )
        return  # their names alone could fill the memory
    names = [run.name for run in runs(experiment)]
    yield from _check_differ(names, f"{at}the names of the runs", "change a label")
    longest = max(names, key=lambda name: len(name.encode(errors="surrogateescape")), default="")
    if (size := len(longest.encode(errors="surrogateescape"))) > MAX_NAME_BYTES:
        yield BadInput(
            f"{at}the run {shorten(longest)} would have a folder name of {size} bytes, but at most "
            f"{MAX_NAME_BYTES} are possible: shorten a label."
        )


def _check_flower(experiment: Experiment, at: str) -> Iterator[BadInput]:
    """Check that an app comes with nothing that it would not read, and that only an app is metered."""
    source = experiment.timing.source
    if experiment.flower is None:
        if source == "metered":
            yield BadInput(
                f"{at}timing.source is metered, which is for Flower apps: the methods of fleetbed declare their work, "
                "so use enforced or modelled."
            )
        return
    if source != "metered":
        yield BadInput(
            f"{at}timing.source is {source}, but a Flower app does not declare its work, so only metered is possible: "
            "remove timing.source."
        )
    if [choice.name for choice in experiment.algorithms] != [FLOWER]:
        yield BadInput(f"{at}algorithms is given, but flower.app is the algorithm: remove one of them.")
    unread: dict[str, tuple[object, object]] = {
        "data": (experiment.data, Data()),
        "model": (experiment.model, Model()),
        "training": (experiment.training, Training()),
        "policies": (experiment.policies, (_PLAIN,)),
        "participation": (experiment.participation, Participation()),
        "evaluation": (experiment.evaluation, Evaluation(targets=experiment.evaluation.targets)),
    }
    for key, (found, default) in unread.items():
        if found != default:
            yield BadInput(f"{at}{key} is given, but a Flower app decides about that itself: remove {key}.")
    for number, target in enumerate(experiment.evaluation.targets):
        if target > 1:
            yield BadInput(f"{at}evaluation.targets.{number} is {target:g}, but an app's accuracy is from 0 to 1.")
    if experiment.processes in ("inline", "ray"):
        yield BadInput(
            f"{at}processes is {experiment.processes}, but a Flower app needs processes of this host: use resident or "
            "on-demand."
        )


def _check_ray(experiment: Experiment, at: str) -> Iterator[BadInput]:
    """Check that device time does not depend on the hosts, which differ from node to node."""
    source = experiment.timing.source
    if experiment.processes == "ray" and experiment.flower is None and source not in UNDISTURBED:
        yield BadInput(
            f"{at}processes is ray, but timing.source is {source}, which measures a single host: set timing.source to "
            f"{' or '.join(UNDISTURBED)}, or use another value of processes."
        )


def _check_path_part(title: str, at: str) -> Iterator[BadInput]:
    """Check a title that becomes part of a folder's name: it must not be a path, and must be easy to type."""
    if not title.isprintable():
        yield BadInput(f"{at} is {title[:60]!a}, but only printable characters are possible: remove the others.")
    elif title != title.strip() or title.startswith(".") or "/" in title or "\\" in title or not title:
        yield BadInput(
            f"{at} is {shorten(title)}, but it becomes part of a folder's name: it must have no slash, no dot at its "
            "start and no space at either end."
        )


def _check_schedule(rounds: list[int], at: str) -> Iterator[BadInput]:
    for number, (before, after) in enumerate(pairwise(rounds), 1):
        if after <= before:
            yield BadInput(
                f"{at}training.schedule.{number}.round is {after}, but the entry before it has {before}: "
                f"list the changes in the order of their rounds, at most one for each."
            )


def _check_differ(names: list[str], at: str, fix: str) -> Iterator[BadInput]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield BadInput(f"{at}: {shorten(name)} occurs twice, but all must differ: {fix}.")
        seen.add(name)


def _check_paths(experiment: Experiment, at: str) -> Iterator[BadInput]:
    partition, availability, timing = experiment.data.partition, experiment.availability, experiment.timing
    for key, needed, path_key, path in (
        ("data.partition.kind", partition.kind == "column", "data.partition.column", partition.column),
        ("data.partition.kind", partition.kind == "file", "data.partition.file", partition.file),
        ("availability.kind", availability.kind == "trace", "availability.trace", availability.trace),
        ("timing.source", timing.source == "replay", "timing.replay", timing.replay),
    ):
        value = path_key.rsplit(".", 1)[1]
        if needed and not path:
            yield BadInput(f"{at}{key} is {value}, but {path_key} is missing: give it there.")
        if path and not needed:
            yield BadInput(
                f"{at}{path_key} is given, but only {key}: {value} reads it: set that, or remove {path_key}."
            )


def _check_policy(policy: Policy, at: str) -> Iterator[BadInput]:
    for key in _POLICY_NEEDS.get(policy.kind, ()):
        if getattr(policy, key) is None:
            yield BadInput(f"{at}kind is {policy.kind}, but {at.rsplit(' ', 1)[-1]}{key} is missing: add it.")
    for key, kinds in _POLICY_KEYS.items():
        if getattr(policy, key) != getattr(_PLAIN, key) and policy.kind not in kinds:
            yield BadInput(
                f"{at}{key} is given, but kind is {policy.kind} and only {' and '.join(kinds)} "
                f"read{'s' * (len(kinds) == 1)} it: remove it or change kind."
            )
    if policy.params and policy.kind in get_args(PolicyKind):
        yield BadInput(f"{at}params is given, but kind is {policy.kind}, which has none: remove it or change kind.")
    if policy.take is not None and policy.invite is not None and policy.take > policy.invite:
        yield BadInput(f"{at}take is {policy.take}, but at most invite = {policy.invite} is possible.")


_CHECKS: Final[dict[type[Profile], Callable[[Any, str], Iterator[BadInput]]]] = {
    Device: _check_device,
    Link: _check_provenance,
    Fleet: _check_fleet,
    Experiment: _check_experiment,
}
