"""Runs each method for as many rounds as fit into what HeteroAvg spends in all its rounds, at most MOST times as many.

    python docs/study/fitted.py time|bytes|joules runs/11/cifar10 ...    # folders of studies

A method that is just cut off there has never had the low learning rate of the last rounds, and one that spends less
could go on. Here the rate falls after the same share of the rounds as in the study. The runs of FedIN for device time
go to runs/11-fedin-time/cifar10-time. What was begun before is continued.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from claims import rows_of
from orders import BASE, BUDGETS, METHODS, PERSONAL, curves_of, same, spent

import fleetbed
from fleetbed.emulator.records.study_file import STUDY, parse_study
from fleetbed.profiles.experiment import AlgorithmChoice, Experiment

EVALUATIONS = 8
MOST = 8


def rounds_that_fit(rounds: int, share: float) -> int:
    """Return with how many rounds a method comes closest to the base, of which it spends this share in so many."""
    return min(round(rounds / share), MOST * rounds)


def fitted(experiment: Experiment, algorithm: AlgorithmChoice, rounds: int) -> Experiment:
    """Return the experiment of this method alone for these rounds, with its schedule scaled."""
    changes = tuple(
        msgspec.structs.replace(change, round=1 + round((change.round - 1) * rounds / experiment.rounds))
        for change in experiment.training.schedule
    )
    return msgspec.structs.replace(
        experiment,
        algorithms=(algorithm,),
        rounds=rounds,
        training=msgspec.structs.replace(experiment.training, schedule=changes),
        evaluation=msgspec.structs.replace(experiment.evaluation, every=max(1, rounds // EVALUATIONS)),
    )


def run_all(axis: str, folder: Path) -> None:
    experiment = parse_study((folder / STUDY).read_bytes(), folder / STUDY).experiment
    curves = curves_of(rows_of(folder), folder.name)
    choices = {choice.title: choice for choice in experiment.algorithms}
    for method in (name for name in METHODS if name in curves and name not in (BASE, *PERSONAL)):
        out = folder.parent.with_name(f"{folder.parent.name}-{method}-{axis}") / f"{folder.name}-{axis}"
        if out.exists():
            fleetbed.run(resume=out)
        elif not same(share := spent(curves, method, axis)):
            rounds = rounds_that_fit(experiment.rounds, share)
            fleetbed.run(msgspec.to_builtins(fitted(experiment, choices[method], rounds)), out=out)


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case [axis, _, *_] if axis in BUDGETS:
            for folder in arguments[1:]:
                run_all(axis, Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
