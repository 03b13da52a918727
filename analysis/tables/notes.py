"""Cautions that readers of a figure need: sentences for the tables and for the report's first page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fleetbed.analysis.tables.runs import Run
from fleetbed.analysis.tables.series import Series, by_shown, runs_of, short_text
from fleetbed.emulator.method.series import TITLES, TargetSeries


def cautions(series: Sequence[Series]) -> list[str]:
    """Return all cautions, those about the whole study first."""
    runs = runs_of(series)
    found = [*series_notes(series), *variant_notes(series), *run_differences(runs).values(), *processor_notes(series)]
    found += [
        f"{run.name} is {run.state}. Its results are shown as far as they go." for run in runs if not run.finished
    ]
    diverged: dict[str, list[str]] = {}
    for one in series:
        for run in one.runs:
            if how := divergence(run, one.shown):
                diverged.setdefault(how, []).append(run.name)
    found += [f"{', '.join(names)} diverged {how}" for how, names in diverged.items()]
    degraded = [run.name for run in runs if run.about.degraded]
    if degraded:
        found.append(
            f"Device times of {', '.join(degraded)} are degraded: the host was too slow for the plan "
            "(the 95th percentile of measured / planned compute time is above 1.05)."
        )
    reasons = {run.name: (run.about.calibration or {}).get("disturbed") or {} for run in runs}
    disturbed = {name: str(next(iter(why.values()))) for name, why in reasons.items() if why}
    if disturbed:
        found.append(
            f"{', '.join(disturbed)} may have been paced too fast or too slowly: other processes disturbed the "
            f"calibration of the host ({'; '.join(dict.fromkeys(disturbed.values()))})."
        )
    return found


def divergence(run: Run, shown: TargetSeries) -> str | None:
    """Describe when and how the run diverged; None if all of its models always had a finite loss."""
    tested = [evaluation for evaluation in run.evaluations if evaluation.samples and evaluation.series == shown]
    diverged = [evaluation for evaluation in tested if evaluation.diverged]
    if not diverged:
        return None
    first = min(diverged, key=lambda evaluation: evaluation.version)
    count = sum(one.version == first.version for one in diverged)
    models = sum(one.version == first.version for one in tested)
    return (
        f"in round {first.round}: the loss of {count} of {models} models is not finite. "
        "The curve has a gap where no model has a finite loss."
    )


def run_differences(runs: Sequence[Run]) -> dict[str, str]:
    """Return a sentence for each setting in which the runs differ although a reader would expect it to be the same."""
    found = {}
    swept = [{key.split(".")[0] for key in run.config.point} for run in runs]
    for what, key, values in (
        ("data", "data", {short_text(run.config.experiment.data) for run in runs}),
        ("targets", "evaluation", {short_text(run.config.experiment.evaluation.targets) for run in runs}),
        ("fleet", "fleet", {run.config.experiment.fleet for run in runs}),
        ("model family", "model", {run.config.model.family for run in runs}),
        ("own code", "", _changed_files(runs)),
        ("rounds", "rounds", {str(run.config.experiment.rounds) for run in runs}),
        ("timing", "timing", {run.config.experiment.timing.source for run in runs}),
    ):
        if len(values) > 1 and not all(key in tops for tops in swept):  # a sweep of it was asked for
            found[what] = f"These runs differ in their {what}: {'; '.join(sorted(values))}."
    return found


def processor_notes(series: Sequence[Series]) -> list[str]:
    """Say on which processors runs were carried out that were not all on the same host, and warn of unequal pairs."""
    runs = runs_of(series)
    hosts = {run.about.host.name for run in runs if run.about.host and run.about.host.name}
    kinds = {_processor(run) for run in runs}
    if len(kinds) < 2:
        text = (
            f"The runs were carried out on {len(hosts)} hosts with the same processor, {min(kinds)}." if kinds else ""
        )
        return [text] if len(hosts) > 1 else []
    by_seed: dict[int, dict[str, list[str]]] = {}
    for one in series:
        for run in one.runs:
            by_seed.setdefault(run.config.seed, {}).setdefault(_processor(run), []).append(one.label)
    unequal = {seed: found for seed, found in by_seed.items() if len(found) > 1}
    if not unequal:
        parts = "; ".join(f"seed {seed}: {min(found)}" for seed, found in sorted(by_seed.items()))
        return [f"Runs were carried out on different processors, but those of one seed on the same: {parts}."]
    parts = "; ".join(
        f"seed {seed}: {', '.join(f'{_joined(labels)} on {kind}' for kind, labels in sorted(found.items()))}"
        for seed, found in sorted(unequal.items())
    )
    return [
        "Runs that are compared were carried out on different processors, so part of a difference may come from these: "
        f"{parts}."
    ]


def _processor(run: Run) -> str:
    return (run.about.host and run.about.host.cpu) or "an unknown processor"


def _joined(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _changed_files(runs: Sequence[Run]) -> set[str]:
    """The user's own files that were not the same in all runs, with what they were."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for path, digest in (run.about.files or {}).items():
            found.setdefault(path, set()).add(digest)
    return {f"{path} {digest[:12]}" for path, digests in found.items() if len(digests) > 1 for digest in digests}


def series_notes(series: Sequence[Series]) -> list[str]:
    """Name the series of the accuracies, unless it is the usual one, and methods that are not compared."""
    notes = []
    groups = by_shown(series)
    if len(groups) > 1:
        parts = "; ".join(f"{_names(members)} in {shown} ({TITLES[shown]})" for shown, members in groups.items())
        notes.append(
            f"Methods are shown in different series, which are not compared: {parts}. Choose one with --series."
        )
    elif series and (shown := series[0].shown) != "global":
        notes.append(f"Accuracies are in the series {shown}: {TITLES[shown]}.")
    for one in series:
        if one.evaluated and one.shown not in one.evaluated:
            notes.append(f"{one.label} has no series {one.shown}; it has {', '.join(one.evaluated)}.")
    return notes


def _names(series: Sequence[Series]) -> str:
    return ", ".join(one.label for one in series)


def variant_notes(series: Sequence[Series]) -> list[str]:
    """Return a note if methods of the same study trained different models on the same clients."""
    by_method = {one.label: {run.config.seed: _trained(run) for run in one.runs if run.clients} for one in series}
    seeds = sorted({seed for trained in by_method.values() for seed in trained})
    for seed in seeds:
        found = {label: trained[seed] for label, trained in by_method.items() if seed in trained}
        if len({tuple(sorted(trained.items())) for trained in found.values()}) > 1:
            counts = {label: _counts(trained) for label, trained in found.items()}
            parts = "; ".join(f"{label} {count}" for label, count in counts.items())
            if len(set(counts.values())) == 1:
                parts = f"{next(iter(counts.values()))}, but not on the same clients"
            return [
                "These methods trained different variants, so part of a difference may come from the models: "
                f"{parts}{'' if len(seeds) == 1 else f' (seed {seed})'}."
            ]
    return []


def _trained(run: Run) -> dict[int, str]:
    """Return the variants that each client trained, in order: after running out of memory it uses a smaller one."""
    variants = {client.client: dict.fromkeys([client.variant or "unfit"]) for client in run.clients}
    for task in run.tasks:
        variants[task.client][task.variant] = None
    return {client: ", then ".join(names) for client, names in variants.items()}


def _counts(trained: dict[int, str]) -> str:
    return ", ".join(f"{count} × {variant}" for variant, count in sorted(Counter(trained.values()).items()))
