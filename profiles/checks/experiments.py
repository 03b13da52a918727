"""Checks the keys of an experiment that depend on each other, at every point of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, get_args

from msgspec.structs import replace

from fleetbed.profiles.errors import BadInput
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
from fleetbed.profiles.explain import convert
from fleetbed.profiles.sweep import NOT_SWEPT, point_text, tree_at
from fleetbed.profiles.yaml_text import QUOTE, shorten

MAX_RUNS: Final = 10_000
MAX_NAME_BYTES: Final = 200  # file systems allow 255, and the names of locks and parts are a little longer

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


def check_experiment(experiment: Experiment, at: str) -> Iterator[BadInput]:
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
            mistakes |= {str(mistake): mistake for mistake in check_experiment(one, at)}
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
