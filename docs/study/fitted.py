"""Runs each method for as many rounds as fit into the device time that HeteroAvg takes for its own.

    python docs/study/fitted.py runs/11/cifar10 ...    # folders of studies; the runs go to runs/11/fitted

A run that is cut off when that time is over has never had the low learning rate of the last rounds. Here the rate falls
after the same share of the rounds as in the study. Methods that take less time get more rounds, at most MOST times as
many. What was begun before is continued.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from claims import rows_of
from orders import BASE, METHODS, curves_of

import fleetbed
from fleetbed.emulator.records.study_file import STUDY, parse_study
from fleetbed.profiles.experiment import AlgorithmChoice, Experiment

MOST = 2
EVALUATIONS = 8


def rounds_that_fit(rounds: int, taken_s: float, budget_s: float) -> int:
    return min(MOST * rounds, int(rounds * budget_s / taken_s))


def fitted(experiment: Experiment, algorithm: AlgorithmChoice, seed: int, rounds: int) -> Experiment:
    """Return the experiment of this method alone, with its schedule stretched or shrunk to these rounds."""
    changes = tuple(
        msgspec.structs.replace(change, round=1 + round((change.round - 1) * rounds / experiment.rounds))
        for change in experiment.training.schedule
    )
    return msgspec.structs.replace(
        experiment,
        algorithms=(algorithm,),
        seeds=(seed,),
        rounds=rounds,
        training=msgspec.structs.replace(experiment.training, schedule=changes),
        evaluation=msgspec.structs.replace(experiment.evaluation, every=max(1, rounds // EVALUATIONS)),
    )


def run_all(folder: Path) -> None:
    experiment = parse_study((folder / STUDY).read_bytes(), folder / STUDY).experiment
    curves = curves_of(rows_of(folder), folder.name)
    choices = {choice.title: choice for choice in experiment.algorithms}
    for method in (name for name in METHODS if name in curves and name != BASE):
        for seed, curve in curves[method].items():
            rounds = rounds_that_fit(experiment.rounds, float(curve[-1]["time"]), float(curves[BASE][seed][-1]["time"]))
            out = folder.parent / "fitted" / f"{method}-{seed}" / f"{folder.name}-fitted"
            if out.exists():
                fleetbed.run(resume=out)
            elif rounds != experiment.rounds:
                fleetbed.run(msgspec.to_builtins(fitted(experiment, choices[method], seed, rounds)), out=out)


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        sys.exit(__doc__)
    for folder in arguments:
        run_all(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
