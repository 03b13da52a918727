"""Runs methods that spend more than HeteroAvg for as many rounds as fit into what HeteroAvg spends in all its rounds.

    python docs/study/fitted.py runs/11/cifar10 ...    # folders of studies

A method that is just cut off there has never had the low learning rate of the last rounds. Here the rate falls after
the same share of the rounds as in the study. There are runs for device time, bytes and energy: those of FedIN for time
go to runs/11-fedin-time/cifar10-time. What was begun before is continued.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from claims import rows_of
from orders import BASE, BUDGETS, METHODS, SAME, curves_of, spent

import fleetbed
from fleetbed.emulator.records.study_file import STUDY, parse_study
from fleetbed.profiles.experiment import AlgorithmChoice, Experiment

EVALUATIONS = 8


def fitted(experiment: Experiment, algorithm: AlgorithmChoice, rounds: int) -> Experiment:
    """Return the experiment of this method alone, with its schedule shrunk to these rounds."""
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


def run_all(folder: Path) -> None:
    experiment = parse_study((folder / STUDY).read_bytes(), folder / STUDY).experiment
    curves = curves_of(rows_of(folder), folder.name)
    choices = {choice.title: choice for choice in experiment.algorithms}
    for axis in (axis for axis in BUDGETS if axis != "rounds"):
        for method in (name for name in METHODS if name in curves and name != BASE):
            out = folder.parent.with_name(f"{folder.parent.name}-{method}-{axis}") / f"{folder.name}-{axis}"
            if out.exists():
                fleetbed.run(resume=out)
            elif (share := spent(curves, method, axis)) > SAME:
                rounds = round(experiment.rounds / share)
                fleetbed.run(msgspec.to_builtins(fitted(experiment, choices[method], rounds)), out=out)


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        sys.exit(__doc__)
    for folder in arguments:
        run_all(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
